"""The denoiser of a pi model: noisy chunks, flow times and an observation's prefix -> velocities.

pi0.5:  actions -- action_in_proj --> tokens           time -- time_mlp --> condition of every norm
pi0:    (actions -- action_in_proj, time) -- action_time_mlp --> tokens, after one token of the state

The action expert: Gemma layers whose tokens attend to a prefix's keys and values and to one another.

    suffix tokens [B, S, width]
      each layer:  norm -> queries; keys and values of (prefix, suffix) -> attention -> o_proj -> + residual
                   norm -> gated MLP -> + residual

The prefix does not attend to the suffix, so all denoising steps share its keys and values (openpi's blockwise
attention).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cosmos_rl_vla.models.flow import bounded_std
from cosmos_rl_vla.models.pi.config import GemmaSize, PiConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoised:
    """One pass of the expert."""

    velocity: Tensor
    """[B, model_horizon, model_action_dim] float32."""
    hidden: Tensor
    """[B, model_horizon, width]: the expert's outputs at the actions."""
    std: Tensor | None
    """[B, model_horizon, model_action_dim] float32 of noise "learned"; None of any other."""


class Denoiser(nn.Module):
    """The action expert with its input and output projections."""

    def __init__(self, config: PiConfig) -> None:
        super().__init__()
        width, actions = config.expert.width, config.model_action_dim
        self.adaptive = config.family == "pi05"
        self.max_state_dim = config.max_state_dim
        self.noise = config.noise
        self.expert = ActionExpert(config.expert, adaptive=self.adaptive)
        self.action_in_proj = nn.Linear(actions, width)
        self.action_out_proj = nn.Linear(width, actions)
        if self.adaptive:
            self.time_mlp_in = nn.Linear(width, width)
            self.time_mlp_out = nn.Linear(width, width)
        else:
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)
        self.state_proj = nn.Linear(config.max_state_dim, width) if config.state == "suffix" else None
        self.noise_head = self._noise_head()

    def init_noise_head(self) -> None:
        """Recreate the noise head with random initial values."""
        self.noise_head = self._noise_head()

    def forward(self, x: Tensor, *, tau: Tensor, state: Tensor, prefix: Prefix) -> Denoised:
        """Return the velocity at chunks `x` [B, model_horizon, model_action_dim] and times `tau` [B]."""
        dtype = self.action_in_proj.weight.dtype
        tokens, condition = self._embed(x.to(dtype), embed_time(tau, width=self.action_in_proj.out_features).to(dtype))
        blocks = torch.ones(x.shape[1], dtype=torch.int64, device=x.device)
        if self.state_proj is not None:
            padded = pad_last(state, self.max_state_dim).to(dtype)
            tokens = torch.cat([self.state_proj(padded)[:, None], tokens], dim=1)
            blocks = F.pad(blocks, (1, 0))  # the state does not attend to the actions
        hidden = self.expert(tokens.to(prefix.hidden.dtype), prefix=prefix, blocks=blocks, condition=condition)
        hidden = hidden[:, -x.shape[1] :].to(dtype)
        std = None if self.noise_head is None else bounded_std(self.noise_head(hidden).float(), noise=self.noise)
        return Denoised(velocity=self.action_out_proj(hidden).float(), hidden=hidden, std=std)

    def _noise_head(self) -> nn.Module | None:
        if self.noise.kind != "learned":
            return None
        actions, width = self.action_in_proj.in_features, self.action_in_proj.out_features
        return nn.Sequential(nn.Linear(width, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, actions))

    def _embed(self, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor | None]:
        actions = self.action_in_proj(x)
        if self.adaptive:
            return actions, F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(time))))
        both = torch.cat([actions, time[:, None].expand_as(actions)], dim=-1)
        return self.action_time_mlp_out(F.silu(self.action_time_mlp_in(both))), None


def pad_last(x: Tensor, size: int) -> Tensor:
    """Pad the last dimension of x with zeros to `size`."""
    return F.pad(x, (0, size - x.shape[-1]))


def embed_time(tau: Tensor, *, width: int, shortest: float = 4e-3, longest: float = 4.0) -> Tensor:
    """Return sines and cosines [B, width] of times [B], with log-spaced periods (openpi)."""
    fraction = torch.linspace(0, 1, width // 2, dtype=torch.float64, device=tau.device)
    angles = 2 * math.pi * tau[:, None].double() / (shortest * (longest / shortest) ** fraction)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Keys, values and outputs of an observation."""

    keys: tuple[Tensor, ...]
    """One per layer, [B, kv_heads, P, head_dim], with rotary embedding."""
    values: tuple[Tensor, ...]
    """As `keys`."""
    hidden: Tensor
    """[B, P, width of the language model]: the outputs."""
    mask: Tensor
    """[B, P] bool: False for padding."""


class ActionExpert(nn.Module):
    """A stack of layers with a final norm; parameter names are those of a Gemma model."""

    def __init__(self, size: GemmaSize, *, adaptive: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertLayer(size, adaptive=adaptive) for _ in range(size.depth))
        self.norm = _norm(size.width, adaptive=adaptive)
        self.head_dim = size.head_dim

    def forward(self, x: Tensor, *, prefix: Prefix, blocks: Tensor, condition: Tensor | None) -> Tensor:
        """Return the hidden states [B, S, width] of suffix tokens.

        blocks: [S] int64, non-decreasing: a token attends to its own block and earlier ones.
        condition: [B, width], the embedded time, for adaptive norms.
        """
        length = x.shape[1]
        inside = blocks[None, :] <= blocks[:, None]
        seen = torch.cat([prefix.mask[:, None].expand(-1, length, -1), inside.expand(len(x), -1, -1)], dim=-1)[:, None]
        positions = prefix.mask.sum(-1, keepdim=True) + torch.arange(length, device=x.device)
        rotation = rotary(positions, head_dim=self.head_dim, dtype=x.dtype)
        for layer, keys, values in zip(self.layers, prefix.keys, prefix.values, strict=True):
            x = layer(x, keys=keys, values=values, seen=seen, rotation=rotation, condition=condition)
        return self.norm(x, condition)[0]


class ExpertLayer(nn.Module):
    """Attention over prefix and suffix, then a gated MLP."""

    def __init__(self, size: GemmaSize, *, adaptive: bool) -> None:
        super().__init__()
        self.input_layernorm = _norm(size.width, adaptive=adaptive)
        self.self_attn = PrefixAttention(size)
        self.post_attention_layernorm = _norm(size.width, adaptive=adaptive)
        self.mlp = GatedMLP(size.width, size.mlp)

    def forward(
        self,
        x: Tensor,
        *,
        keys: Tensor,
        values: Tensor,
        seen: Tensor,
        rotation: tuple[Tensor, Tensor],
        condition: Tensor | None,
    ) -> Tensor:
        """Return x [B, S, width] after the layer; `seen` [B, 1, S, P + S] bool."""
        normed, gate = self.input_layernorm(x, condition)
        x = gated(x, self.self_attn(normed, keys=keys, values=values, seen=seen, rotation=rotation), gate)
        normed, gate = self.post_attention_layernorm(x, condition)
        return gated(x, self.mlp(normed), gate)


class PrefixAttention(nn.Module):
    """Grouped-query attention of suffix tokens over the prefix's keys and values and their own."""

    def __init__(self, size: GemmaSize) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        self.groups = size.heads // size.kv_heads
        self.q_proj = nn.Linear(size.width, size.heads * size.head_dim, bias=False)
        self.k_proj = nn.Linear(size.width, size.kv_heads * size.head_dim, bias=False)
        self.v_proj = nn.Linear(size.width, size.kv_heads * size.head_dim, bias=False)
        self.o_proj = nn.Linear(size.heads * size.head_dim, size.width, bias=False)

    def forward(
        self, x: Tensor, *, keys: Tensor, values: Tensor, seen: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return [B, S, width]."""
        queries = rotate(self._heads(self.q_proj(x)), rotation)
        keys = torch.cat([keys, rotate(self._heads(self.k_proj(x)), rotation)], dim=2)
        values = torch.cat([values, self._heads(self.v_proj(x))], dim=2)
        mixed = F.scaled_dot_product_attention(queries, self._repeated(keys), self._repeated(values), attn_mask=seen)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _repeated(self, x: Tensor) -> Tensor:
        return x[:, :, None].expand(-1, -1, self.groups, -1, -1).flatten(1, 2)


class GatedMLP(nn.Module):
    """Gemma's MLP: down(gelu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of x's shape."""
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


def rotary(positions: Tensor, *, head_dim: int, dtype: torch.dtype, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [B, 1, S, head_dim] of rotary embedding at `positions` [B, S]."""
    frequency = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim)
    angles = (positions[:, None, :, None].float() * frequency).repeat(1, 1, 1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embedding to queries or keys [B, heads, S, head_dim]; pairs are (i, i + head_dim / 2)."""
    cosines, sines = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-second, first], dim=-1) * sines


def _norm(width: int, *, adaptive: bool) -> nn.Module:
    return AdaptiveRMSNorm(width) if adaptive else RMSNorm(width)


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight). Weights are initialised to 0."""

    def __init__(self, width: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the normed x [B, S, width], and no gate; `condition` is unused."""
        return (_normed(x, self.eps) * (1 + self.weight.float())).to(x.dtype), None


class AdaptiveRMSNorm(nn.Module):
    """x / rms(x) * (1 + scale) + shift, and a gate for the residual update: linear maps of the condition.

    Initially scale and shift are 0 and the gate is 1, a plain pre-norm block. (openpi initialises the gate to 0, which
    disables the expert of a small network trained from scratch for the first steps.)
    """

    def __init__(self, width: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.dense = nn.Linear(width, 3 * width)
        nn.init.zeros_(self.dense.weight)
        with torch.no_grad():
            self.dense.bias.zero_()[2 * width :].fill_(1.0)

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the normed x [B, S, width] and the gate [B, 1, width] for a condition [B, width]."""
        assert condition is not None
        scale, shift, gate = self.dense(condition.to(self.dense.weight.dtype))[:, None].chunk(3, dim=-1)
        return (_normed(x, self.eps) * (1 + scale.float()) + shift.float()).to(x.dtype), gate.to(x.dtype)


def gated(residual: Tensor, update: Tensor, gate: Tensor | None) -> Tensor:
    """Add an update to the residual, multiplied by the gate if there is one."""
    return residual + update if gate is None else residual + update * gate


def _normed(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

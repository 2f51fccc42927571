"""The action expert: Gemma layers whose tokens attend to a prefix's keys and values and to one another.

    suffix tokens [B, S, width]
      each layer:  norm -> queries; keys and values of (prefix, suffix) -> attention -> o_proj -> + residual
                   norm -> gated MLP -> + residual

The prefix does not attend to the suffix, so all denoising steps share its keys and values (openpi's blockwise
attention).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cosmos_rl_vla.models.pi.config import GemmaSize


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


class Expert(nn.Module):
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

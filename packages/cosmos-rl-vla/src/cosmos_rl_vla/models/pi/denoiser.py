"""The denoiser of a pi model: noisy chunks, flow times and an observation's prefix -> velocities.

pi0.5:  actions -- action_in_proj --> tokens           time -- time_mlp --> condition of every norm
pi0:    (actions -- action_in_proj, time) -- action_time_mlp --> tokens, after one token of the state
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cosmos_rl_vla.models.flow import bounded_std
from cosmos_rl_vla.models.pi.backbone import pad_last
from cosmos_rl_vla.models.pi.config import PiConfig
from cosmos_rl_vla.models.pi.expert import Expert, Prefix


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
        self.expert = Expert(config.expert, adaptive=self.adaptive)
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


def embed_time(tau: Tensor, *, width: int, shortest: float = 4e-3, longest: float = 4.0) -> Tensor:
    """Return sines and cosines [B, width] of times [B], with log-spaced periods (openpi)."""
    fraction = torch.linspace(0, 1, width // 2, dtype=torch.float64, device=tau.device)
    angles = 2 * math.pi * tau[:, None].double() / (shortest * (longest / shortest) ** fraction)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)

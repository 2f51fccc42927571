"""Real-time chunking (Black et al., "Real-time execution of action chunking flow policies", arXiv 2506.07339).

While a policy computes a chunk, the robot executes actions of the chunk before. The new chunk has to begin with these
and to go on smoothly. Its first `left` actions overlap with the chunk before, of which the first `delay` are executed
in any case. Their weights (equation 5):

    W_i = 1, i < delay        c_i (e^c_i - 1) / (e - 1), c_i = (left - i) / (left - delay + 1)        0, i >= left

A flow policy is guided to them in every denoising step (equations 2 to 4): with the action x - tau v that follows from
the state x, the velocity v(x) and the time tau of `flow`, which is 1 minus the paper's,

    v - min(beta, tau / ((1 - tau) r^2)) J^T W (previous - action)      J = d action / d x
    r^2 = tau^2 / ((1 - tau)^2 + tau^2)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

BETA = 5.0
"""Largest weight of the guidance, the paper's."""


def prefix_weights(horizon: int, *, left: int, delay: int) -> Tensor:
    """Return W [horizon]; delay <= left <= horizon."""
    place = torch.arange(horizon, dtype=torch.float32)
    share = ((left - place) / (left - delay + 1)).clamp(0, 1)
    return torch.where(place < delay, 1.0, share * torch.expm1(share) / (math.e - 1))


def guided_velocity(
    velocity: Callable[[Tensor], Tensor], x: Tensor, *, tau: float, previous: Tensor, weights: Tensor
) -> Tensor:
    """Return the guided velocity of chunks x [B, M, A] at time `tau`, as in the module's description.

    previous: [B, M, A]. weights: [B, M, A]; rows of zeros have the velocity itself.
    """
    with torch.enable_grad():
        state = x.detach().requires_grad_(True)
        free = velocity(state)
        action = state - tau * free
        error = (weights * (previous - action)).detach()
        (pull,) = torch.autograd.grad(action, state, error)
    spread = tau**2 / ((1 - tau) ** 2 + tau**2)
    strength = BETA if tau == 1 else min(BETA, tau / ((1 - tau) * spread))
    return free.detach() - strength * pull

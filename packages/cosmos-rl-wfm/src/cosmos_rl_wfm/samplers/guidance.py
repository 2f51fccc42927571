"""Classifier-free guidance (arXiv 2207.12598) of a velocity.

    guided = v + scale (v - v_unconditional)

Scale 0 is no guidance, as in Cosmos; diffusers' `guidance_scale` is scale + 1. Training
must use the guidance of the rollout: the ratio of a guided policy to an unguided one is meaningless.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Velocity(Protocol):
    """A network with its condition bound: v = velocity(x, times)."""

    def __call__(self, x: Tensor, times: Tensor, /) -> Tensor:
        """Return v [B, ...] at states x of that shape and times [B]."""
        ...


def guided(
    velocity: Velocity, unconditional: Velocity | None, *, scale: float, unconditional_gradient: bool = True
) -> Velocity:
    """Return the guided velocity; with scale 0 `velocity` itself, with no unconditional pass.

    Without `unconditional_gradient` the second pass keeps no graph: same values, half the activations, and a gradient
    only through the conditional pass.

    Raises:
        ValueError: guidance is on and there is no unconditional velocity.
    """
    if scale == 0:
        return velocity
    if unconditional is None:
        raise ValueError(f"guidance = {scale} needs an unconditional velocity; set guidance = 0 without one")

    def both(x: Tensor, times: Tensor, /) -> Tensor:
        towards = velocity(x, times)
        with torch.set_grad_enabled(torch.is_grad_enabled() and unconditional_gradient):
            away = unconditional(x, times)
        return towards + scale * (towards - away)

    return both

"""The interface of a family of networks: its call, and the values of its configuration.

    v = family.velocity(network, latents, times, condition)

A family is bound to a network's configuration and holds no weights. It returns the network's velocities except on
given frames, whose straight line from the given latents is known: v = noise - x_0 = (x_t - x_0) / t.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.models.base import Condition
from cosmos_rl_wfm.models.config import Guidance

_SMALLEST_TIME = 1e-6


class Family(ABC):
    """Calls networks of one family."""

    guidance: ClassVar[Guidance] = "from_unconditional"
    """Convention of the family's own pipeline for velocities with and without the caption."""
    text_length: ClassVar[int] = 512
    """Tokens of a caption that the family was trained with."""

    channels: int
    """Channels of the latents."""
    patch: tuple[int, int, int]
    """Latent frames, rows and columns of one token."""
    text_width: int
    """Width of the embedded captions that the network takes."""
    pooled_width: int | None = None
    """Width of a caption's pooled vector, for networks that take it."""
    largest: tuple[int, int, int] | None = None
    """Most latent frames, rows and columns that positions cover; None: no limit."""
    only_images: bool = False
    """One frame, and latents without a time axis."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    @abstractmethod
    def velocity(self, network: nn.Module, latents: Tensor, times: Tensor, condition: Condition) -> Tensor:
        """Return v [B, C, f, h, w] at `latents` [B, C, f, h, w] and `times` [B]; both float32."""

    def blank_frames(self) -> bool:
        """Whether the latents of a condition are those of a clip that is grey after the given frames."""
        return False

    def negative_prompt(self) -> str:
        """Return the default negative prompt of the family's pipeline in diffusers."""
        return ""

    def _value(self, key: str) -> Any:
        if key not in self.config:
            raise UserError(f"model: the network's configuration has no {key}, which a {type(self).__name__} has")
        return self.config[key]


def parameter_dtype(network: nn.Module) -> torch.dtype:
    """Return the dtype that a network of diffusers computes in.

    It is the dtype of the first parameter not kept in float32; diffusers' own `dtype` walks all modules.
    """
    kept: Sequence[str] = getattr(network, "_keep_in_fp32_modules", None) or ()
    floating = ((name, weight) for name, weight in network.named_parameters() if weight.is_floating_point())
    return next(weight.dtype for name, weight in floating if not any(part in name for part in kept))


@contextmanager
def projected_once(network: nn.Module, projection: str, condition: Condition) -> Iterator[None]:
    """Within the context, the module `projection` expands its output of shared captions [U, L, E] to [B, L, W].

    Wide embeddings (206 MB a caption in Predict2.5) are then neither copied nor projected for each sample.
    """
    if (rows := condition.text_rows) is None:
        yield
        return
    handle = network.get_submodule(projection).register_forward_hook(lambda module, inputs, output: output[rows])
    try:
        yield
    finally:
        handle.remove()


def frame_mask(condition: Condition, latents: Tensor) -> Tensor:
    """Return the mask of given frames, bool [B, 1, f, 1, 1]; all False where the condition gives none."""
    if condition.given_mask is None:
        return torch.zeros(len(latents), 1, latents.shape[2], 1, 1, dtype=torch.bool, device=latents.device)
    return condition.given_mask[:, None, :, None, None]


def put_given(condition: Condition, latents: Tensor) -> Tensor:
    """Return `latents` with the given frames of `condition` in place of theirs."""
    if condition.given is None:
        return latents
    return torch.where(frame_mask(condition, latents), condition.given.to(latents.dtype), latents)


def straight_on_given(velocity: Tensor, condition: Condition, latents: Tensor, times: Tensor) -> Tensor:
    """Return `velocity` with (x_t - x_0) / t on the given frames x_0 of noisy `latents` x_t."""
    if condition.given is None:
        return velocity
    known = (latents - condition.given) / times.clamp_min(_SMALLEST_TIME)[:, None, None, None, None]
    return torch.where(frame_mask(condition, latents), known.to(velocity.dtype), velocity)

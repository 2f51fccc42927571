"""What a family of models has to offer: a velocity network, a codec, and an encoder of captions.

    video uint8 [B, F, H, W, 3] -- encode --> latents [B, C, f, h, w] -- noise, velocity --> latents -- decode --> video
    captions                    -- encode_text --> Condition

Letters: B samples, F frames, H W pixels; C channels, f frames, h w places of latents; L E tokens and width of text.
Rectified flow throughout: x_t = (1 - t) x_0 + t noise with t in [0, 1], and the network predicts v = noise - x_0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What samples are generated for. Every tensor begins with [B]."""

    text: Tensor
    """[B, L, E]: embedded captions."""
    text_mask: Tensor
    """[B, L] bool: tokens that are there."""
    given: Tensor | None = None
    """[B, C, f, h, w]: clean latents of frames that are given (image or video to video); None: no frame is."""
    given_mask: Tensor | None = None
    """[B, f] bool: which of them are."""
    fps: Tensor | None = None
    """[B] float32: frames a second, for models that are told."""
    pooled: Tensor | None = None
    """[B, P]: one vector for the whole caption, for networks that take it beside the tokens (SD3)."""
    image: Tensor | None = None
    """[B, N, I]: embedded first frame, for networks that take it beside the text (Wan2.1 image to video)."""

    def to(self, device: torch.device) -> Condition:
        """Return the same on another device."""
        return self._each(lambda tensor: tensor.to(device))

    def select(self, index: Tensor) -> Condition:
        """Return the samples `index` [N] int64, repeated where it repeats them."""
        return self._each(lambda tensor: tensor[index.to(tensor.device)])

    def with_text(self, other: Condition) -> Condition:
        """Return this with the captions of `other`: how the unconditional one of guidance is made."""
        pooled = None if self.pooled is None or other.pooled is None else other.pooled.expand_as(self.pooled)
        text, mask = other.text.expand_as(self.text), other.text_mask.expand_as(self.text_mask)
        return replace(self, text=text, text_mask=mask, pooled=pooled)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Condition:
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(tensor) for name, tensor in held.items() if tensor is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a clip."""

    frames: int
    """1 for an image."""
    height: int
    """Pixels."""
    width: int


class FlowModel(Protocol):
    """A loaded model.

    model.check(size)                                   once, with the size of the recipe
    latents = model.encode(video)                       once a clip, then cached
    condition = model.encode_text(captions)             once a caption, then cached
    v = model.velocity(x, times, condition)             many times, with gradient in training
    video = model.decode(latents)
    """

    network: nn.Module
    """Holds the parameters that are trained, adapters included. Codec and text encoder are never in it."""
    has_codec: bool
    """False where only latents are wanted, as in a trainer of cached latents: `encode` and `decode` raise then."""

    def check(self, size: Size) -> None:
        """Raise UserError for a size that codec or network cannot take, naming the nearest one that they can."""
        ...

    def latent_shape(self, size: Size) -> tuple[int, int, int, int]:
        """Return (C, f, h, w) of a clip."""
        ...

    def encode(self, video: Tensor) -> Tensor:
        """uint8 [B, F, H, W, 3] -> float32 [B, C, f, h, w], normalised as the network wants them. No gradient."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B, C, f, h, w] -> uint8 [B, F, H, W, 3]. No gradient."""
        ...

    def encode_text(self, captions: Sequence[str]) -> Condition:
        """Embed captions; "" is the unconditional one. No gradient."""
        ...

    def velocity(self, latents: Tensor, times: Tensor, condition: Condition) -> Tensor:
        """Return v, float32 [B, C, f, h, w], at noisy `latents` of that shape and `times` [B] in [0, 1].

        Given frames are put in their places before the network sees them; there the result is noise - x_0 of what was
        handed in, so that a sampler leaves them and a loss has nothing to learn.
        """
        ...

    def save(self, directory: Path) -> None:
        """Write what loads the model beside its weights: configurations, scheduler, tokenizer."""
        ...

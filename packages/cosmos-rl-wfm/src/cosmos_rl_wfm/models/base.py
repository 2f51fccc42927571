"""Inputs of models, sizes of clips and latents, and the letters of their tensors' dimensions (see `models/model.py`).

    video uint8 [B, F, H, W, 3] -- encode --> latents [B, C, f, h, w] -- noise, velocity --> latents -- decode --> video
    captions                    -- encode_text --> Condition

Letters: B samples, F frames, H W pixels; C f h w channels, frames, height and width of latents; L E tokens and width of
text.
Rectified flow throughout: x_t = (1 - t) x_0 + t noise with t in [0, 1], and the network predicts v = noise - x_0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from cosmos_rl_core.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The condition that B samples are generated for. Tensors begin with [B], except captions that samples share."""

    text: Tensor
    """[B, L, E]: embedded captions; with `text_rows` [U, L, E], one for the samples that share it."""
    text_mask: Tensor
    """[B, L] or [U, L] bool: False for padding."""
    text_rows: Tensor | None = None
    """[B] int64: each sample's row of `text` and `text_mask`; None: row b for sample b."""
    given: Tensor | None = None
    """[B, C, f, h, w]: clean latents with the given frames (image or video to video); None: no frame is given."""
    given_mask: Tensor | None = None
    """[B, f] bool: the frames of `given` that are given."""
    pooled: Tensor | None = None
    """[B, P]: one vector for the whole caption, for networks that take it beside the tokens (SD3)."""
    image: Tensor | None = None
    """[B, N, I]: embedded first frame, for networks that take it beside the text (Wan2.1 image to video)."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by field."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: tensor for name, tensor in values if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def to(self, device: torch.device) -> Condition:
        """Return the condition on another device."""
        return self._each(lambda tensor: tensor.to(device))

    def select(self, index: Tensor) -> Condition:
        """Return the samples `index` [N] int64, repeated where it repeats them. Shared captions stay as they are."""
        shared = () if self.text_rows is None else ("text", "text_mask")
        return self._each(lambda tensor: tensor[index.to(tensor.device)], but=shared)

    def gathered(self) -> Condition:
        """Return the condition with a copy of its caption for every sample."""
        if self.text_rows is None:
            return self
        return replace(self, text=self.text[self.text_rows], text_mask=self.text_mask[self.text_rows], text_rows=None)

    def with_text(self, other: Condition) -> Condition:
        """Return the condition with the one caption of `other` [1], for example the unconditional one of guidance."""
        pooled = None if self.pooled is None or other.pooled is None else other.pooled.expand_as(self.pooled)
        count = len(self.text if self.text_rows is None else self.text_rows)
        rows = torch.zeros(count, dtype=torch.int64, device=other.text.device)
        return replace(self, text=other.text, text_mask=other.text_mask, text_rows=rows, pooled=pooled)

    def _each(self, change: Callable[[Tensor], Tensor], *, but: Sequence[str] = ()) -> Condition:
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors().items() if name not in but})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipSize:
    """Size of a clip."""

    frames: int
    """1 for an image."""
    height: int
    """Pixels."""
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Sizes of a codec's latents and of the network's patches. Maps and checks sizes of clips.

    F frames -> f = (F - 1) / temporal + 1 latent frames, H x W pixels -> H / spatial x W / spatial latent pixels
    """

    channels: int
    temporal: int
    """Frames per latent frame; the first latent frame is one frame."""
    spatial: int
    """Pixels per latent pixel, on a side."""
    patch: tuple[int, int, int]
    """Latent frames, rows and columns of a token."""
    largest: tuple[int, int, int] | None = None
    """Most latent frames, rows and columns; None: no limit."""
    only_images: bool = False

    def latent_shape(self, size: ClipSize) -> tuple[int, int, int, int]:
        """Return (C, f, h, w)."""
        frames = (size.frames - 1) // self.temporal + 1
        return self.channels, frames, size.height // self.spatial, size.width // self.spatial

    def nearest(self, size: ClipSize) -> ClipSize:
        """Return the nearest supported size; `size` itself where it is supported."""
        most = self.largest or (None, None, None)
        if self.only_images:
            frames = 1
        else:
            latent = _nearest((size.frames - 1) / self.temporal + 1, step=self.patch[0], most=most[0])
            frames = (latent - 1) * self.temporal + 1
        height, width = (
            _nearest(pixels / self.spatial, step=step, most=limit) * self.spatial
            for pixels, step, limit in zip((size.height, size.width), self.patch[1:], most[1:])
        )
        return ClipSize(frames=frames, height=height, width=width)

    def check(self, size: ClipSize) -> None:
        """Raise UserError for a size that is not supported, with the nearest one that is."""
        if (nearest := self.nearest(size)) != size:
            raise UserError(
                f"a clip of {_words(size)} does not fit the model, whose autoencoder and patches need {self._rule()}; "
                f"the nearest size is {_words(nearest)}"
            )

    def _rule(self) -> str:
        rows, columns = (self.spatial * step for step in self.patch[1:])
        frames = "one frame"
        if not self.only_images:
            every = self.temporal * self.patch[0]
            first = (self.patch[0] - 1) * self.temporal + 1
            frames = f"{first}, {first + every}, {first + 2 * every}, ... frames"
        limit = ""
        if self.largest is not None:
            limit = f", at most {self.largest[1] * self.spatial} x {self.largest[2] * self.spatial}"
        return f"{frames}, a height divisible by {rows} and a width divisible by {columns}{limit}"


def _nearest(value: float, *, step: int, most: int | None) -> int:
    """The multiple of `step` nearest to `value`, at least one step and at most `most`."""
    steps = max(1, round(value / step))
    if most is not None:
        steps = min(steps, most // step)
    return steps * step


def _words(size: ClipSize) -> str:
    return f"{size.frames} frame{'s' if size.frames != 1 else ''} of {size.height} x {size.width}"

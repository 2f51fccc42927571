"""Maps sizes of clips to sizes of latents, and checks them.

F frames -> f = (F - 1) / temporal + 1 latent frames, H x W pixels -> H / spatial x W / spatial latent pixels
"""

from __future__ import annotations

from dataclasses import dataclass

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.models.base import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Sizes of a codec's latents and of the network's patches."""

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

    def latent_shape(self, size: Size) -> tuple[int, int, int, int]:
        """Return (C, f, h, w)."""
        frames = (size.frames - 1) // self.temporal + 1
        return self.channels, frames, size.height // self.spatial, size.width // self.spatial

    def nearest(self, size: Size) -> Size:
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
        return Size(frames=frames, height=height, width=width)

    def check(self, size: Size) -> None:
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


def _words(size: Size) -> str:
    return f"{size.frames} frame{'s' if size.frames != 1 else ''} of {size.height} x {size.width}"

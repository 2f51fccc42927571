"""The place of one box of a checkpoint tensor in a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cosmos_rl_transfer import Box

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """A box and a strided region of the same shape."""

    name: str
    """The tensor, by checkpoint name."""
    box: Box
    """Box in checkpoint coordinates. Empty if the layer takes the tensor but none of it on this rank."""
    parameter: str
    """Qualified name in the engine's model."""
    strides: tuple[int, ...]
    """Stride in the parameter's memory for each dim of the box, in elements; 0 for dims of size 1."""
    start: int
    """Offset of the box's first element in the parameter, in elements."""

    @classmethod
    def of(cls, name: str, box: Box, *, parameter: str, whole: Tensor, view: Tensor) -> Place:
        """Describe `view`, a view of `whole` with the shape of the box."""
        assert tuple(view.shape) == box.shape, f"{name}: {tuple(view.shape)} does not fit {box}"
        if not box.numel:
            return cls.nothing(name, parameter, ndim=len(box.shape))
        strides = tuple(0 if size == 1 else step for size, step in zip(view.shape, view.stride()))
        return cls(name, box, parameter, strides, int(view.storage_offset()) - int(whole.storage_offset()))

    @classmethod
    def nothing(cls, name: str, parameter: str, *, ndim: int) -> Place:
        """Describe a parameter that takes the tensor but none of it on this rank."""
        return cls(name, Box((0,) * ndim, (0,) * ndim), parameter, (0,) * ndim, 0)

    def view(self, parameter: Tensor) -> Tensor:
        """Return the region [*box.shape] of a parameter with the strides for which the place was made."""
        return parameter.detach().as_strided(self.box.shape, self.strides, parameter.storage_offset() + self.start)

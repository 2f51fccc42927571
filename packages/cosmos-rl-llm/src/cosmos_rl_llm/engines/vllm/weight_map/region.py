"""The place of one box of a checkpoint tensor in a parameter, and the union of copied regions as boxes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import Tensor

from cosmos_rl_transfer import Box

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LandingRegion:
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
    def of(cls, name: str, box: Box, *, parameter: str, tensor: Tensor, view: Tensor) -> LandingRegion:
        """Describe `view`, a view of `tensor` with the shape of the box."""
        assert tuple(view.shape) == box.shape, f"{name}: {tuple(view.shape)} does not fit {box}"
        if not box.numel:
            return cls.nothing(name, parameter, ndim=len(box.shape))
        strides = tuple(0 if size == 1 else step for size, step in zip(view.shape, view.stride()))
        return cls(name, box, parameter, strides, int(view.storage_offset()) - int(tensor.storage_offset()))

    @classmethod
    def nothing(cls, name: str, parameter: str, *, ndim: int) -> LandingRegion:
        """Describe a parameter that takes the tensor but none of it on this rank."""
        return cls(name, Box((0,) * ndim, (0,) * ndim), parameter, (0,) * ndim, 0)

    def view(self, parameter: Tensor) -> Tensor:
        """Return the region [*box.shape] of a parameter with the strides for which the place was made."""
        return parameter.detach().as_strided(self.box.shape, self.strides, parameter.storage_offset() + self.start)


@dataclass(frozen=True, slots=True)
class Region:
    """One copy: equally shaped strided parts of a row-major tensor and of a parameter."""

    first: int
    """Flat index of the first element in the tensor."""
    start: int
    """Offset of the region's first element in the parameter, in elements."""
    steps: tuple[tuple[int, int, int], ...]
    """(size, stride in the tensor, stride in the parameter) of each dim with more than one index."""

    @classmethod
    def between(cls, source: Tensor, destination: Tensor, *, start: int) -> Region:
        """Describe a copy of `source`, a view of the whole tensor, over `destination`."""
        steps = zip(destination.shape, source.stride(), destination.stride())
        return cls(int(source.storage_offset()), start, tuple(step for step in steps if step[0] > 1))

    def boxed(self, shape: tuple[int, ...]) -> tuple[Box, tuple[int, ...]] | None:
        """Return the box in a tensor of `shape` and the parameter's stride in each of its dims, 0 for dims of size 1.

        None if the part is not a box.
        """
        steps = {step: (size, stride) for size, step, stride in self.steps}
        sizes, strides, offset = [], [], []
        below = 1  # elements of the tensor under one index of the dim
        for length in reversed(shape):
            size, stride = steps.pop(below, (1, 0)) if length > 1 else (1, 0)
            if size > length and size % length == 0:  # one dim of the copy spans several of the tensor
                steps[below * length] = (size // length, stride * length)
                size = length
            sizes.append(size)
            strides.append(stride)
            offset.append(self.first // below % length)
            below *= length
        if steps or any(o + n > length for o, n, length in zip(offset, sizes, reversed(shape))):
            return None
        return Box(tuple(offset[::-1]), tuple(sizes[::-1])), tuple(strides[::-1])


Landed = tuple[Box, tuple[int, ...], int]
"""A box, the parameter's stride in each of its dims, and the offset of its first element."""


def join(regions: list[Region], shape: tuple[int, ...]) -> list[Landed] | None:
    """Join the regions of one tensor in one parameter into boxes, merging neighbours.

    Return None if a region is not a box.
    """
    parts: list[Landed] = []
    for region in regions:
        boxed = region.boxed(shape)
        if boxed is None:
            return None
        parts.append((*boxed, region.start))
    if all(box == parts[0][0] for box, _, _ in parts):
        return parts
    for dim in reversed(range(len(shape))):
        parts = _join_along(parts, dim)
    return parts


def _join_along(parts: list[Landed], dim: int) -> list[Landed]:
    """Join runs of boxes that are neighbours along `dim` and equally spaced in the parameter."""
    rows: dict[object, list[Landed]] = {}
    for part in parts:
        box, strides, _ = part
        others = (_without(box.offset, dim), _without(box.shape, dim), _without(strides, dim))
        rows.setdefault(others, []).append(part)
    return [joined for row in rows.values() for joined in _join_row(sorted(row, key=lambda p: p[0].offset[dim]), dim)]


def _join_row(row: list[Landed], dim: int) -> list[Landed]:
    """Join boxes of one row, sorted by offset; those that do not fit are returned unchanged."""
    if len(row) == 1:
        return row
    touching = all(a[0].end[dim] == b[0].offset[dim] for a, b in pairwise(row))
    steps = {part[1][dim] for part in row if part[0].shape[dim] > 1}
    gaps = [(b[2] - a[2], a[0].shape[dim]) for a, b in pairwise(row)]
    steps |= {distance // size if distance % size == 0 else -1 for distance, size in gaps}
    if not touching or len(steps) != 1 or -1 in steps:
        return row
    box, strides, start = row[0]
    size = sum(part[0].shape[dim] for part in row)
    shape = (*box.shape[:dim], size, *box.shape[dim + 1 :])
    return [(Box(box.offset, shape), (*strides[:dim], steps.pop(), *strides[dim + 1 :]), start)]


def _without(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return values[:dim] + values[dim + 1 :]

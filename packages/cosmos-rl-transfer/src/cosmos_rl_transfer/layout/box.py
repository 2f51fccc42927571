"""Rectangles inside tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor."""

    offset: tuple[int, ...]
    """Index of the first element, one a dim."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index, one a dim."""
        return tuple(o + n for o, n in zip(self.offset, self.shape))

    def intersect(self, other: Box) -> Box | None:
        """Return the common part, or None where there is none."""
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(map(min, self.end, other.end))
        if any(a >= b for a, b in zip(low, high)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high)))

    def contains(self, other: Box) -> bool:
        """Return whether every element of `other` is in this box."""
        starts = all(a <= b for a, b in zip(self.offset, other.offset))
        return starts and all(a >= b for a, b in zip(self.end, other.end))

    def within(self, parent: Box) -> Box:
        """Return the same elements in the coordinates of `parent`."""
        return Box(tuple(a - b for a, b in zip(self.offset, parent.offset)), self.shape)

    def cut(self, dim: int, low: int, high: int) -> Box:
        """Return the elements whose index along `dim`, counted from this box's first, is in [low, high)."""
        offset, shape = list(self.offset), list(self.shape)
        offset[dim] += low
        shape[dim] = high - low
        return Box(tuple(offset), tuple(shape))

    def run_length(self, shape: Sequence[int]) -> int:
        """Return how many elements lie side by side in a row-major tensor of `shape` before the first gap."""
        run = 1
        for mine, whole in zip(reversed(self.shape), reversed(shape)):
            run *= mine
            if mine != whole:
                break
        return run

    def is_contiguous(self, shape: Sequence[int]) -> bool:
        """Say whether the box is one run of a row-major tensor of `shape`."""
        return self.run_length(shape) == self.numel

    def start(self, shape: Sequence[int]) -> int:
        """Return the flat index of the first element in a row-major tensor of `shape`."""
        flat = 0
        for offset, size in zip(self.offset, shape):
            flat = flat * size + offset
        return flat

    def slices(self) -> tuple[slice, ...]:
        """Return the indices that cut this box out of an array in the same coordinates."""
        return tuple(slice(a, b) for a, b in zip(self.offset, self.end))


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that covers a tensor of `shape`."""
    return Box((0,) * len(shape), tuple(shape))

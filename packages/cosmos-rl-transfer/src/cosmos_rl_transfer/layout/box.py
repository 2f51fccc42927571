"""Boxes inside tensors, and the overlay of a target's box with the source's: atomic units, each with its owners."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np


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
        for mine, full in zip(reversed(self.shape), reversed(shape)):
            run *= mine
            if mine != full:
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

    def merged(self, shape: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (size, offset, extent) of each dim, outermost first; those the box holds whole are part of the next.

        At least one; the extent of the last is `run_length`.
        """
        dims: list[tuple[int, int, int]] = []
        inner = 1
        for size, offset, extent in zip(reversed(shape), reversed(self.offset), reversed(self.shape)):
            if extent == size:
                inner *= size
            else:
                dims.append((size * inner, offset * inner, extent * inner))
                inner = 1
        if inner > 1 or not dims:
            dims.append((inner, 0, inner))
        return dims[::-1]

    def slices(self) -> tuple[slice, ...]:
        """Return the indices that cut this box out of an array in the same coordinates."""
        return tuple(slice(a, b) for a, b in zip(self.offset, self.end))


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that covers a tensor of `shape`."""
    return Box((0,) * len(shape), tuple(shape))


Owners = tuple[int, ...]
"""Ranks that hold the same bytes, ascending."""


class Overlay:
    """The boxes of one tensor's source ranks, ready to be laid over wanted boxes."""

    def __init__(self, boxes: Mapping[int, Box]) -> None:
        """Take the boxes by source rank."""
        owners: defaultdict[Box, list[int]] = defaultdict(list)
        for rank, box in boxes.items():
            if box.numel:
                owners[box].append(rank)
        self._owners = [tuple(sorted(ranks)) for ranks in owners.values()]
        self._low = np.array([box.offset for box in owners], np.int64)  # [distinct boxes, dims]
        self._high = np.array([box.end for box in owners], np.int64)
        self._units: dict[Box, list[tuple[Box, Owners]]] = {}

    def units(self, box: Box) -> list[tuple[Box, Owners]]:
        """Return disjoint parts that cover `box`, row-major, each with the ranks that hold all of it, maybe none."""
        if box not in self._units:
            self._units[box] = list(self._cut(box))
        return self._units[box]

    def _cut(self, box: Box) -> Iterator[tuple[Box, Owners]]:
        if not self._owners:
            yield box, ()
            return
        # The edges of all source boxes that touch `box` cut it into a grid. No edge goes through a cell, so that a
        # source box holds a cell whole or not at all.
        low, high = np.maximum(self._low, box.offset), np.minimum(self._high, box.end)
        touching = np.flatnonzero((low < high).all(axis=1))
        low, high = low[touching], high[touching]
        intervals = [
            list(pairwise(sorted({first, last, *low[:, dim].tolist(), *high[:, dim].tolist()})))
            for dim, (first, last) in enumerate(zip(box.offset, box.end))
        ]
        cells = [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in product(*intervals)]
        first = np.array([cell.offset for cell in cells], np.int64)[:, None]  # [cells, 1, dims]
        last = np.array([cell.end for cell in cells], np.int64)[:, None]
        holds = np.logical_and.reduce((low <= first) & (high >= last), axis=2)  # [cells, boxes that touch]
        for cell, row in zip(cells, holds):
            overlapping = touching[row].tolist()
            if len(overlapping) == 1:
                yield cell, self._owners[overlapping[0]]
            else:
                yield cell, tuple(sorted(rank for i in overlapping for rank in self._owners[i]))

"""Flat positions of single elements, from a box to what holds it and back.

A position is an element's row-major index in some shape; arrays of them ascend. They are int64 everywhere, as
torch and numpy want them for indexing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.layout.manifest import Box


def row_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor of `shape`, in elements."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()


def outward(positions: Raw, shape: Sequence[int], strides: Sequence[int], start: int = 0) -> Raw:
    """Return where elements of a box lie in flat memory: int64 [k] for `positions` int64 [k] in the box.

    The box of `shape` starts at `start` and has `strides` in elements, any strides.
    """
    dims = _merged(shape, strides)
    if not dims:
        return positions + start
    (_, outer), inner = dims[0], dims[1:]
    index: Raw | int = start
    rest = positions
    for size, stride in reversed(inner):
        rest, at = _divided(rest, size)
        index = at * stride + index
    return rest * outer + index


def inward(positions: Raw, box: Box, shape: Sequence[int]) -> tuple[slice | Raw, Raw]:
    """Pick the positions in a tensor of `shape` that lie in `box`: (which of them, their positions in the box).

    `positions`: ascending, any integers [n]. The first result indexes them; the second is int64 [k] and ascends.
    """
    start = box.start(shape)
    end = start + sum((n - 1) * stride for n, stride in zip(box.shape, row_strides(shape))) + 1
    low, high = np.searchsorted(positions, np.array((start, end), positions.dtype))
    inside = positions[low:high].astype(np.int64)
    if box.is_contiguous(shape):
        return slice(low, high), inside - start
    *inner, outermost = reversed(_cut(box, shape))
    kept, flat, weight = np.ones(len(inside), bool), np.zeros(len(inside), np.int64), 1
    for size, offset, extent in inner:
        inside, at = _divided(inside, size)
        at -= offset
        kept &= (at >= 0) & (at < extent)
        flat += at * weight
        weight *= extent
    flat += (inside - outermost[1]) * weight  # within the box, as everything from `start` to `end` is
    which = np.flatnonzero(kept)
    return which + low, flat[which]


def _divided(positions: Raw, size: int) -> tuple[Raw, Raw]:
    """Quotient and rest; numpy divides by one number several times faster than it takes a rest."""
    quotient = positions // size
    return quotient, positions - quotient * size


def _merged(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return (size, stride) of each dim, outermost first, with dims that follow each other without a gap as one."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims


def _cut(box: Box, shape: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (size, offset, extent) of each dim, outermost first, with dims the box holds whole as part of the next."""
    dims: list[tuple[int, int, int]] = []
    inner = 1
    for size, offset, extent in zip(reversed(shape), reversed(box.offset), reversed(box.shape)):
        if extent == size:
            inner *= size
        else:
            dims.append((size * inner, offset * inner, extent * inner))
            inner = 1
    if inner > 1:
        dims.append((inner, 0, inner))
    return dims[::-1]

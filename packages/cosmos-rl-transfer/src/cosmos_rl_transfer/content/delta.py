"""The changes of a bucket, encoded: which elements changed, and their new values.

A piece's elements are numbered row-major and cut into blocks of 2^16. With B blocks over all pieces of the bucket:

    counts   uint32 [B], then zeros up to a multiple of 8 bytes      changed elements of each block
    values   of the pieces with 8, 4 and 2 bytes an element, in this order
    offsets  uint16, of all pieces                                   of each changed element in its block
    values   of the pieces with 1 byte an element

Widest first, so that everything is aligned without padding. A block that is listed whole has no offsets: past
`item / (item + 2)` of its elements that is shorter (`widen`). Values are absolute, so a delta may be applied twice.
At 1 % changed, two-byte elements, a delta has 2.0 % of the bucket's bytes.

`outward` and `inward` convert positions between a box and the memory that holds it. A position is an element's
row-major index in some shape; arrays of them ascend and are int64, as torch and numpy index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np

from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.errors import TransferError
from cosmos_rl_transfer.layout.manifest import Box

BLOCK = 1 << 16
"""Elements of a block, so that an offset fits two bytes."""
_OFFSET_BYTES = 2


class Extent(NamedTuple):
    """The size of a piece."""

    numel: int
    item_bytes: int


@dataclass(frozen=True, slots=True)
class PieceDelta:
    """New values of some elements of a piece."""

    positions: Raw
    """int64 [k], ascending: row-major in the piece's box."""
    values: Raw
    """Unsigned integers of the element's width [k]."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A bucket of which few elements changed since the version before."""

    data: Raw
    """uint8 [n]: what `encode` makes."""
    sums: tuple[int, ...]
    """Additive hash of each piece as it is now."""


def widen(positions: Raw, extent: Extent) -> Raw:
    """List all elements of the blocks that are shorter to send whole: int64 [n], n >= k, for `positions` int64 [k]."""
    counts, sizes = _counts(positions, extent.numel), _block_sizes(extent.numel)
    dense = (counts < sizes) & (counts * (_OFFSET_BYTES + extent.item_bytes) >= sizes * extent.item_bytes)
    dense &= counts > 0
    if not dense.any():
        return positions
    starts = np.concatenate(([0], np.cumsum(counts)))
    return np.concatenate(
        [
            np.arange(b * BLOCK, b * BLOCK + sizes[b]) if dense[b] else positions[starts[b] : starts[b + 1]]
            for b in range(len(counts))
        ]
    )


def encoded_bytes(positions: Sequence[Raw], extents: Sequence[Extent]) -> int:
    """Return how many bytes `encode` makes of changes at `positions`, one array a piece."""
    return _Form.of([_counts(p, e.numel) for p, e in zip(positions, extents)], extents).num_bytes


def encode(changes: Sequence[PieceDelta], extents: Sequence[Extent]) -> Raw:
    """Return the delta of a bucket as uint8 [num_bytes]; one change and one extent a piece."""
    form = _Form.of([_counts(c.positions, e.numel) for c, e in zip(changes, extents)], extents)
    out = np.zeros(form.num_bytes, np.uint8)
    form.counts_of(out)[:] = form.counts
    positions = [c.positions for c in changes]
    listed = np.concatenate(positions) if positions else np.zeros(0, np.int64)
    form.offsets_of(out)[:] = (listed if form.lists_all else listed[form.listed]) & (BLOCK - 1)
    for index, change in enumerate(changes):
        form.values_of(out, index)[:] = change.values
    return out


def decode(data: Raw, extents: Sequence[Extent]) -> tuple[PieceDelta, ...]:
    """Read what `encode` wrote for pieces of these extents; the values are views of `data` uint8 [n], any contiguous.

    Raises TransferError on anything else: positions are inside their piece, and ascend.
    """
    num_blocks = [_num_blocks(e.numel) for e in extents]
    if data.nbytes < 4 * sum(num_blocks):
        raise TransferError(f"a delta of {data.nbytes} bytes was announced, shorter than its own table")
    counts = data[: 4 * sum(num_blocks)].view(np.uint32).astype(np.int64)
    sizes = _sizes(extents)
    if (counts > sizes).any():
        raise TransferError("a delta lists more elements of a block than the block has")
    form = _Form.of(np.split(counts, np.cumsum(num_blocks)[:-1]), extents)
    if form.num_bytes != data.nbytes:
        raise TransferError(f"a delta has {data.nbytes} bytes where its table makes {form.num_bytes}")
    positions = form.positions(form.offsets_of(data))
    ends = np.cumsum(form.num_changes)
    changes = []
    for index, (extent, changed) in enumerate(zip(extents, np.split(positions, ends[:-1]))):
        if changed.size and not (changed[-1] < extent.numel and (changed[1:] > changed[:-1]).all()):
            raise TransferError(f"a delta's offsets of piece {index} do not ascend within the piece")
        changes.append(PieceDelta(changed, form.values_of(data, index)))
    return tuple(changes)


@dataclass(frozen=True, slots=True)
class _Form:
    """The layout of the bytes of one delta; follows from the counts alone."""

    counts: Raw
    """int64 [B]."""
    bases: Raw
    """int64 [B]: position of each block's first element in its piece."""
    is_dense: Raw
    """bool [B]: blocks without offsets."""
    num_changes: tuple[int, ...]
    """By piece."""
    item_bytes: tuple[int, ...]
    values_at: tuple[int, ...]
    """By piece: first byte of its values."""
    offsets_at: int
    num_offsets: int
    num_bytes: int

    @classmethod
    def of(cls, counts: Sequence[Raw], extents: Sequence[Extent]) -> _Form:
        flat = np.concatenate(counts) if counts else np.zeros(0, np.int64)
        dense = flat == _sizes(extents)
        num_changes = tuple(int(c.sum()) for c in counts)
        end, values_at, offsets_at = -(-4 * len(flat) // 8) * 8, [0] * len(extents), 0
        num_offsets = int(flat[~dense].sum())
        for width in (8, 4, 2, 1):
            if width == 1:
                offsets_at, end = end, end + num_offsets * _OFFSET_BYTES
            for index, extent in enumerate(extents):
                if extent.item_bytes == width:
                    values_at[index], end = end, end + num_changes[index] * width
        bases = [np.arange(len(c), dtype=np.int64) * BLOCK for c in counts]
        return cls(
            counts=flat,
            bases=np.concatenate(bases) if bases else np.zeros(0, np.int64),
            is_dense=dense,
            num_changes=num_changes,
            item_bytes=tuple(e.item_bytes for e in extents),
            values_at=tuple(values_at),
            offsets_at=offsets_at,
            num_offsets=num_offsets,
            num_bytes=end,
        )

    @property
    def lists_all(self) -> bool:
        """Whether every changed element has an offset."""
        return self.num_offsets == sum(self.num_changes)

    @property
    def listed(self) -> Raw:
        """Which changed elements have an offset: bool [all changes]."""
        return np.repeat(~self.is_dense, self.counts)

    def counts_of(self, data: Raw) -> Raw:
        """View the table uint32 [B]."""
        return data[: 4 * len(self.counts)].view(np.uint32)

    def offsets_of(self, data: Raw) -> Raw:
        """View the offsets uint16 [num_offsets]."""
        return data[self.offsets_at : self.offsets_at + self.num_offsets * _OFFSET_BYTES].view(np.uint16)

    def values_of(self, data: Raw, index: int) -> Raw:
        """View the values of a piece [its changes]."""
        width, at = self.item_bytes[index], self.values_at[index]
        return data[at : at + self.num_changes[index] * width].view(f"u{width}")

    def positions(self, offsets: Raw) -> Raw:
        """Return the positions in their pieces of all changed elements, pieces one after the other: int64 [n]."""
        positions = np.repeat(self.bases, self.counts)
        if self.lists_all:
            positions += offsets
            return positions
        starts = np.cumsum(self.counts) - self.counts
        within = np.arange(len(positions)) - np.repeat(starts, self.counts)  # the whole blocks' offsets
        within[self.listed] = offsets
        return positions + within


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _block_sizes(numel: int) -> Raw:
    """Elements of each block of a piece: int64."""
    sizes = np.full(_num_blocks(numel), BLOCK, np.int64)
    if numel % BLOCK:
        sizes[-1] = numel % BLOCK
    return sizes


def _sizes(extents: Sequence[Extent]) -> Raw:
    sizes = [_block_sizes(e.numel) for e in extents]
    return np.concatenate(sizes) if sizes else np.zeros(0, np.int64)


def _counts(positions: Raw, numel: int) -> Raw:
    """Changed elements in each block of a piece: int64."""
    edges = np.arange(_num_blocks(numel) + 1, dtype=np.int64) * BLOCK
    return np.diff(np.searchsorted(positions, edges))


def row_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor of `shape`, in elements."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()


def outward(positions: Raw, shape: Sequence[int], strides: Sequence[int], start: int = 0) -> Raw:
    """Return where elements of a box lie in flat memory: int64 [k] for `positions` int64 [k] in the box.

    The box of `shape` starts at `start` and has `strides` in elements, any strides.
    """
    # the index of each dim is the rest of a division by its size, innermost first; the outermost needs no division
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
    # Binary search first: ascending positions outside of the box's span, in most pieces nearly all, cost nothing more.
    start = box.start(shape)
    end = start + sum((n - 1) * stride for n, stride in zip(box.shape, row_strides(shape))) + 1
    low, high = np.searchsorted(positions, np.array((start, end), positions.dtype))
    inside = positions[low:high].astype(np.int64)
    if box.is_contiguous(shape):
        return slice(low, high), inside - start
    # then dim by dim, innermost first: keep what is inside the box's extent and add up its index in the box
    *inner, outermost = reversed(box.merged(shape))
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

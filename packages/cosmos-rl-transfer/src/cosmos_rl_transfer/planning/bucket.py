"""Buckets, the unit of transfer, and the packing of boxes into them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cosmos_rl_transfer.layout.box import Box

ALIGN = 64
"""Alignment of pieces, in buckets and in arenas, so that a run of whole tensors is one copy."""


def aligned(num_bytes: int) -> int:
    """Round up to the alignment of pieces."""
    return -(-num_bytes // ALIGN) * ALIGN


class BucketPiece(NamedTuple):
    """A box of one tensor inside a bucket."""

    name: str
    """The target's name; a source that ties the tensor to another finds it by `Manifest.canonical`."""
    box: Box
    """In checkpoint coordinates."""
    at: int
    """First byte inside the bucket."""
    dtype: str
    """Dtype in which it travels."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Packed bytes sent together from one source rank to one target rank."""

    source: int
    target: int
    index: int
    """Index among the buckets of the same source and target."""
    pieces: tuple[BucketPiece, ...]
    num_bytes: int
    """Size, with padding between pieces."""


def split(box: Box, item_bytes: int, most_bytes: int) -> Iterator[Box]:
    """Cut a box into parts of at most `most_bytes`, along its first dims: whole rows, multiples of ALIGN if possible.

    An element is never cut.
    """
    if box.numel * item_bytes <= most_bytes or box.numel == 1:
        yield box
        return
    dim = next(d for d, n in enumerate(box.shape) if n > 1)
    row = math.prod(box.shape[dim + 1 :]) * item_bytes
    step = max(1, most_bytes // row)
    even = ALIGN // math.gcd(row, ALIGN)
    step = step // even * even or step
    for low in range(0, box.shape[dim], step):
        yield from split(box.cut(dim, low, min(low + step, box.shape[dim])), item_bytes, most_bytes)


def pack(
    names: Sequence[str],
    boxes: Sequence[Box],
    dtypes: Sequence[str],
    sizes: np.ndarray[Any, Any],
    *,
    source: int,
    target: int,
    most_bytes: int,
) -> tuple[Bucket, ...]:
    """Put boxes into buckets, in order, each as full as the next box allows.

    sizes: int64 [pieces], bytes, none above `most_bytes`.
    """
    after = np.cumsum(-(-sizes // ALIGN) * ALIGN)
    starts = after - (-(-sizes // ALIGN) * ALIGN)
    ends = starts + sizes  # rise: a piece starts where the one before it ends, aligned
    buckets: list[Bucket] = []
    first = 0
    while first < len(sizes):
        base = int(starts[first])
        stop = int(np.searchsorted(ends, base + most_bytes, side="right"))
        places = (starts[first:stop] - base).tolist()
        pieces = tuple(map(BucketPiece, names[first:stop], boxes[first:stop], places, dtypes[first:stop]))
        buckets.append(Bucket(source, target, len(buckets), pieces, int(ends[stop - 1]) - base))
        first = stop
    return tuple(buckets)

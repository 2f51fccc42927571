"""Buckets are copied and hashed here, in one pass over memory where that is the fastest on this processor.

A bucket is a list of parts; each is copied to its target, or hashed in place. Three ways give the same hashes:

fused             both hashes are computed of each word while it is copied
in blocks         memcpy of a block that fits the core's own cache, then both hashes of it
copy then hash    numpy's copy, then one hash, then the other: any strides, any sizes, and without numba

The first two need numba, and parts of whole stripes (64 bytes; the last part: whole words). `fastest` measures the ways
once per processor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Literal

import numpy as np
import xxhash

from cosmos_rl_core import kernel_choice
from cosmos_rl_transfer.content import digest, xxh3
from cosmos_rl_transfer.content.digest import compiled, tensor_sum
from cosmos_rl_transfer.content.raw import Raw, Rows
from cosmos_rl_transfer.layout.box import Box

Hashes = tuple[int, tuple[int, ...]]
"""xxh3-64 of the bytes of all parts, one after the other, and each part's additive hash."""
Way = Literal["fused", "in blocks", "copy then hash"]
Kind = Literal["contiguous", "rows", "in place"]
"""Of a bucket: parts that are contiguous on both sides; rows that lie apart on one side; nothing to copy."""
WAYS: dict[Kind, tuple[Way, ...]] = {  # the plain one first
    "contiguous": ("copy then hash", "fused", "in blocks"),
    "rows": ("copy then hash", "fused", "in blocks"),
    "in place": ("copy then hash", "fused"),
}

_BLOCK_WORDS: dict[Way, int] = {"fused": 0, "in blocks": (256 << 10) // 8}


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor of `shape`, to be copied and hashed."""

    source: Raw
    """Unsigned integers [*box.shape], any strides."""
    target: Raw | None
    """The same, elsewhere; None: nothing is copied. At least one of the two is contiguous."""
    box: Box
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Move:
    """A part as rows of words."""

    source: tuple[Raw, int]
    """All words from the first row to the last, and words from one row's start to the next one's."""
    target: tuple[Raw, int]
    """The same; `source` where nothing is copied."""
    rows: Rows


def copied_and_hashed(parts: Sequence[Part], *, way: Way | None = None) -> Hashes:
    """Copy and hash a bucket. The additive hashes are those of the bytes in the targets. way: None for the fastest."""
    code = compiled()
    moves = None if code is None else _moves(parts)
    if code is None or moves is None:
        return _copy_then_hash(parts)
    if way is None:
        way = fastest("in place" if parts[0].target is None else _kind(moves))
    return _copy_then_hash(parts) if way == "copy then hash" else _in_one_pass(code, moves, _BLOCK_WORDS[way])


@functools.cache
def fastest(kind: Kind) -> Way:
    """Return the fastest way for buckets of this kind: measured for a few milliseconds, then read from a file."""
    buckets = samples(kind)
    num_mib = sum(part.source.nbytes for bucket in buckets for part in bucket) >> 20
    ways = {way: partial(_each, buckets, way) for way in WAYS[kind]}
    code = [__file__, digest.__file__, xxh3.__file__]
    if (module := compiled()) is not None and module.__file__ is not None:
        code.append(module.__file__)
    name = kernel_choice.fastest(f"transfer copies, {kind}, {num_mib} MiB", ways, code=code)
    return next(way for way in WAYS[kind] if way == name)


def prepare() -> None:
    """Compile and measure now, not while the other side waits."""
    if compiled() is not None:
        for kind in WAYS:
            fastest(kind)


def samples(kind: Kind) -> list[list[Part]]:
    """Return buckets of 4 MiB to measure: two out of tensors into a slot, and two out of the slot into tensors."""
    rows, width = 2048, 256  # words
    shape = (2 * rows, width if kind != "rows" else 2 * width)
    boxes = [Box((i * rows, 0), (rows, width)) for i in range(2)]
    tensors, slot = np.ones(shape, np.uint64), np.ones((rows, width), np.uint64)
    views = [tensors[box.slices()] for box in boxes]
    if kind == "in place":
        return [[Part(view, None, box, shape)] for view, box in zip(views, boxes)]
    out = [[Part(view, slot, box, shape)] for view, box in zip(views, boxes)]
    return out + [[Part(slot, view, box, shape)] for view, box in zip(views, boxes)]


def _each(buckets: Sequence[Sequence[Part]], way: Way) -> None:
    for parts in buckets:
        copied_and_hashed(parts, way=way)


def _copy_then_hash(parts: Sequence[Part]) -> Hashes:
    state, sums = xxhash.xxh3_64(), list[int]()
    for part in parts:
        seen = part.source
        if part.target is not None:
            np.copyto(part.target, part.source)
            seen = part.target
        sums.append(tensor_sum(seen, part.box, part.shape))
        packed = seen if seen.flags.c_contiguous else part.source
        state.update(packed.reshape(-1).view(np.uint8).data)
    return state.intdigest(), tuple(sums)


def _in_one_pass(code: ModuleType, moves: Sequence[_Move], block_words: int) -> Hashes:
    accumulators, done, sums = xxh3.start(), 0, list[int]()
    for i, move in enumerate(moves):
        rows, last = move.rows, i == len(moves) - 1
        place = rows.count, rows.width, rows.first, rows.stride
        stripe = done // 8 % xxh3.STRIPES
        found = code.pass_rows(*move.source, *move.target, block_words, *place, accumulators, stripe, last)
        sums.append(int(found))
        done += rows.count * rows.width
    return xxh3.finish(accumulators, 8 * done), tuple(sums)


def _moves(parts: Sequence[Part]) -> list[_Move] | None:
    """Return None where the compiled passes cannot take these parts."""
    moves = list[_Move]()
    for i, part in enumerate(parts):
        rows = _rows(part.box, part.shape, part.source.itemsize)
        source = None if rows is None else rows.words_in(part.source)
        target = source if rows is None or part.target is None else rows.words_in(part.target)
        if rows is None or source is None or target is None:
            return None
        odd = rows.width % 8 != 0
        if rows.width < 8 or (odd and (rows.count > 1 or i < len(parts) - 1)):
            return None
        moves.append(_Move(source, target, rows))
    return moves if sum(part.source.nbytes for part in parts) >= xxh3.LEAST_BYTES else None


def _kind(moves: Sequence[_Move]) -> Kind:
    return "contiguous" if all(move.rows.count == 1 for move in moves) else "rows"


_rows = functools.lru_cache(maxsize=1 << 12)(Rows.of)

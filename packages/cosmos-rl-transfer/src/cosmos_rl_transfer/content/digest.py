"""Two hashes: one proves a tensor in any layout, one proves a bucket on the wire.

The tensor hash is additive (integers mod 2^64). With the tensor's row-major bytes read as little-endian
64-bit words w_k,

    H = sum_k mix(k) * w_k,    mix(k) = T[k mod 2^11] * R(k div 2^11),    all mix(k) odd.

An element is some bits of one word, so H is also a sum over elements: the sums of disjoint boxes that cover
a tensor add up to H, whoever holds them and however it was cut. Every change of a single element changes H,
since mix(k) is odd. Of a word's last element only mix(k)'s low bits count: two swapped bfloat16 values escape
with a chance of at most 2^-16, which the buckets' hashes make up for. Neither hash guards against an attacker.

Rows of whole words take one pass, by compiled.py where numba is installed; everything else takes several of numpy.
Both hashes of a bucket, while it is copied: passes.py.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from types import ModuleType
from typing import Any

import numpy as np
import xxhash
from numpy.lib.stride_tricks import sliding_window_view

from cosmos_rl_transfer.content.raw import Raw, Rows
from cosmos_rl_transfer.layout.manifest import Box

log = logging.getLogger(__name__)

_MASK = (1 << 64) - 1
Words = np.ndarray[Any, np.dtype[np.uint64]]

BLOCK = 1 << 11
"""Words under one R: a table of 16 KiB stays in the first-level cache."""
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def odd(index: Words) -> Words:
    """Return splitmix64's finalizer of uint64 `index`, made odd (Steele, Lea, Flood 2014)."""
    z = (index + np.uint64(1)) * np.uint64(STEP)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def factors(first: int, count: int) -> Words:
    """Return R(first) ... R(first + count - 1), from a table for tensors up to 1 GiB."""
    if first + count <= len(_FACTORS):
        return _FACTORS[first : first + count]
    return odd(np.arange(first, first + count, dtype=np.uint64))


TABLE = odd(np.arange(1 << 40, (1 << 40) + BLOCK, dtype=np.uint64))
_FACTORS = odd(np.arange(1 << 16, dtype=np.uint64))


@functools.cache
def compiled() -> ModuleType | None:
    """Return compiled.py, or None where numba cannot be had."""
    try:
        return importlib.import_module("cosmos_rl_transfer.content.compiled")
    except ImportError as error:
        log.info("weights are hashed in several passes: %s", error)
        return None


def bucket_hash(data: Raw) -> int:
    """Return xxh3-64 of a contiguous array of bytes."""
    return xxhash.xxh3_64_intdigest(data.data)


def tensor_sum(array: Raw, box: Box, shape: tuple[int, ...]) -> int:
    """Return the part of H that `box` of a tensor of `shape` contributes; `array` holds the box's elements.

    `array`: unsigned integers [*box.shape], any strides. Sums of disjoint boxes add up mod 2^64.
    """
    if not box.numel:
        return 0
    code, rows = compiled(), Rows.of(box, shape, array.itemsize)
    found = None if rows is None else rows.words_in(array)
    if code is None or rows is None or found is None:
        return box_sum(array, box, shape)
    return int(code.sum_rows(*found, rows.count, rows.width, rows.first, rows.stride))


def sum_change(positions: Raw, old: Raw, new: Raw) -> int:
    """Return what H gains where some elements of a tensor change.

    `positions`: int64 [k], row-major in the whole tensor. `old`, `new`: their values, unsigned integers [k].
    """
    if not len(positions):
        return 0
    lanes = 8 // new.itemsize
    word = positions // lanes
    gain = new.astype(np.uint64) - old.astype(np.uint64)  # wraps, and so does H
    gain <<= ((positions & (lanes - 1)) * (64 // lanes)).view(np.uint64)
    gain *= TABLE[word & (BLOCK - 1)]
    word //= BLOCK
    first, last = int(word.min()), int(word.max())
    gain *= factors(first, last - first + 1)[word - first]
    return int(gain.sum(dtype=np.uint64))


def add(left: int, right: int) -> int:
    """Add two parts of H."""
    return (left + right) & _MASK


# The additive hash in passes of numpy, for arrays of any strides and alignment.

_GATHER_WORDS = 1 << 15
_LONG_RUN_BYTES = 8192


def box_sum(array: Raw, box: Box, shape: tuple[int, ...]) -> int:
    """Return the part of H of `array`, unsigned integers [*box.shape]."""
    if array.flags.c_contiguous and box.is_contiguous(shape):
        return run_sum(array.reshape(-1), box.start(shape))
    rows, starts = _rows(array, box, shape)
    if rows.shape[1] * rows.itemsize >= _LONG_RUN_BYTES:
        return sum(run_sum(np.ascontiguousarray(r), int(s)) for r, s in zip(rows, starts)) & _MASK
    return _gathered_sum(rows, starts)


def run_sum(run: Raw, start: int) -> int:
    """Return the part of H of elements `start` ... of the row-major tensor; `run` is contiguous [n]."""
    raw, first = run.view(np.uint8), start * run.itemsize
    if first % 8 or raw.ctypes.data % 8:
        raw, first = _padded(raw, first % 8), first - first % 8
    whole = raw.size // 8 * 8
    total = _words_sum(raw[:whole].view(np.uint64), first // 8)
    if whole < raw.size:
        total += _words_sum(_padded(raw[whole:], 0).view(np.uint64), (first + whole) // 8)
    return total & _MASK


def _padded(raw: Raw, lead: int) -> Raw:
    """Copy bytes behind `lead` zero bytes and up to a whole word, aligned; zeros add nothing to H."""
    padded = np.zeros(-(-(lead + raw.size) // 8) * 8, np.uint8)
    padded[lead : lead + raw.size] = raw
    return padded


def _words_sum(words: Raw, first: int) -> int:
    """sum_k mix(first + k) * words[k] as dot products: up to a block's edge, whole blocks, the rest."""
    total, size = 0, len(words)
    lead = min(-first % BLOCK, size)
    if lead:
        total += _dot(words[:lead], first)
    blocks = (size - lead) // BLOCK
    middle = lead + blocks * BLOCK
    if blocks:
        sums = np.einsum("rw,w->r", words[lead:middle].reshape(blocks, BLOCK), TABLE)  # twice as fast as np.dot
        at = (first + lead) // BLOCK
        total += int(np.dot(sums, factors(at, blocks)))
    if middle < size:
        total += _dot(words[middle:], first + middle)
    return total & _MASK


def _dot(words: Raw, first: int) -> int:
    """The same within one block."""
    at = first % BLOCK
    return int(np.einsum("w,w->", words, TABLE[at : at + len(words)])) * int(factors(first // BLOCK, 1)[0])


def _rows(array: Raw, box: Box, shape: tuple[int, ...]) -> tuple[Raw, Raw]:
    """View or copy the box as [rows, run] with the flat index of each row's first element [rows]."""
    run, inside = box.run_length(shape), len(shape)
    starts = np.zeros(1, np.uint64)
    while inside and math.prod(box.shape[inside - 1 :]) <= run:  # dims that lie within one run
        inside -= 1
    for dim, (offset, extent, size) in enumerate(zip(box.offset, box.shape, shape)):
        index = np.arange(offset, offset + (extent if dim < inside else 1), dtype=np.uint64)
        starts = (starts[:, None] * np.uint64(size) + index).reshape(-1)
    return np.ascontiguousarray(array).reshape(-1, run), starts


def _gathered_sum(rows: Raw, starts: Raw) -> int:
    """H of many short runs: word by word where all runs start and end on a word, else element by element."""
    lanes = 8 // rows.itemsize
    if rows.shape[1] % lanes == 0 and not (starts % np.uint64(lanes)).any():
        return _word_rows_sum(rows.view(np.uint64), (starts // np.uint64(lanes)).astype(np.int64))
    return _elements_sum(rows, starts)


def _elements_sum(rows: Raw, starts: Raw) -> int:
    """The same, element by element; `starts`: uint64 [rows]."""
    lanes = 8 // rows.itemsize
    total, step = 0, max(1, _GATHER_WORDS // rows.shape[1])
    column = np.arange(rows.shape[1], dtype=np.uint64)
    for i in range(0, len(rows), step):
        index = starts[i : i + step, None] + column
        word = index // np.uint64(lanes)
        mixed = TABLE[word % np.uint64(BLOCK)] * odd(word // np.uint64(BLOCK))
        lane_bits = (index % np.uint64(lanes)) * np.uint64(64 // lanes)
        mixed *= rows[i : i + step].astype(np.uint64) << lane_bits
        total += int(mixed.sum(dtype=np.uint64))
    return total & _MASK


def _word_rows_sum(rows: Raw, first: Raw) -> int:
    """sum_k mix(k) * w_k over rows of words uint64 [rows, width]; `first`: int64 [rows], k of each row's first word.

    A row within one block is a dot product with a window of T, then one factor R; rows across an edge go word by word.
    """
    width = rows.shape[1]
    at, block = first & (BLOCK - 1), first // BLOCK
    inside = at + width <= BLOCK
    total = _elements_sum(rows[~inside], first[~inside].astype(np.uint64))
    if not inside.all():
        rows, at, block = rows[inside], at[inside], block[inside]
    if not len(rows):
        return total & _MASK
    windows, sums = sliding_window_view(TABLE, width), np.empty(len(rows), np.uint64)
    step = max(1, _GATHER_WORDS // width)
    for i in range(0, len(rows), step):
        sums[i : i + step] = np.einsum("rw,rw->r", rows[i : i + step], windows[at[i : i + step]])
    lowest = int(block.min())
    scale = factors(lowest, int(block.max()) - lowest + 1)[block - lowest]
    return (total + int(np.dot(sums, scale))) & _MASK

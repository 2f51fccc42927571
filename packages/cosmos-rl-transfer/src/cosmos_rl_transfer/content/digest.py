"""Two hashes: one proves a tensor in any layout, one proves a bucket on the wire.

The tensor hash is additive (integers mod 2^64). With the tensor's row-major bytes read as little-endian
64-bit words w_k,

    H = sum_k mix(k) * w_k,    mix(k) = T[k mod 2^11] * R(k div 2^11),    all mix(k) odd.

An element is some bits of one word, so H is also a sum over elements: the sums of disjoint boxes that cover
a tensor add up to H, whoever holds them and however it was cut. Every change of a single element changes H,
since mix(k) is odd. Of a word's last element only mix(k)'s low bits count: two swapped bfloat16 values escape
with a chance of at most 2^-16, which the buckets' hashes make up for. Neither hash guards against an attacker.

One function of numba takes boxes of any shape and rows at any address; gpu.py has the same sum in torch, for a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import xxhash
from numba import njit, types
from numpy.lib.stride_tricks import as_strided

from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.layout.manifest import Box

BLOCK = 1 << 11
"""Words under one R: a table of 16 KiB stays in the first-level cache."""
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

uint64: Any = numba.uint64
"""All arithmetic is unsigned: it wraps mod 2^64, and loops over signed indices do not become vector instructions."""
_BLOCK = uint64(BLOCK)


def _array(dtype: Any) -> Any:
    return types.Array(dtype, 1, "C", readonly=True)


def _compiled(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function at import, or load it from numba's cache on disk."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return njit(signature, cache=True, **options)(function)
        except RuntimeError:  # neither this folder nor the user's cache can be written: a second more at every start
            return njit(signature, **options)(function)

    return compiled


@_compiled(uint64(uint64))
def odd(index: Any) -> Any:
    """Return splitmix64's finalizer of `index`, made odd (Steele, Lea, Flood 2014): R of a block."""
    z = (index + uint64(1)) * uint64(STEP)
    z = (z ^ (z >> uint64(30))) * uint64(FIRST)
    z = (z ^ (z >> uint64(27))) * uint64(SECOND)
    return (z ^ (z >> uint64(31))) | uint64(1)


TABLE = np.array([odd((1 << 40) + i) for i in range(BLOCK)], np.uint64)
"""T."""


def bucket_hash(data: Raw) -> int:
    """Return xxh3-64 of a contiguous array of bytes."""
    return xxhash.xxh3_64_intdigest(data.data)


def tensor_sum(array: Raw, box: Box, shape: tuple[int, ...]) -> int:
    """Return the part of H that `box` of a tensor of `shape` contributes; `array` holds the box's elements.

    `array`: unsigned integers [*box.shape], any strides. Sums of disjoint boxes add up mod 2^64.
    """
    if not box.numel:
        return 0
    # The box as rows that are contiguous in the tensor: `run` elements each, at `starts` in the tensor's row-major
    # bytes. Only the place in the tensor decides an element's factor, so that the cut does not change H.
    *outer, (size, offset, run) = box.merged(shape)
    rows = array.reshape(-1, run)  # a view of most arrays, else a copy
    if not rows[0].flags.c_contiguous:
        rows = np.ascontiguousarray(rows)
    starts = np.zeros(1, np.uint64)  # index of each row's first element in the tensor, at last
    for outer_size, outer_offset, extent in outer:
        indices = np.arange(outer_offset, outer_offset + extent, dtype=np.uint64)
        starts = (starts[:, None] * np.uint64(outer_size) + indices).reshape(-1)
    starts = (starts * np.uint64(size) + np.uint64(offset)) * np.uint64(array.itemsize)
    width, step = run * array.itemsize, rows.strides[0]
    memory = as_strided(rows[0].view(np.uint8), ((len(rows) - 1) * step + width,), (1,), writeable=False)
    return int(_sum_rows(memory, step, starts, width))


@_compiled(uint64(_array(types.uint8), uint64, _array(uint64), uint64))
def _sum_rows(memory: Any, step: Any, starts: Any, width: Any) -> Any:
    """Return what rows of `width` bytes each add to the tensor hash H.

    The r-th row is at memory[r * step] and begins with byte starts[r] of the tensor.
    """
    total = uint64(0)
    for row in range(uint64(len(starts))):
        # `here` walks through the memory, `byte` through the tensor; they need not have one alignment
        here, byte = row * step, starts[row]
        end = here + width
        while here < end:
            word, lane = byte // uint64(8), byte % uint64(8)
            at, part = word % _BLOCK, uint64(0)
            if lane or end - here < uint64(8):  # a byte of a word that the row holds in part
                num_bytes = uint64(1)
                part = (uint64(memory[here]) << (uint64(8) * lane)) * TABLE[at]
            else:  # whole words, to the row's end or the block's; x86-64 and arm64 read them at any address
                count = min((end - here) // uint64(8), _BLOCK - at)
                num_bytes = uint64(8) * count
                words = memory[here : here + num_bytes].view(np.uint64)
                for i in range(count):
                    part += words[i] * TABLE[at + i]
            total += part * odd(word // _BLOCK)
            here += num_bytes
            byte += num_bytes
    return total


def sum_change(positions: Raw, old: Raw, new: Raw) -> int:
    """Return the change of the tensor hash H after updating these elements.

    `positions`: int64 [k], row-major in the whole tensor. `old`, `new`: their values, unsigned integers [k].
    """
    gains = new.astype(np.uint64) - old.astype(np.uint64)  # wraps, and so does H
    return int(_sum_elements(np.ascontiguousarray(positions).view(np.uint64), gains, 8 // new.itemsize))


@_compiled(uint64(_array(uint64), _array(uint64), uint64))
def _sum_elements(positions: Any, values: Any, lanes: Any) -> Any:
    """Return the part of H of `values` [k] at `positions` [k]; lanes: elements of a word."""
    total, bits = uint64(0), uint64(64) // lanes
    for i in range(len(positions)):
        word, lane = positions[i] // lanes, positions[i] % lanes
        total += (values[i] << (lane * bits)) * TABLE[word % _BLOCK] * odd(word // _BLOCK)
    return total


def add(left: int, right: int) -> int:
    """Add two parts of H."""
    return (left + right) & ((1 << 64) - 1)

"""Two hashes: one proves a tensor in any layout, one proves a bucket on the wire.

The tensor hash is additive (integers mod 2^64). With the tensor's row-major bytes read as little-endian
64-bit words w_k,

    H = sum_k mix(k) * w_k,    mix(k) = T[k mod 2^11] * R(k div 2^11),    all mix(k) odd.

An element is some bits of one word, so H is also a sum over elements: the sums of disjoint boxes that cover
a tensor add up to H, whoever holds them and however it was cut. Every change of a single element changes H,
since mix(k) is odd. Of a word's last element only mix(k)'s low bits count: two swapped bfloat16 values escape
with a chance of at most 2^-16, which the buckets' hashes make up for. Neither hash guards against an attacker.

What lies in rows of whole words is passed over once, by compiled.py where numba is installed; the rest is numpy's.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

import numpy as np
import xxhash

from cosmos_rl_transfer.content import passes
from cosmos_rl_transfer.content.mixing import BLOCK, TABLE, factors
from cosmos_rl_transfer.content.rows import Raw, Rows
from cosmos_rl_transfer.layout.manifest import Box

_MASK = (1 << 64) - 1


log = logging.getLogger(__name__)


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
        return passes.box_sum(array, box, shape)
    return int(code.sum_rows(*found, rows.count, rows.width, rows.first, rows.stride))


def copy_sum(array: Raw, out: Raw, box: Box, shape: tuple[int, ...]) -> int:
    """Copy `array` to `out` [*box.shape], any strides, and return its `tensor_sum`: that of the very bytes written."""
    if not box.numel:
        return 0
    code, rows = compiled(), Rows.of(box, shape, array.itemsize)
    source = None if rows is None else rows.words_in(array)
    target = None if rows is None else rows.words_in(out)
    if code is None or rows is None or source is None or target is None:
        np.copyto(out, array)
        return tensor_sum(out, box, shape)
    return int(code.copy_rows(*source, *target, rows.count, rows.width, rows.first, rows.stride))


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

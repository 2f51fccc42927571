"""The additive hash over rows of words, and the same while they are copied: one pass at the speed of memory.

Imported where numba is (the extra `fast`). Compiled once, kept beside this file or in numba's own cache.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types, uint64

from cosmos_rl_transfer.content.digest import BLOCK, FIRST, SECOND, STEP, TABLE

_READ = types.Array(uint64, 1, "C", readonly=True)
_WRITE = types.Array(uint64, 1, "C")
_ROWS = (uint64,) * 4
_BLOCK = uint64(BLOCK)
_compile: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}


@njit(uint64(uint64), **_compile)
def _factor(block: Any) -> Any:
    """R(block); see digest.odd."""
    z = (block + uint64(1)) * uint64(STEP)
    z = (z ^ (z >> uint64(30))) * uint64(FIRST)
    z = (z ^ (z >> uint64(27))) * uint64(SECOND)
    return (z ^ (z >> uint64(31))) | uint64(1)


@njit(uint64(_READ, uint64, *_ROWS), **_compile)
def sum_rows(words: Any, step: Any, count: Any, width: Any, first: Any, stride: Any) -> Any:
    """Return the part of H of `count` rows of `width` words, the r-th at words[r * step].

    first + r * stride: index of its first word in the whole tensor. All unsigned: a signed index might be negative,
    and the inner loops would not become vector instructions.
    """
    total = uint64(0)
    for row in range(count):
        done = uint64(0)
        while done < width:
            index = first + row * stride + done
            at, here, part = index % _BLOCK, row * step + done, uint64(0)
            for i in range(min(width - done, _BLOCK - at)):
                part += words[here + i] * TABLE[at + i]
            total += part * _factor(index // _BLOCK)
            done += _BLOCK - at
    return total


@njit(uint64(_READ, uint64, _WRITE, uint64, *_ROWS), **_compile)
def copy_rows(words: Any, step: Any, out: Any, out_step: Any, count: Any, width: Any, first: Any, stride: Any) -> Any:
    """Do the same, and copy the r-th row to out[r * out_step]."""
    total = uint64(0)
    for row in range(count):
        done = uint64(0)
        while done < width:
            index = first + row * stride + done
            at, here, there, part = index % _BLOCK, row * step + done, row * out_step + done, uint64(0)
            for i in range(min(width - done, _BLOCK - at)):
                word = words[here + i]
                out[there + i] = word
                part += word * TABLE[at + i]
            total += part * _factor(index // _BLOCK)
            done += _BLOCK - at
    return total

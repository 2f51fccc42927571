"""The factors of the additive hash (digest.py): mix(k) = T[k mod BLOCK] * R(k div BLOCK), all odd."""

from __future__ import annotations

from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint64]]

BLOCK = 1 << 11
"""Words under one R: a table of 16 KiB stays in the first-level cache."""
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def odd(index: Words) -> Words:
    """Splitmix64's finalizer of uint64 `index`, made odd (Steele, Lea, Flood 2014)."""
    z = (index + np.uint64(1)) * np.uint64(STEP)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def factors(first: int, count: int) -> Words:
    """R(first) ... R(first + count - 1), from a table for tensors up to 1 GiB."""
    if first + count <= len(_FACTORS):
        return _FACTORS[first : first + count]
    return odd(np.arange(first, first + count, dtype=np.uint64))


TABLE = odd(np.arange(1 << 40, (1 << 40) + BLOCK, dtype=np.uint64))
_FACTORS = odd(np.arange(1 << 16, dtype=np.uint64))

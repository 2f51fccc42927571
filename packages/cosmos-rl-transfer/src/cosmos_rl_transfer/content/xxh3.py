"""xxh3-64 of more than 240 bytes: its constants, the start and the end. compiled.py has the loop between.

From its specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md); no seed, the default secret.
"""

from __future__ import annotations

import numpy as np

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
STRIPES = (len(SECRET) - 64) // 8
"""Stripes of 64 bytes between two scrambles."""
LEAST_BYTES = 241
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = (PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1)
_MASK = (1 << 64) - 1
_MERGE = np.frombuffer(SECRET[11 : 11 + 64], "<u8").tolist()


def start() -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return the eight accumulators before the first stripe."""
    return np.array(_START, np.uint64)


def finish(accumulators: np.ndarray[tuple[int], np.dtype[np.uint64]], num_bytes: int) -> int:
    """Return the hash of `num_bytes` bytes from the accumulators behind the last stripe."""
    keyed = [value ^ key for value, key in zip(accumulators.tolist(), _MERGE)]
    total = num_bytes * PRIME64_1
    for low, high in zip(keyed[::2], keyed[1::2]):
        product = low * high
        total += (product & _MASK) ^ (product >> 64)
    total &= _MASK
    total = ((total ^ (total >> 37)) * 0x165667919E3779F9) & _MASK
    return total ^ (total >> 32)

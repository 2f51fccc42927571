"""The additive hash over rows of words, and both hashes while rows are copied: one pass at the speed of memory.

Imported where numba is (the extra `fast`). Compiled once, kept beside this file or in numba's own cache.
`pass_rows` computes xxh3-64 as its specification describes it for long inputs (github.com/Cyan4973/xxHash, doc/
xxhash_spec.md): eight 64-bit accumulators take a stripe of eight words at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import boolean, njit, types
from numba import extending as _extending
from numba.core import cgutils

from cosmos_rl_transfer.content.digest import BLOCK, FIRST, SECOND, STEP, TABLE
from cosmos_rl_transfer.content.xxh3 import PRIME32_1, SECRET, STRIPES

uint64: Any = numba.uint64
intrinsic: Callable[..., Any] = _extending.intrinsic
_READ = types.Array(uint64, 1, "C", readonly=True)
_WRITE = types.Array(uint64, 1, "C")
_ROWS = (uint64,) * 4
_BLOCK = uint64(BLOCK)
_STRIPE = uint64(8)  # words
_STRIPES = uint64(STRIPES)
_SECRET = np.frombuffer(SECRET, np.uint8)
_SCRAMBLE = np.frombuffer(SECRET[-64:], np.uint64)
_LAST = uint64(len(SECRET) - 64 - 7)
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


def _emit_stripes(builder: Any, arguments: Any, *, copies: bool) -> Any:
    """Emit the loop over `count` stripes with vectors of eight words; return sum_k table[k] * words[k].

    arguments: addresses of the words, their copy, the table, the secret, memory to prefetch, the accumulators, and
    count. The compiler does not make such vectors of a loop by itself.
    """
    word, byte = ir.IntType(64), ir.IntType(8)
    vector = ir.VectorType(word, 8)
    *addresses, count = arguments
    words, copy, table, secret, ahead = (builder.inttoptr(address, byte.as_pointer()) for address in addresses[:5])
    accumulators = builder.inttoptr(addresses[5], vector.as_pointer())
    hints = [ir.Constant(ir.IntType(32), hint) for hint in (0, 3, 1)]  # to be read, in all caches, data
    kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), *(hint.type for hint in hints)])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    zero = ir.Constant(vector, [0] * 8)
    low, shift = (ir.Constant(vector, [value] * 8) for value in ((1 << 32) - 1, 32))
    totals = [cgutils.alloca_once_value(builder, zero) for _ in range(3)]

    def at(base: Any, offset: Any) -> Any:
        return builder.bitcast(builder.gep(base, [offset]), vector.as_pointer())

    def add(total: Any, value: Any) -> None:
        builder.store(builder.add(builder.load(total), value), total)

    with cgutils.for_range(builder, count) as loop:
        offset = builder.shl(loop.index, ir.Constant(word, 6))
        builder.call(prefetch, [builder.gep(ahead, [offset]), *hints])
        data = builder.load(at(words, offset), align=8)
        if copies:
            builder.store(data, at(copy, offset), align=8)
        keyed = builder.xor(data, builder.load(at(secret, builder.shl(loop.index, ir.Constant(word, 3))), align=1))
        add(totals[0], builder.mul(data, builder.load(at(table, offset), align=8)))
        add(totals[1], builder.mul(builder.and_(keyed, low), builder.lshr(keyed, shift)))
        add(totals[2], data)
    sums, products, plain = (builder.load(total) for total in totals)
    swap = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])
    gained = builder.add(products, builder.shuffle_vector(plain, zero, swap))
    builder.store(builder.add(builder.load(accumulators, align=8), gained), accumulators, align=8)
    total = ir.Constant(word, 0)
    for lane in range(8):
        total = builder.add(total, builder.extract_element(sums, ir.Constant(ir.IntType(32), lane)))
    return total


_SIGNATURE = uint64(*(uint64,) * 7)


@intrinsic
def _hash_stripes(
    context: Any, words: Any, copy: Any, table: Any, secret: Any, ahead: Any, accumulators: Any, count: Any
) -> Any:
    return _SIGNATURE, lambda _, builder, __, arguments: _emit_stripes(builder, arguments, copies=False)


@intrinsic
def _copy_stripes(
    context: Any, words: Any, copy: Any, table: Any, secret: Any, ahead: Any, accumulators: Any, count: Any
) -> Any:
    return _SIGNATURE, lambda _, builder, __, arguments: _emit_stripes(builder, arguments, copies=True)


@intrinsic
def _copy_bytes(context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """The C library's memcpy; returns the number of bytes."""

    def emit(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        to, of = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to, of, arguments[2], 1)
        return arguments[2]

    return uint64(uint64, uint64, uint64), emit


@njit(uint64(_READ, uint64, uint64, uint64), **_compile)
def _sum_words(words: Any, here: Any, count: Any, index: Any) -> Any:
    """sum_k mix(index + k) * words[here + k], word by word."""
    total = uint64(0)
    for i in range(count):
        total += words[here + i] * TABLE[(index + i) % _BLOCK] * _factor((index + i) // _BLOCK)
    return total


@njit(types.void(_WRITE), **_compile)
def _scramble(accumulators: Any) -> None:
    """End a block of stripes."""
    for i in range(8):
        value = accumulators[i]
        accumulators[i] = (value ^ (value >> uint64(47)) ^ _SCRAMBLE[i]) * uint64(PRIME32_1)


@njit(uint64(_READ, uint64, _READ, uint64, uint64, *_ROWS, _WRITE, uint64, boolean), **_compile)
def pass_rows(
    words: Any,
    step: Any,
    out: Any,
    out_step: Any,
    copied_words: Any,
    count: Any,
    width: Any,
    first: Any,
    stride: Any,
    accumulators: Any,
    stripe: Any,
    last: Any,
) -> Any:
    """Copy the r-th row to out[r * out_step], return what `sum_rows` does of it, and update xxh3's accumulators.

    copied_words: copy so many words with memcpy, then hash them, and so on; 0: copy and hash word by word. Where `out`
    is `words` nothing is copied. stripe: stripes in the bucket before these rows, modulo a block. last: whether the
    bucket ends here; only then, and with one row, may `width` be no multiple of 8. It is at least 8.
    """
    total, secret, table = uint64(0), uint64(_SECRET.ctypes.data), uint64(TABLE.ctypes.data)
    source, target, sums = uint64(words.ctypes.data), uint64(out.ctypes.data), uint64(accumulators.ctypes.data)
    copies = source != target
    to_rows = step <= width and out_step > width
    ahead = uint64(8) * (out_step if to_rows else step if step > width else uint64(0))  # the next row is prefetched
    left = (count * width - uint64(1 if last else 0)) // _STRIPE
    for row in range(count):
        done, copied, here, there = uint64(0), uint64(0), row * step, row * out_step
        while left and done + _STRIPE <= width:
            come, go = source + uint64(8) * (here + done), target + uint64(8) * (there + done)
            if copies and copied_words and done == copied:
                copied += _copy_bytes(go, come, uint64(8) * min(copied_words, width - done)) // uint64(8)
            index = first + row * stride + done
            at = index % _BLOCK
            room = (_BLOCK - at) // _STRIPE
            n = min(min(_STRIPES - stripe, (width - done) // _STRIPE), min(left, max(room, uint64(1))))
            if copied:
                n = min(n, max((copied - done) // _STRIPE, uint64(1)))
            mix = table + uint64(8) * (at if room else uint64(0))
            key = secret + uint64(8) * stripe
            soon = (go if to_rows else come) + ahead
            if copies and not copied:
                part = _copy_stripes(come, go, mix, key, soon, sums, n)
            else:
                part = _hash_stripes(go, go, mix, key, soon, sums, n)
            total += part * _factor(index // _BLOCK) if room else _sum_words(out, there + done, _STRIPE, index)
            stripe, left, done = stripe + n, left - n, done + n * _STRIPE
            if stripe == _STRIPES:
                _scramble(accumulators)
                stripe = uint64(0)
        if copies and done >= copied:
            _copy_bytes(
                target + uint64(8) * (there + done), source + uint64(8) * (here + done), uint64(8) * (width - done)
            )
        total += _sum_words(out, there + done, width - done, first + row * stride + done)
    if last:
        end = target + uint64(8) * ((count - uint64(1)) * out_step + width - _STRIPE)
        _hash_stripes(end, end, table, secret + _LAST, end, sums, uint64(1))
    return total

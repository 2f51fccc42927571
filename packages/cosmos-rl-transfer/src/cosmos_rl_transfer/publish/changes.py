"""The changes of one version: a pass over a tensor that compares it with a copy and brings the copy up to date.

chunk by chunk, in the cache:   cast to the wire dtype -> compare eight bytes at a time -> where they differ, elements
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_transfer.content.raw import Raw, same_width, torch_view

CHUNK_BYTES = 512 << 10
"""Of the copy, for one comparison: with its counterpart and the mask, what a core's own cache holds."""
MOST_CHANGED = 1 / 3
"""Of a tensor's elements; beyond it nobody wants a list. So lists take at most as much memory as the copy."""
_PROBE_CHUNKS, _PROBE_PARTS = 8, 4
"""A fourth of every eighth chunk is looked at first, to see whether comparing all is worth it."""
_MANY = 1 / 8
"""Of the words in a chunk; beyond it elements are compared at once."""


@dataclass(frozen=True, slots=True)
class Found:
    """Elements of one rank's part of a tensor that changed."""

    positions: Raw
    """int32 [k], or int64 where the part is too large for it; ascending, row-major in the part."""
    old: Raw
    """Their former bits: unsigned integers [k]."""


class Comparison:
    """The pass. Holds the scratch memory of one thread."""

    def __init__(self) -> None:
        self._scratch = np.zeros(CHUNK_BYTES, np.uint8)
        self._mask = np.zeros(CHUNK_BYTES, np.bool_)

    def refresh(self, live: Tensor, copy: Raw, *, dtype: str) -> Found | None:
        """Bring `copy` up to date and return what changed in it; None if that is too much to list.

        live: this rank's part of a tensor, any strides, device and dtype. copy: unsigned integers [live.numel()] of
        the width of `dtype`, the one it travels in.
        """
        most = int(len(copy) * MOST_CHANGED)
        if self._probe(live, copy, dtype) > MOST_CHANGED:
            self.renew(live, copy, dtype=dtype)
            return None
        wide = np.int32 if len(copy) <= np.iinfo(np.int32).max else np.int64
        positions, old, found = [np.zeros(0, wide)], [np.zeros(0, copy.dtype)], 0
        for first, part in chunks(live, CHUNK_BYTES // copy.itemsize):
            new = self._raw(part, dtype)
            known = copy[first : first + len(new)]
            if found > most:
                np.copyto(known, new)
                continue
            at = self._differing(new, known)
            found += len(at)
            positions.append((at + first).astype(wide))
            old.append(known[at])
            if len(at) * 16 > len(new):
                np.copyto(known, new)
            elif len(at):
                known[at] = new[at]
        return None if found > most else Found(np.concatenate(positions), np.concatenate(old))

    def renew(self, live: Tensor, copy: Raw, *, dtype: str) -> None:
        """Bring `copy` up to date without a comparison."""
        for first, part in chunks(live, CHUNK_BYTES // copy.itemsize):
            new = self._raw(part, dtype)
            np.copyto(copy[first : first + len(new)], new)

    def _probe(self, live: Tensor, copy: Raw, dtype: str) -> float:
        """Return which part of a few elements changed; 0 where the tensor is small."""
        seen = changed = 0
        most = CHUNK_BYTES // copy.itemsize
        if len(copy) < most:
            return 0.0
        for first, part in islice(chunks(live, most), 0, None, _PROBE_CHUNKS):
            _, few = next(chunks(part, most // _PROBE_PARTS))
            new = self._raw(few, dtype)
            seen += len(new)
            changed += int(np.count_nonzero(self._unequal(new, copy[first : first + len(new)])))
        return changed / seen

    def _raw(self, part: Tensor, dtype: str) -> Raw:
        """Return a chunk as it is sent: a view if possible, else cast into the scratch buffer."""
        kind: torch.dtype = getattr(torch, dtype)
        if part.device.type == "cpu" and part.dtype == kind and part.is_contiguous():
            return same_width(part).reshape(-1)
        cast = torch_view(self._scratch, 0, tuple(part.shape), dtype)
        cast.copy_(part)
        return same_width(cast).reshape(-1)

    def _unequal(self, new: Raw, old: Raw) -> Raw:
        """Compare: bool [len(new)], good until the next call."""
        return np.not_equal(new, old, out=self._mask[: len(new)])

    def _differing(self, new: Raw, old: Raw) -> Raw:
        """Return where two chunks differ: int64 [k]."""
        lanes = 8 // new.itemsize
        if lanes == 1 or len(new) % lanes:
            return np.flatnonzero(self._unequal(new, old))
        new_words, old_words = new.view(np.uint64), old.view(np.uint64)
        words = np.flatnonzero(self._unequal(new_words, old_words))
        if len(words) > len(new_words) * _MANY:
            return np.flatnonzero(self._unequal(new, old))
        differs = (new_words[words] ^ old_words[words]).view(new.dtype) != 0
        lane = np.flatnonzero(differs)
        return (words * lanes)[lane // lanes] + lane % lanes


def chunks(tensor: Tensor, most: int) -> Iterator[tuple[int, Tensor]]:
    """Cut a tensor into parts of at most `most` elements that follow each other in row-major order.

    Yields (row-major position of the first element, the part).
    """
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        yield from ((low, flat[low : low + most]) for low in range(0, len(flat), most))
        return
    if tensor.numel() <= most:
        yield 0, tensor
        return
    dim = next(d for d, size in enumerate(tensor.shape) if size > 1)
    row = tensor.numel() // tensor.shape[dim]
    step = max(1, most // row)
    for low in range(0, tensor.shape[dim], step):
        part = tensor.narrow(dim, low, min(step, tensor.shape[dim] - low))
        yield from ((low * row + at, inner) for at, inner in chunks(part, most))

"""A publisher's copy of its parts in their wire dtypes, for deltas. Versions are read from it, not from live memory.

owner     begin(version)       earlier reads end: a fence of the readers comes before
          refresh(weights)     tensor by tensor: compare, update the copy, store the changes
          ... the live tensors may change: nobody reads them any more ...
reader    runs, pack, delta    wait until the bucket's tensors are up to date

`Comparison` does one tensor chunk by chunk, in the cache: cast to the wire dtype, compare eight bytes at a time, then
single elements where they differ.

Where more than half of the bytes changed too much to be listed, twice in a row, the next versions are read from live
memory as without deltas (`bypass`): for 1, 2, 4 ... 32 versions, until a comparison finds less.

The copy costs the rank's parts once in memory; the stored changes, at most once more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_core.weight_sync import GPU_BUCKET_BYTES, SyncSection
from cosmos_rl_transfer.content.arena import Arena
from cosmos_rl_transfer.content.delta import (
    Delta,
    Extent,
    PieceDelta,
    encode,
    encoded_bytes,
    inward,
    outward,
    row_strides,
    widen,
)
from cosmos_rl_transfer.content.digest import add
from cosmos_rl_transfer.content.gpu import SideStream
from cosmos_rl_transfer.content.proof import Proof, gain
from cosmos_rl_transfer.content.raw import Raw, same_width, torch_view
from cosmos_rl_transfer.errors import Superseded, TransferError
from cosmos_rl_transfer.layout.dtensor import local
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES
from cosmos_rl_transfer.planning.plan import Bucket, BucketPiece, wire_dtype_of
from cosmos_rl_transfer.publish.memory import LiveWeights, PublishedMemory
from cosmos_rl_transfer.transports.base import ByteRun

if TYPE_CHECKING:
    from torch import Tensor

GPU_CHUNK_BYTES = 16 << 20
"""Of the copy, for one transfer from a GPU."""
CHUNK_BYTES = 512 << 10
"""Of the copy, for one comparison: with its counterpart and the mask, what a core's own cache holds."""
MOST_CHANGED = 1 / 3
"""Max fraction of changed elements for which a list is built. So lists take at most as much memory as the copy."""
_PROBE_CHUNKS, _PROBE_PARTS = 8, 4
"""A fourth of every eighth chunk is compared first, to estimate the fraction that changed."""
_MANY = 1 / 8
"""Max fraction of changed words in a chunk for which only their elements are compared."""


@dataclass(frozen=True, slots=True)
class Found:
    """Elements of one rank's part of a tensor that changed."""

    positions: Raw
    """int32 [k], or int64 where the part is too large for it; ascending, row-major in the part."""
    old: Raw
    """Their former bits: unsigned integers [k]."""


class Comparison:
    """The pass. Holds the scratch memory of one thread."""

    def __init__(self, side: SideStream | None = None) -> None:
        """side: for tensors on a GPU."""
        self._side = side
        self._scratch = np.zeros(CHUNK_BYTES, np.uint8)
        self._mask = np.zeros(CHUNK_BYTES, np.bool_)

    def refresh(self, live: Tensor, copy: Raw, *, dtype: str) -> Found | None:
        """Bring `copy` up to date and return what changed in it; None if that is too much to list.

        live: this rank's part of a tensor, any strides, device and dtype. copy: unsigned integers [live.numel()] of
        the width of `dtype`, the one it travels in.
        """
        # A list of more than MOST_CHANGED of the elements would be no shorter than the tensor: the probe finds that out
        # early, `num_changed > most` on the way. From there on the rest is only copied.
        most = int(len(copy) * MOST_CHANGED)
        if self._probe(live, copy, dtype) > MOST_CHANGED:
            self.renew(live, copy, dtype=dtype)
            return None
        wide = np.int32 if len(copy) <= np.iinfo(np.int32).max else np.int64
        positions, old, num_changed = [np.zeros(0, wide)], [np.zeros(0, copy.dtype)], 0
        for first, new in self._parts(live, dtype, CHUNK_BYTES // copy.itemsize):
            known = copy[first : first + len(new)]
            if num_changed > most:
                np.copyto(known, new)
                continue
            at = self._differing(new, known)
            num_changed += len(at)
            positions.append((at + first).astype(wide))
            old.append(known[at])
            if len(at) * 16 > len(new):
                np.copyto(known, new)
            elif len(at):
                known[at] = new[at]
        return None if num_changed > most else Found(np.concatenate(positions), np.concatenate(old))

    def renew(self, live: Tensor, copy: Raw, *, dtype: str) -> None:
        """Bring `copy` up to date without a comparison."""
        for first, new in self._parts(live, dtype, CHUNK_BYTES // copy.itemsize):
            np.copyto(copy[first : first + len(new)], new)

    def _probe(self, live: Tensor, copy: Raw, dtype: str) -> float:
        """Return which part of a few elements changed; 0 where the tensor is small, or on a GPU."""
        seen = changed = 0
        most = CHUNK_BYTES // copy.itemsize
        if len(copy) < most or live.device.type == "cuda":
            return 0.0
        for first, part in islice(chunks(live, most), 0, None, _PROBE_CHUNKS):
            _, few = next(chunks(part, most // _PROBE_PARTS))
            new = self._raw(few, dtype)
            seen += len(new)
            changed += int(np.count_nonzero(self._unequal(new, copy[first : first + len(new)])))
        return changed / seen

    def _parts(self, live: Tensor, dtype: str, most: int) -> Iterator[tuple[int, Raw]]:
        """Yield (row-major position, up to `most` elements as they are sent); each is good until the next."""
        if live.device.type != "cuda":
            yield from ((first, self._raw(part, dtype)) for first, part in chunks(live, most))
            return
        assert self._side is not None, "made with the publisher of tensors on a GPU"
        for first, block in chunks(live, GPU_CHUNK_BYTES // ITEM_BYTES[dtype]):
            elements = same_width(self._side.to_host(block, getattr(torch, dtype))).reshape(-1)
            yield from ((first + low, elements[low : low + most]) for low in range(0, len(elements), most))

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


MOST_BYTES = 1 / 2
"""Max size of a delta, as a fraction of the bucket's bytes."""
MOST_BYPASSED = 32
"""Versions between two comparisons where most changes: two of 34 are copied for nothing."""


@dataclass(frozen=True, slots=True)
class _Selected:
    """The changes of one piece."""

    positions: Raw
    """int64 [k], in the piece's box."""
    at: Raw
    """[k]: where they lie in the rank's part."""
    old: Raw


class Outgoing(PublishedMemory):
    """One rank's parts in their wire dtypes. Any thread may read; one thread owns it."""

    def __init__(self, live: LiveWeights, *, settings: SyncSection, side: SideStream | None = None) -> None:
        """Allocate the copy. side: for weights on a GPU, which are always read from the copy."""
        super().__init__(live.manifest, rank=live.rank)
        if side is not None:
            self.bucket_bytes = GPU_BUCKET_BYTES
        self._wire_dtypes: dict[str, str] = {}
        """Widest dtype, by tensor, that targets which joined take."""
        dtypes = {spec.name: wire_dtype_of(spec, settings.dtype) for spec in self.manifest.specs.values()}
        self.arena = Arena(self.manifest, rank=self.rank, wire_dtypes=dtypes)
        self.version = self.base = -1
        """The version it holds, and the one that deltas start from: -1 for none."""
        self.bypass = False
        """Whether the newest version is read from live memory."""
        self._bypass_left, self._next_bypass = 0, 0
        self._live = live
        self._full_every, self._since_full = settings.full_every, 0
        self._comparison, self._on_gpu = Comparison(side), side is not None
        self._changes: dict[str, Found | None] = {}
        self._changed = threading.Condition()
        self._behind: set[str] = set()
        """Tensors that are not up to date yet."""
        self._broken = False
        self._sums: dict[tuple[BucketPiece, ...], tuple[int, tuple[int, ...]]] = {}
        """By pieces: a version and their additive hashes in it."""

    @property
    def wants_bypass(self) -> bool:
        """Whether the next version should not be copied."""
        return self._bypass_left > 0 and not self._on_gpu

    def start_bypass(self, version: int) -> None:
        """Serve readers out of live memory from now on, without a copy."""
        with self._changed:
            self.version, self.base, self.bypass, self._broken = version, -1, True, False
            self._behind.clear()
            self._bypass_left -= 1

    def want(self, wire_dtypes: Mapping[str, str]) -> None:
        """Keep these dtypes from the next version on, or wider ones that another target takes."""
        with self._changed:
            for name in self.arena.names:
                known, dtype = self._wire_dtypes.get(name), wire_dtypes[name]
                self._wire_dtypes[name] = dtype if known is None or ITEM_BYTES[known] < ITEM_BYTES[dtype] else known

    def adapt(self) -> bool:
        """Allocate the copy anew if its dtypes are not those that targets take; return whether that was so.

        Nobody reads it meanwhile.
        """
        current = {name: self.arena.places[name].dtype for name in self.arena.names}
        with self._changed:
            dtypes = current | self._wire_dtypes
            if dtypes == current:
                return False
            self.arena = Arena(self.manifest, rank=self.rank, wire_dtypes=dtypes)
            self._broken = True  # the next version is complete
        return True

    def begin(self, version: int) -> None:
        """Make readers wait for `version` from now on."""
        with self._changed:
            full = self.version < 0 or self.bypass or self._broken or self._since_full + 1 >= self._full_every
            self.bypass = False
            self._since_full = 0 if full else self._since_full + 1
            self.version, self.base = version, -1 if full else self.version
            self._behind, self._broken = set(self.arena.names), False
            self._sums = {pieces: known for pieces, known in self._sums.items() if known[0] == self.base}

    def refresh(self, weights: Mapping[str, Tensor]) -> None:
        """Bring the copy up to date; `weights` must not change until this returns."""
        try:
            for name in self.arena.names:
                place = self.arena.places[name]
                copy = self.arena.flat(name)
                changes = None
                if self.base < 0:
                    self._comparison.renew(local(weights[name]), copy, dtype=place.dtype)
                else:
                    changes = self._comparison.refresh(local(weights[name]), copy, dtype=place.dtype)
                with self._changed:
                    self._changes[name] = changes
                    self._behind.discard(name)
                    self._changed.notify_all()
            if self.base >= 0:
                self._consider_bypass()
        finally:
            with self._changed:
                self._broken = bool(self._behind)
                self._changed.notify_all()

    def _consider_bypass(self) -> None:
        """After a comparison."""
        dense = sum(self.arena.places[name].num_bytes for name in self.arena.names if self._changes[name] is None)
        if dense > self.arena.memory.nbytes / 2:
            self._bypass_left, self._next_bypass = self._next_bypass, min(2 * self._next_bypass or 1, MOST_BYPASSED)
        else:
            self._next_bypass = 0

    def runs(self, bucket: Bucket) -> list[ByteRun] | None:
        self._wait(bucket)
        return self._live.runs(bucket) if self.bypass else self.arena.runs(bucket)

    def pack(self, bucket: Bucket, out: Raw) -> Proof:
        self._wait(bucket)
        return self._live.pack(bucket, out) if self.bypass else self.arena.pack(bucket, out)

    def delta(self, bucket: Bucket, *, base: int, version: int) -> Delta | None:
        """As in `PublishedMemory`. Raises Superseded if the copy went on to another version meanwhile."""
        self._wait(bucket)
        if base < 0 or (base, version) != (self.base, self.version) or not self.arena.sends(bucket):
            return None
        # cheapest reason to give up first: counts of changes, then the encoded size, then the values themselves
        extents = [Extent(p.box.numel, self.arena.places[p.name].item_bytes) for p in bucket.pieces]
        selected: list[_Selected] = []
        most = num_bytes = int(bucket.num_bytes * MOST_BYTES)
        for piece, extent in zip(bucket.pieces, extents):
            change = self._select(piece)
            if change is None or (num_bytes := num_bytes - len(change.positions) * extent.item_bytes) < 0:
                return None
            selected.append(change)
        wide = [widen(change.positions, extent) for change, extent in zip(selected, extents)]
        if encoded_bytes(wide, extents) > most:
            return None
        values = [self._values(*each) for each in zip(bucket.pieces, selected, wide)]
        delta = Delta(
            encode([PieceDelta(p, v) for p, v in zip(wide, values)], extents), self._sums_now(version, bucket, selected)
        )
        if self.version != version:
            raise Superseded(f"version {version} gave way to {self.version} while it was read")
        return delta

    def keep_sums(self, version: int, bucket: Bucket, sums: tuple[int, ...]) -> None:
        with self._changed:
            if version == self.version:
                self._sums[bucket.pieces] = version, sums

    def _wait(self, bucket: Bucket) -> None:
        needed = {self.manifest.canonical(piece.name) for piece in bucket.pieces}
        with self._changed:
            self._changed.wait_for(lambda: self._broken or not needed & self._behind)
            if self._broken:
                raise TransferError(f"version {self.version} could not be copied at the publisher")

    def _select(self, piece: BucketPiece) -> _Selected | None:
        """Return what changed in a piece; None where that is not known."""
        changes = self._changes[self.manifest.canonical(piece.name)]
        if changes is None:
            return None
        place = self.arena.places[piece.name]
        which, positions = inward(changes.positions, piece.box.within(place.box), place.box.shape)
        return _Selected(positions, changes.positions[which], changes.old[which])

    def _values(self, piece: BucketPiece, selected: _Selected, wide: Raw) -> Raw:
        """Return the values at the positions `wide` of the piece, which include those of `selected`."""
        at = selected.at
        if wide is not selected.positions:
            place = self.arena.places[piece.name]
            start = piece.box.within(place.box).start(place.box.shape)
            at = outward(wide, piece.box.shape, row_strides(place.box.shape), start)
        return self.arena.flat(piece.name)[at]

    def _sums_now(self, version: int, bucket: Bucket, selected: list[_Selected]) -> tuple[int, ...]:
        with self._changed:
            known, sums = self._sums.get(bucket.pieces, (-1, ()))
        if known != version:
            if known == self.base:
                sums = tuple(add(*pair) for pair in zip(sums, map(self._gain, bucket.pieces, selected)))
            else:
                sums = self.arena.sums(bucket)
            self.keep_sums(version, bucket, sums)
        return sums

    def _gain(self, piece: BucketPiece, selected: _Selected) -> int:
        place = self.arena.places[piece.name]
        new = self.arena.flat(piece.name)[selected.at]
        return gain(piece, place.shape, selected.positions, old=selected.old, new=new)

"""Destination of buckets at the subscriber: a shadow copy, or the live tensors.

Shadow     an arena of this rank's parts in their wire dtype; `apply` copies changed buckets into the live tensors
InPlace    the live tensors themselves, which must not be used meanwhile

    begin(base)                          a version; deltas start from version `base`
    write, write_delta                   verified buckets, from several threads
    apply                                the rest into the live tensors, between two tokens

Deltas are written once their hashes are verified to lead to those of the new version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_transfer.content.arena import Arena
from cosmos_rl_transfer.content.delta import PieceDelta, outward, row_strides
from cosmos_rl_transfer.content.digest import add, tensor_sum
from cosmos_rl_transfer.content.gpu import SideStream, device_sum, gpu_of, pin, typed
from cosmos_rl_transfer.content.proof import NOT_HASHED, Proof, copy_proof, gain
from cosmos_rl_transfer.content.raw import SAME_WIDTH, Raw, raw_view, same_width
from cosmos_rl_transfer.content.staging import LivePart
from cosmos_rl_transfer.layout.dtensor import local
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES, Box, Manifest
from cosmos_rl_transfer.planning.plan import Bucket, BucketPiece

_TASK_BYTES = 4 << 20
"""Bytes per copy task of a thread."""


class Shadow:
    """A copy of one rank's parts in host memory."""

    keeps_deltas = False
    """Whether deltas are written by `apply` alone: they may be received before the live tensors may be written."""
    takes_deltas = True
    """Whether it has the exact bits that deltas change."""

    def __init__(
        self, manifest: Manifest, weights: Mapping[str, Tensor], *, rank: int, wire_dtypes: Mapping[str, str]
    ) -> None:
        self.arena = Arena(manifest, rank=rank, wire_dtypes=wire_dtypes)
        device = gpu_of(weights.values())
        self.side = SideStream(device) if device is not None else None
        if device is not None:
            pin(self.arena.memory, device)
        self.memory = self.arena.memory
        """Memory that `place` returns views of; empty if buckets cannot be received directly."""
        self._weights = weights
        self._sums = KnownSums()
        self._pending: Pending | None = None
        """Changes not in the live tensors yet; None for everything."""
        self._applied = False

    def begin(self, base: int) -> None:
        """Prepare for a version; deltas start from `base`, a complete earlier version. -1: no deltas."""
        if self.side is not None:
            self.side.settle()
        if base < 0:
            self._pending = None
            self._sums.clear()
        elif self._applied:
            self._pending = Pending()
        self._applied = False

    def has(self, bucket: Bucket) -> bool:
        """Return whether a delta of the bucket is kept for `apply`."""
        return False

    def place(self, bucket: Bucket) -> Raw | None:
        """Return where the bucket's packed bytes may be received directly, padding included, or None."""
        return self.arena.run(bucket)

    def write(self, bucket: Bucket, data: Raw, sums: Sequence[int], *, bucket_hash: int | None = None) -> bool:
        """Write packed bytes uint8 [bucket.num_bytes] to their pieces; false if what was written has other hashes.

        sums: additive hashes of the pieces; bucket_hash: xxh3-64 of all, None where it is not known. After false the
        bucket must be written again before the weights are used.
        """
        is_in_place = np.may_share_memory(self.memory, data)  # received at `place`
        proof = self.arena.prove(bucket) if is_in_place else self.arena.scatter(data, bucket)
        if self._pending is not None:
            self._pending.add_whole(bucket)
        return self._sums.confirm(bucket, proof, sums, bucket_hash=bucket_hash)

    def write_from_gpu(self, bucket: Bucket, data: Tensor, sums: Sequence[int]) -> bool:
        """Do the same with packed bytes on a GPU, which are copied to the host."""
        side = self.side or SideStream(data.device)
        return self.write(bucket, side.to_host(data, torch.uint8).numpy(), sums)

    def write_delta(self, bucket: Bucket, changes: Sequence[PieceDelta], sums: Sequence[int]) -> bool:
        """Change some elements if the pieces then have these hashes; else write nothing and return false."""
        # The hash of the new version is the known one plus the change that these values make (KnownSums.follow). It is
        # compared before anything is written: a shadow with some elements of another version could not be repaired.
        located = [self._located(piece, change) for piece, change in zip(bucket.pieces, changes)]
        flat = [self.arena.flat(piece.name) for piece in bucket.pieces]
        gains = [
            gain(
                piece,
                self.arena.places[piece.name].shape,
                change.positions,
                old=elements[changed.positions],
                new=change.values,
            )
            for piece, change, changed, elements in zip(bucket.pieces, changes, located, flat)
        ]
        if not self._sums.follow(bucket, gains, sums, now=lambda: self.arena.sums(bucket)):
            return False
        for elements, changed in zip(flat, located):
            elements[changed.positions] = changed.values
        num_changes = sum(len(changed.positions) for changed in located)
        if self._pending is not None and self.side is not None and num_changes:
            self._pending.add_whole(bucket)  # a copy of the bucket costs a GPU less than its elements one by one
        elif self._pending is not None:
            patches = partial(self._patches, bucket, located)
            self._pending.add(bucket, patches, num_changes=num_changes)
        return True

    def apply(self, *, pool: Executor) -> None:
        """Write landed buckets that are not in the live tensors yet, casting where dtypes differ. Idempotent.

        On a GPU they are queued on the side stream (`SideStream.switching`).
        """
        if self._pending is None:
            self._copy_all(pool)
        else:
            self._pending.write(self._copy, pool=pool)
        self._applied = True

    def differing(self) -> list[str]:
        """Return the live tensors whose content has another hash than the version's; after `apply`."""
        return self._sums.differing((name, self._live(name)) for name in self.arena.names)

    def _copy_all(self, pool: Executor) -> None:
        runs: list[tuple[Raw, Raw]] = []
        for name in self.arena.names:
            target, source = self._live(name), self.arena.flat(name).view(np.uint8)
            if target.flat is None:
                self._store(target, target.box, self.arena.tensor(name))
                continue
            cuts = range(_TASK_BYTES, source.nbytes, _TASK_BYTES)
            runs += zip(np.split(target.flat, cuts), np.split(source, cuts))
        # not torch's threads: they wait for each other, ten times slower on a busy machine
        list(pool.map(lambda run: np.copyto(*run), runs))

    def _copy(self, bucket: Bucket) -> None:
        for piece in bucket.pieces:
            self._store(self._live(piece.name), piece.box, self.arena.piece(piece))

    def _store(self, part: LivePart, box: Box, packed: Raw) -> None:
        with nullcontext() if self.side is None else self.side.current():
            part.store(box, packed)

    def _live(self, name: str) -> LivePart:
        place = self.arena.places[name]
        return LivePart(self._weights[name], place.box, shape=place.shape, dtype=place.dtype)

    def _located(self, piece: BucketPiece, change: PieceDelta) -> PieceDelta:
        """Return the change with positions in this rank's part."""
        place = self.arena.places[piece.name]
        start = piece.box.within(place.box).start(place.box.shape)
        strides = row_strides(place.box.shape)
        return PieceDelta(outward(change.positions, piece.box.shape, strides, start), change.values)

    def _patches(self, bucket: Bucket, changes: Iterable[PieceDelta]) -> Iterable[Patch]:
        for piece, change in zip(bucket.pieces, changes):
            yield Patch.of(local(self._weights[piece.name]), change, dtype=self.arena.places[piece.name].dtype)


class InPlace:
    """One rank's live tensors. Methods as in `Shadow`."""

    keeps_deltas = True

    def __init__(
        self, manifest: Manifest, weights: Mapping[str, Tensor], *, rank: int, wire_dtypes: Mapping[str, str]
    ) -> None:
        self.memory: Raw = np.empty(0, np.uint8)
        self._boxes = {spec.name: (spec.shape, box) for spec, box in manifest.held_by(rank)}
        self._weights = weights
        self._wire = wire_dtypes
        device = gpu_of(weights.values())
        self.side = SideStream(device) if device is not None else None
        self._sums = KnownSums()
        self._patches: dict[tuple[BucketPiece, ...], list[Patch]] = {}
        """Deltas that `apply` writes, by the bucket's pieces."""
        self._written = True
        """Whether they are in the live tensors."""
        self._exact = all(_holds(local(weights[name]).dtype, wire_dtypes[name]) for name in self._boxes)

    @property
    def takes_deltas(self) -> bool:
        return self._exact and self._written

    def begin(self, base: int) -> None:
        self._patches.clear()
        self._written = True
        if base < 0:
            self._sums.clear()

    def has(self, bucket: Bucket) -> bool:
        return bucket.pieces in self._patches

    def place(self, bucket: Bucket) -> Raw | None:
        return None

    def write(self, bucket: Bucket, data: Raw, sums: Sequence[int], *, bucket_hash: int | None = None) -> bool:
        with self._on_side():
            writes = [
                self._live(piece).writing(
                    piece.box, raw_view(data, piece.at, piece.box.shape, ITEM_BYTES[self._wire[piece.name]])
                )
                for piece in bucket.pieces
            ]
            good = self._sums.confirm(bucket, copy_proof([part for part, _ in writes]), sums, bucket_hash=bucket_hash)
            for _, finish in writes if good else ():
                finish()
        return good

    def write_from_gpu(self, bucket: Bucket, data: Tensor, sums: Sequence[int]) -> bool:
        if self.side is None:
            return self.write(bucket, SideStream(data.device).to_host(data, torch.uint8).numpy(), sums)
        hashes = []
        with self.side.current():
            mine = data.to(self.side.device, copy=True)  # the slot may be reused between the hash and the copy
            for piece in bucket.pieces:
                part, item_bytes = self._live(piece), ITEM_BYTES[piece.dtype]
                packed = mine[piece.at : piece.at + piece.box.numel * item_bytes]
                hashes.append(device_sum(packed, piece.box, part.shape, item_bytes=item_bytes, table=self.side.table))
                part.at(piece.box).copy_(typed(mine, piece.at, piece.box.shape, piece.dtype))
            hashes = torch.stack(hashes)
        return self._sums.confirm(bucket, Proof(NOT_HASHED, self.side.sums(hashes)), sums)

    def write_delta(self, bucket: Bucket, changes: Sequence[PieceDelta], sums: Sequence[int]) -> bool:
        patches, gains = [], []
        with self._on_side():
            for piece, change in zip(bucket.pieces, changes):
                part = self._live(piece)
                live = part.at(piece.box)
                patches.append(patch := Patch.of(live, change, dtype=part.dtype))
                old = same_width(patch.before(live.dtype).to(getattr(torch, part.dtype)))
                gains.append(gain(piece, part.shape, change.positions, old=old, new=change.values))
            if not self._sums.follow(bucket, gains, sums, now=lambda: [self._sum(piece) for piece in bucket.pieces]):
                return False
        self._patches[bucket.pieces] = patches
        self._written = False
        return True

    def apply(self, *, pool: Executor) -> None:
        def write(patch: Patch) -> None:
            with self._on_side():
                patch.write()

        list(pool.map(write, [patch for patches in self._patches.values() for patch in patches]))
        self._written = True

    def differing(self) -> list[str]:
        return self._sums.differing((name, self._part(name)) for name in self._boxes)

    def _on_side(self) -> AbstractContextManager[None]:
        return nullcontext() if self.side is None else self.side.current()

    def _sum(self, piece: BucketPiece) -> int:
        part = self._live(piece)
        packed = same_width(part.at(piece.box).to(device="cpu", dtype=getattr(torch, part.dtype)))
        return tensor_sum(packed, piece.box, part.shape)

    def _live(self, piece: BucketPiece) -> LivePart:
        return self._part(piece.name)

    def _part(self, name: str) -> LivePart:
        shape, box = self._boxes[name]
        return LivePart(self._weights[name], box, shape=shape, dtype=self._wire[name])


Landing = Shadow | InPlace


def _holds(live: torch.dtype, wire: str) -> bool:
    """Whether a live tensor preserves the exact bits of the wire dtype."""
    kind: torch.dtype = getattr(torch, wire)
    if live == kind or not (live.is_floating_point and kind.is_floating_point):
        return live == kind
    mine, theirs = torch.finfo(live), torch.finfo(kind)
    return mine.eps <= theirs.eps and mine.max >= theirs.max and mine.smallest_normal <= theirs.smallest_normal


class KnownSums:
    """Additive hashes of the pieces of each landed bucket."""

    def __init__(self) -> None:
        self._known: dict[tuple[BucketPiece, ...], Sequence[int]] = {}
        self.clear = self._known.clear

    def confirm(self, bucket: Bucket, proof: Proof, expected: Sequence[int], *, bucket_hash: int | None = None) -> bool:
        """Store the hashes if they equal the expected ones; return whether they do. bucket_hash: as in `write`."""
        if proof.sums != tuple(expected) or bucket_hash not in (None, proof.hash):
            self._known.pop(bucket.pieces, None)
            return False
        self._known[bucket.pieces] = expected
        return True

    def follow(
        self, bucket: Bucket, gains: Sequence[int], sums: Sequence[int], *, now: Callable[[], Sequence[int]]
    ) -> bool:
        """Return whether these changes lead to `sums`, and store them if so. `now` computes unknown current hashes."""
        known = self._known.get(bucket.pieces)
        if any(add(*pair) != expected for *pair, expected in zip(known or now(), gains, sums)):
            return False
        self._known[bucket.pieces] = sums
        return True

    def differing(self, parts: Iterable[tuple[str, LivePart]]) -> list[str]:
        """Return the names of tensors whose part has another hash than its landed pieces together."""
        expected: dict[str, int] = {}
        for pieces, sums in self._known.items():
            for piece, one in zip(pieces, sums):
                expected[piece.name] = add(expected.get(piece.name, 0), one)
        return [name for name, part in parts if part.sum() != expected.get(name, 0)]


MOST_PATCHED = 1 / 32
"""Max fraction of a bucket's elements written one by one; beyond it, copying the bucket is faster."""


class Pending:
    """Pending writes by bucket. Several threads may add different buckets."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[int, int], Bucket] = {}
        self._patches: dict[tuple[int, int], tuple[Patch, ...]] = {}

    def add_whole(self, bucket: Bucket) -> None:
        """Record that the whole bucket differs."""
        key = bucket.source, bucket.index
        self._patches.pop(key, None)
        self._buckets[key] = bucket

    def add(self, bucket: Bucket, patches: Callable[[], Iterable[Patch]], *, num_changes: int) -> None:
        """Record that elements of a bucket differ; `patches` is called only below MOST_PATCHED."""
        key = bucket.source, bucket.index
        if key in self._buckets or not num_changes:
            return
        if key in self._patches or num_changes > MOST_PATCHED * sum(piece.box.numel for piece in bucket.pieces):
            self.add_whole(bucket)
        else:
            self._patches[key] = tuple(patches())

    def write(self, copy: Callable[[Bucket], None], *, pool: Executor) -> None:
        """Write all changes to the live tensors; `copy` writes a whole bucket. Idempotent."""
        work: list[Callable[[], None]] = [patch.write for patches in self._patches.values() for patch in patches]
        list(pool.map(lambda write: write(), work))
        list(pool.map(copy, self._buckets.values()))


@dataclass(frozen=True, slots=True)
class Patch:
    """New values for some elements."""

    memory: Tensor
    """The live tensor's memory from its first element to its last, gaps included, as integers of its width [n]."""
    index: Tensor
    """int64 [k] on the tensor's device: indices into `memory`."""
    values: Tensor
    """[k] on the tensor's device, as integers of its width."""

    @classmethod
    def of(cls, live: Tensor, change: PieceDelta, *, dtype: str) -> Patch:
        """Prepare a change whose positions are row-major in `live` and whose values are bits of `dtype`.

        Copies `change`; the values are cast to the live tensor's dtype.
        """
        strides = live.stride()
        span = 1 + sum((size - 1) * stride for size, stride in zip(live.shape, strides))
        width = SAME_WIDTH[live.element_size()]
        at = outward(change.positions, live.shape, strides)
        values = torch.from_numpy(np.array(change.values)).view(getattr(torch, dtype))
        return cls(
            memory=live.as_strided((span,), (1,), live.storage_offset()).view(width),
            index=torch.from_numpy(at).to(live.device),
            values=values.to(device=live.device, dtype=live.dtype).view(width),
        )

    def before(self, dtype: torch.dtype) -> Tensor:
        """Return the current values on the host [k]; `dtype` is the live tensor's."""
        return self.memory.gather(0, self.index).view(dtype).cpu()

    def write(self) -> None:
        """Store the values. Idempotent."""
        self.memory.scatter_(0, self.index, self.values)

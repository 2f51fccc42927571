"""The memory that a rank publishes from, as buckets.

LiveWeights     the trainer's tensors in host memory                       no copy
StagedWeights   its tensors on a GPU, through pinned host memory           a copy a version
Outgoing        a copy in host memory, from which deltas are made          outgoing.py
ShadowMemory    what a subscriber has staged                               pull/peers.py
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from cosmos_rl_core.weight_sync import BUCKET_BYTES, GPU_BUCKET_BYTES
from cosmos_rl_transfer.content.arena import DIRECT_BYTES
from cosmos_rl_transfer.content.delta import Delta
from cosmos_rl_transfer.content.gpu import MASK, SideStream, device_sum, pinned, typed
from cosmos_rl_transfer.content.proof import Part, Proof, copy_proof, packed_pieces, pieces_hash
from cosmos_rl_transfer.content.raw import ByteRun, Raw, raw_view
from cosmos_rl_transfer.content.staging import LivePart, Spare
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.dtensor import dtype_name, local
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES, Manifest
from cosmos_rl_transfer.planning.plan import Bucket, BucketPiece

if TYPE_CHECKING:
    from torch import Tensor


class PublishedMemory(ABC):
    """The memory of one rank's parts. Any thread may read."""

    bucket_bytes = BUCKET_BYTES
    """Size of its buckets where the settings name none."""

    def __init__(self, manifest: Manifest, *, rank: int) -> None:
        """manifest, rank: what all ranks that publish together hold, and which of them this is."""
        self.manifest, self.rank = manifest, rank

    @abstractmethod
    def runs(self, bucket: Bucket) -> list[ByteRun] | None:
        """Return the bucket's bytes in place, or None where they have to be packed."""

    @abstractmethod
    def pack(self, bucket: Bucket, out: Raw) -> Proof:
        """Write the bucket's packed bytes into `out` uint8 [bucket.num_bytes]; return their hashes. Padding stays."""

    def copy(self, bucket: Bucket, copied: Raw | None, *, spare: Spare) -> Raw:
        """Return the bucket's bytes for one reader alone, in a spare block: those of `copied`, or those in memory."""
        out = spare.take(bucket.num_bytes)
        if copied is None:
            self.pack(bucket, out)
        else:
            np.copyto(out, copied)
        return out

    def delta(self, bucket: Bucket, *, base: int, version: int) -> Delta | None:
        """Return what `version` changed in a bucket since `base`; None if that is not known or no shorter."""
        return None

    def want(self, wire_dtypes: Mapping[str, str]) -> None:  # noqa: B027 - a copy alone prepares
        """Prepare for a target that takes tensors in these dtypes, by name."""

    def keep_sums(self, version: int, bucket: Bucket, sums: tuple[int, ...]) -> None:  # noqa: B027 - deltas alone need them
        """Remember the pieces' hashes in a version, from which those of the next one follow."""


class LiveWeights(PublishedMemory):
    """The live tensors, read in place: gathered and cast in one pass, or sent as they are."""

    def __init__(self, manifest: Manifest, *, rank: int) -> None:
        super().__init__(manifest, rank=rank)
        self._boxes = {spec.name: (spec, box) for spec, box in manifest.held_by(rank)}
        self._names = manifest.specs.keys() | manifest.tied.keys()
        self._tied = manifest.tied
        self._weights: Mapping[str, Tensor] = {}
        self._parts: dict[tuple[str, str], LivePart] = {}
        """By name and the dtype in which it travels."""

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise LayoutError unless `weights` are this rank's parts of the manifest."""
        if changed := sorted((weights.keys() - self._names) | (self._boxes.keys() - weights.keys())):
            raise LayoutError(f"the weights to publish are not those the publisher was made for: {changed[:5]}")
        for name, (spec, box) in self._boxes.items():
            given = (tuple(local(weights[name]).shape), dtype_name(weights[name]))
            if given != (expected := (box.shape, spec.dtype)):
                raise LayoutError(f"{name}: {given} to publish, {expected} when the publisher was made")

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Read these tensors from now on."""
        self._weights, self._parts = weights, {}

    def exposable(self) -> list[Raw]:
        """Return the bytes of the tensors that `runs` may return parts of."""
        parts = (self._as_sent(name, spec.dtype) for name, (spec, _) in self._boxes.items())
        return [flat for part in parts if (flat := part.flat) is not None]

    def runs(self, bucket: Bucket) -> list[ByteRun] | None:
        runs = []
        for piece in bucket.pieces:
            part = self._part(piece)
            inside, flat, item_bytes = piece.box.within(part.box), part.flat, ITEM_BYTES[part.dtype]
            first, num_bytes = inside.start(part.box.shape) * item_bytes, piece.box.numel * item_bytes
            if flat is None or num_bytes < DIRECT_BYTES or not inside.is_contiguous(part.box.shape):
                return None
            runs.append(ByteRun(flat[first : first + num_bytes], piece.at))
        return runs

    def pack(self, bucket: Bucket, out: Raw) -> Proof:
        parts = list[Part]()
        for piece in bucket.pieces:
            part = self._part(piece)
            parts.append(part.reading(piece.box, raw_view(out, piece.at, piece.box.shape, ITEM_BYTES[part.dtype])))
        return copy_proof(parts)

    def gather(self, bucket: Bucket, out: Tensor, *, table: Tensor) -> Tensor:
        """Gather and cast a bucket into `out` uint8 [bucket.num_bytes] on the weights' GPU; nothing waits for it.

        Returns each piece's additive hash as int64 [pieces] there. table: as in `device_sum`. The padding stays.
        """
        sums = []
        for piece in bucket.pieces:
            part = self._part(piece)
            packed = typed(out, piece.at, piece.box.shape, part.dtype)
            packed.copy_(part.at(piece.box))
            item_bytes = ITEM_BYTES[part.dtype]
            target = out[piece.at : piece.at + piece.box.numel * item_bytes]
            sums.append(device_sum(target, piece.box, part.shape, item_bytes=item_bytes, table=table))
        return torch.stack(sums)

    def _part(self, piece: BucketPiece) -> LivePart:
        """Return the part of a piece's tensor; targets may have names of their own for tied tensors."""
        return self._as_sent(self._tied.get(piece.name, piece.name), piece.dtype)

    def _as_sent(self, name: str, dtype: str) -> LivePart:
        part = self._parts.get((name, dtype))
        if part is None:
            spec, box = self._boxes[name]
            part = self._parts[name, dtype] = LivePart(self._weights[name], box, shape=spec.shape, dtype=dtype)
        return part


@dataclass(frozen=True, slots=True)
class Packed:
    """A bucket in host memory."""

    data: Raw
    """uint8 [bucket.num_bytes], pinned and shared: read only."""
    proof: Proof
    """Its hashes; those of the pieces were computed on the GPU."""


class StagedWeights(PublishedMemory):
    """Live tensors on a GPU as buckets in pinned host memory: each is copied once a version, for all subscribers.

    first request of a bucket       gathered, cast and hashed on the GPU, then one copy to the host, on a side stream
    later ones, and the fence       share that copy
    publish                         drops the copies of the version before; a lease keeps those it still reads
    """

    bucket_bytes = GPU_BUCKET_BYTES

    def __init__(self, live: LiveWeights, side: SideStream) -> None:
        super().__init__(live.manifest, rank=live.rank)
        self._live, self.side = live, side
        self._packed: dict[tuple[BucketPiece, ...], Future[Packed]] = {}
        self._guard = threading.Lock()

    def renew(self) -> None:
        """Drop the copies: the live tensors have another version."""
        with self._guard:
            self._packed = {}

    def packed(self, bucket: Bucket) -> Packed:
        """Return the bucket as it is in the live tensors, or was when it was first requested."""
        with self._guard:
            known = self._packed.get(bucket.pieces)
            future = self._packed.setdefault(bucket.pieces, Future())
        if known is None:
            try:
                future.set_result(self._pack(bucket))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def _pack(self, bucket: Bucket) -> Packed:
        with self.side.current():
            gathered = torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=self.side.device)
            sums = self._live.gather(bucket, gathered, table=self.side.table)
            data, hashes = pinned(bucket.num_bytes), pinned(8 * len(bucket.pieces)).view(torch.int64)
            data.copy_(gathered, non_blocking=True)
            hashes.copy_(sums, non_blocking=True)
            done = self.side.mark()
        done.synchronize()
        shared = data.numpy()
        bucket_hash = pieces_hash(packed_pieces(bucket, shared))
        return Packed(shared, Proof(bucket_hash, tuple(value & MASK for value in hashes.tolist())))

    def pack_on_gpu(self, bucket: Bucket, out: torch.Tensor) -> tuple[int, ...]:
        """Gather the live bucket into `out` uint8 [bucket.num_bytes] on the GPU; return each piece's additive hash."""
        with self.side.current():
            sums = self._live.gather(bucket, out, table=self.side.table)
        return self.side.sums(sums)

    def upload(self, copied: Raw, out: torch.Tensor) -> None:
        """Copy a bucket that a fence kept in host memory into `out` on the GPU."""
        with self.side.current():
            out.copy_(torch.from_numpy(copied), non_blocking=True)
            done = self.side.mark()
        done.synchronize()

    def runs(self, bucket: Bucket) -> list[ByteRun] | None:
        return None  # the bytes are in no memory that a transport has exposed

    def pack(self, bucket: Bucket, out: Raw) -> Proof:
        packed = self.packed(bucket)
        np.copyto(out, packed.data)
        return packed.proof

    def copy(self, bucket: Bucket, copied: Raw | None, *, spare: Spare) -> Raw:
        return self.packed(bucket).data if copied is None else copied

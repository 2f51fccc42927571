"""The weights of a GPU as buckets in pinned host memory: each is copied once a version, for all subscribers.

first request of a bucket       gathered, cast and hashed on the GPU, then one copy to the host, on a side stream
later ones, and the fence       share that copy
publish                         drops the copies of the version before; a lease keeps those it still reads
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from cosmos_rl_transfer.content.gpu import MASK, SideStream, pinned
from cosmos_rl_transfer.content.proof import Proof, packed_pieces, pieces_hash
from cosmos_rl_transfer.content.raw import ByteRun, Raw
from cosmos_rl_transfer.planning.plan import Bucket, BucketPiece
from cosmos_rl_transfer.publish.live import LiveWeights


@dataclass(frozen=True, slots=True)
class Packed:
    """A bucket in host memory."""

    data: Raw
    """uint8 [bucket.num_bytes], pinned and shared: read only."""
    proof: Proof
    """Its hashes; those of the pieces were computed on the GPU."""


class StagedWeights:
    """Implements `supply.Memory` for live tensors on a GPU. Any thread may call."""

    def __init__(self, live: LiveWeights, side: SideStream) -> None:
        self._live, self._side = live, side
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
        with self._side.current():
            gathered = torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=self._side.device)
            sums = self._live.gather(bucket, gathered, table=self._side.table)
            data, hashes = pinned(bucket.num_bytes), pinned(8 * len(bucket.pieces)).view(torch.int64)
            data.copy_(gathered, non_blocking=True)
            hashes.copy_(sums, non_blocking=True)
            done = self._side.mark()
        done.synchronize()
        shared = data.numpy()
        bucket_hash = pieces_hash(packed_pieces(bucket, shared))
        return Packed(shared, Proof(bucket_hash, tuple(value & MASK for value in hashes.tolist())))

    def pack_on_gpu(self, bucket: Bucket, out: torch.Tensor) -> tuple[int, ...]:
        """Gather the live bucket into `out` uint8 [bucket.num_bytes] on the GPU; return each piece's additive hash."""
        with self._side.current():
            sums = self._live.gather(bucket, out, table=self._side.table)
        return self._side.sums(sums)

    def upload(self, copied: Raw, out: torch.Tensor) -> None:
        """Copy a bucket that a fence kept in host memory into `out` on the GPU."""
        with self._side.current():
            out.copy_(torch.from_numpy(copied), non_blocking=True)
            done = self._side.mark()
        done.synchronize()

    def runs(self, bucket: Bucket) -> list[ByteRun] | None:
        """Return None: the bytes are in no memory that a transport has exposed."""
        return None

    def pack(self, bucket: Bucket, out: Raw) -> Proof:
        """Write the bucket's packed bytes into `out` uint8 [bucket.num_bytes]; return their hashes."""
        packed = self.packed(bucket)
        np.copyto(out, packed.data)
        return packed.proof

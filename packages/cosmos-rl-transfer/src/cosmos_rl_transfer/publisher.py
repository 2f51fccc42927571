"""The trainer's side.

publish(version, weights)
    take the slot that does not hold the newest version     waits for its readers, at most `patience_s`
    pack all tensors into it, casting and hashing            the trainer may not change the weights meanwhile
    make it the newest version                               subscribers that wait are told
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from cosmos_rl_transfer.arena import Arena
from cosmos_rl_transfer.layout import Manifest
from cosmos_rl_transfer.pack import Packer
from cosmos_rl_transfer.plan import wire_dtype_of
from cosmos_rl_transfer.server import Server, Source
from cosmos_rl_transfer.snapshot import Slot, Snapshots
from cosmos_rl_transfer.transports.base import Transport
from cosmos_rl_transfer.transports.select import allocate

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_BUCKET_BYTES = 8 << 20
"""Small enough to be hashed in the last-level cache after the copy."""
NUM_SLOTS = 2


def num_threads() -> int:
    """Threads worth using for copies: they soon saturate memory."""
    return min(4, len(os.sched_getaffinity(0)))


class Publisher:
    """Publishes versions of one rank's weights to any number of subscribers. Implements WeightPublisher."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        token: bytes,
        transport: str | Transport = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        wire_dtype: str | None = None,
        bind: str = "127.0.0.1",
        manifest: Manifest | None = None,
        rank: int = 0,
        patience_s: float = 2.0,
        timeout_s: float = 30.0,
    ) -> None:
        """Allocate two slots of the weights' size and start to listen.

        token: the run's secret. wire_dtype: what floating tensors travel in ("bfloat16"); None: their own.
        bind: address to listen on. manifest, rank: what all ranks that publish together hold, and which of them
        this is; `weights` are then this rank's parts. None: read off the tensors, whole ones or DTensors.
        patience_s: how long a reader of the older slot may hold up `publish`. timeout_s: how long a send may
        stand still.
        """
        manifest = manifest or Manifest.from_tensors(weights, rank=rank)
        wire_dtypes = {spec.name: wire_dtype_of(spec, wire_dtype) for spec in manifest.specs.values()}
        arena = Arena.of(manifest, rank=rank, wire_dtypes=wire_dtypes)
        self._snapshots = Snapshots(allocate(transport, num_bytes=arena.num_bytes, count=NUM_SLOTS))
        self._packer = Packer(manifest, arena)
        self._packer.check(weights)
        self._num_bytes = sum(place.num_bytes for place in arena.places.values())
        self._patience_s = patience_s
        self._turn = asyncio.Lock()
        self._pool = ThreadPoolExecutor(max_workers=num_threads(), thread_name_prefix="weights-pack")
        source = Source(
            manifest=manifest,
            rank=rank,
            arena=arena,
            wire_dtype=wire_dtype,
            bucket_bytes=bucket_bytes,
            snapshots=self._snapshots,
        )
        self._server = Server(source, token=token, bind=bind, timeout_s=timeout_s, pool=self._pool)

    @property
    def address(self) -> str:
        """Where subscribers connect: "host:port"."""
        return self._server.address

    async def publish(self, version: int, weights: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Make `version` available and return `sync_bytes` and `sync_s`.

        Returns when the trainer may change the weights again. Raises ValueError unless versions rise and
        LayoutError if the weights are other tensors than at the start. If cancelled, nothing is published.
        """
        started = time.perf_counter()
        async with self._turn:
            if version <= self._snapshots.newest:
                raise ValueError(f"version {version} is not newer than the published {self._snapshots.newest}")
            self._packer.check(weights)
            work = asyncio.get_running_loop().run_in_executor(None, self._pack, weights)
            try:
                slot = await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait([work])  # the weights must not change under it
                work.exception()  # cancelled work's error is nobody's news
                raise
            self._snapshots.commit(slot, version)
        return {"sync_bytes": float(self._num_bytes), "sync_s": time.perf_counter() - started}

    def _pack(self, weights: Mapping[str, Tensor]) -> Slot:
        slot = self._snapshots.begin(patience_s=self._patience_s)
        slot.tensor_sums = self._packer.pack(weights, slot.segment.memory, pool=self._pool)
        return slot

    async def close(self) -> None:
        """Disconnect all subscribers and free the slots. May be called twice."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._server.close()
        self._pool.shutdown()
        for slot in self._snapshots.slots:
            slot.segment.close()

"""The trainer's side.

publish(version, weights)     the version can be read, in place; returns at once
... forward, backward ...     subscribers pull it meanwhile, bucket by bucket
fence()                       waits for readers, at most `patience_s`, then copies the buckets they have not read
... the optimizer writes ...

A replica of several ranks has a publisher per rank (`RankPublisher`), each of the parts that its rank holds:

each rank    its own boxes  --exchange-->  one manifest of all ranks, the same everywhere
address      "host:port,host:port,..."    of all of them; a subscriber pulls from each according to the plan

Copies (dp_replicate, parameters that tp or cp leave whole) are listed with every rank that holds them, so that the plan
spreads the load. Stages of a pipeline hold different tensors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import TYPE_CHECKING

from cosmos_rl_core.hardware_log import log_choice
from cosmos_rl_core.weight_sync import SyncSection, WeightPublisher
from cosmos_rl_core.wire.tls import Tls
from cosmos_rl_transfer.content.gpu import SideStream, computed, gpu_of
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES, Manifest, TensorLayout
from cosmos_rl_transfer.publish.memory import LiveWeights, StagedWeights
from cosmos_rl_transfer.publish.outgoing import Outgoing
from cosmos_rl_transfer.publish.server import WeightServer
from cosmos_rl_transfer.publish.versions import Fenced
from cosmos_rl_transfer.transports.base import Transport

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cosmos_rl_core.parallel.rank_group import RankGroup


class Publisher(WeightPublisher):
    """Publishes versions of one rank's weights to any number of subscribers."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        token: bytes,
        settings: SyncSection | None = None,
        tls: Tls | None = None,
        bind: str = "127.0.0.1",
        transport: Transport | None = None,
        manifest: Manifest | None = None,
        rank: int = 0,
    ) -> None:
        """Allocate two slots of a bucket each and start to listen on `bind`.

        token: the run's secret. settings: the section [sync]; None for its defaults. tls: encrypts TCP. transport: in
        place of the one that the settings name. manifest, rank: what all ranks that publish together hold, and which
        of them this is; `weights` are then this rank's parts. None: read off the tensors, whole ones or DTensors.
        """
        settings = settings or SyncSection()
        self._live = LiveWeights(manifest or Manifest.from_tensors(weights, rank=rank), rank=rank)
        self._live.check(weights)
        side = self._side = SideStream(device) if (device := gpu_of(weights.values())) is not None else None
        copy = self._outgoing = Outgoing(self._live, settings=settings, side=side) if settings.delta else None
        staged = self._staged = StagedWeights(self._live, side) if side is not None and copy is None else None
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-copy")
        self._copying: Future[Fenced] | None = None  # the pass that copies a version out of the live tensors
        self._sizes = {spec.name: box.numel for spec, box in self._live.manifest.held_by(rank)}
        self._patience_s, self._newest = settings.patience_s, -1
        self._server = WeightServer(
            copy or staged or self._live, settings=settings, token=token, tls=tls, bind=bind, transport=transport
        )
        self._versions, self._outlet = self._server.versions, self._server.outlet
        self._outlet.expose([copy.arena.memory] if copy else [])
        log_choice(f"weights: {self.path}")

    @property
    def path(self) -> str:
        """The memory through which weights leave: "pageable", "pinned host", or a GPU's ("cuda ipc", "collective")."""
        if self._server.on_gpu:
            return self._server.transport.replace("_", " ")
        return "pageable" if self._side is None else "pinned host"

    def publishes_from(self, num_hosts: int) -> None:
        """Set the number of hosts of the ranks that publish together."""
        self._server.holders.num_hosts = num_hosts

    def num_bytes(self, sizes: Mapping[str, int]) -> float:
        """Return the bytes of so many elements of each tensor, in the dtypes in which they last travelled."""
        dtypes = self._server.wire_dtypes
        return float(sum(numel * ITEM_BYTES[dtypes[name]] for name, numel in sizes.items()))

    @property
    def sent_bytes(self) -> int:
        """Bytes of buckets sent so far."""
        return self._server.sent_bytes

    @property
    def address(self) -> str:
        """Where subscribers connect: "host:port"."""
        return self._server.address

    async def publish(
        self, version: int, weights: Mapping[str, Tensor], *, ready: torch.cuda.Event | None = None
    ) -> Mapping[str, float]:
        """Let subscribers read `version` out of these tensors until `fence`; return `sync_bytes` and `sync_s`.

        ready: the event after which a GPU has computed them; None: after the work that this thread has queued.
        Raises ValueError unless versions rise and LayoutError if the weights are other tensors than at the start.
        """
        started = time.perf_counter()
        if version <= self._newest:
            raise ValueError(f"version {version} is not newer than the published {self._newest}")
        await self.fence()  # a publish without a fence before it: nobody may read the old tensors any more
        self._live.check(weights)
        self._live.bind(weights)
        if self._side is not None:
            self._side.wait_for(ready or computed(self._side.device))
        if self._staged is not None:
            self._staged.renew()
        self._newest = version
        if self._outgoing is not None and not self._outgoing.wants_bypass:
            self._copying = self._copier.submit(self._copy_out, self._outgoing, version, weights)
        else:
            if self._outgoing is not None:
                await asyncio.to_thread(self._versions.fence, patience_s=self._patience_s)
                self._outgoing.start_bypass(version)
            self._outlet.expose(self._live.exposable())
            self._versions.publish(version)
        return {"sync_bytes": self.num_bytes(self._sizes), "sync_s": time.perf_counter() - started}

    async def fence(self) -> Mapping[str, float]:
        """Wait until the tensors may change; return `sync_stall_s` and `sync_copied_bytes`.

        Readers that are not through after `patience_s` get a copy of what they have not read. From here until the next
        `publish` nothing can be borrowed. With deltas on it waits only until the version is copied, whoever reads.
        """
        if self._copying is not None:
            started, copying, self._copying = time.perf_counter(), self._copying, None
            done = await asyncio.to_thread(copying.result)
            return {"sync_stall_s": time.perf_counter() - started, "sync_copied_bytes": float(done.copied_bytes)}
        if not self._versions.is_open or (self._outgoing is not None and not self._outgoing.bypass):
            return {"sync_stall_s": 0.0, "sync_copied_bytes": 0.0}
        # a GPU's buckets are copied faster than readers read them
        patience_s = self._patience_s if self._staged is None else 0.0
        done = await asyncio.to_thread(self._versions.fence, patience_s=patience_s)
        if not done.copied_bytes:
            self._server.spare.shrink()
        return {"sync_stall_s": done.waited_s, "sync_copied_bytes": float(done.copied_bytes)}

    def _copy_out(self, outgoing: Outgoing, version: int, weights: Mapping[str, Tensor]) -> Fenced:
        """In a thread: copy a version, while it is read as far as it is copied."""
        done = self._versions.fence(patience_s=self._patience_s)
        if outgoing.adapt() or outgoing.bypass:
            self._outlet.expose([outgoing.arena.memory])
        outgoing.begin(version)
        self._versions.publish(version)
        outgoing.refresh(weights)
        return done

    async def close(self) -> None:
        """Disconnect all subscribers and free the slots. May be called twice."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._copier.shutdown()
        self._server.close()


SEPARATOR = ","
"""Between the addresses of ranks."""


class RankPublisher(WeightPublisher):
    """One rank's part of a version. All ranks publish the same versions in order."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        ranks: RankGroup,
        settings: SyncSection,
        token: bytes,
        tls: Tls | None,
        bind: str,
    ) -> None:
        """Agree with the other ranks on who holds what and start to listen; all ranks call this together.

        Raises LayoutError, in all ranks, where two describe a tensor differently.
        """
        manifest = Manifest.merge(
            [Manifest.decode(data) for data in ranks.gather(own_part(weights, rank=ranks.rank).encode())]
        )
        self._publisher: Publisher | None = None
        if ranks.rank in manifest.ranks:
            self._publisher = Publisher(
                weights, token=token, settings=settings, tls=tls, bind=bind, manifest=manifest, rank=ranks.rank
            )
        own = self._publisher.address if self._publisher else ""
        addresses = [data.decode() for data in ranks.gather(own.encode()) if data]
        self._address = SEPARATOR.join(addresses)
        if self._publisher is not None:
            self._publisher.publishes_from(len({address.rpartition(":")[0] for address in addresses}))
        self._sizes = {spec.name: prod(spec.shape) for spec in manifest.specs.values()}

    @property
    def address(self) -> str:
        """Where subscribers connect: the addresses of all ranks that hold anything."""
        return self._address

    async def publish(
        self, version: int, weights: Mapping[str, Tensor], *, ready: torch.cuda.Event | None = None
    ) -> Mapping[str, float]:
        """Make this rank's part of `version` available; `sync_bytes` are those of all ranks, copies counted once."""
        if self._publisher is None:
            return {}
        metrics = await self._publisher.publish(version, weights, ready=ready)
        return {**metrics, "sync_bytes": self._publisher.num_bytes(self._sizes)}

    async def fence(self) -> Mapping[str, float]:
        """As `Publisher.fence`: this rank's parts may change afterwards."""
        return {} if self._publisher is None else await self._publisher.fence()

    async def close(self) -> None:
        """As `Publisher.close`."""
        if self._publisher is not None:
            await self._publisher.close()


def own_part(weights: Mapping[str, Tensor], *, rank: int) -> Manifest:
    """Describe what this rank itself holds."""
    manifest = Manifest.from_tensors(weights, rank=rank)
    layouts = (TensorLayout(x.spec, {rank: x.boxes[rank]} if rank in x.boxes else {}) for x in manifest.layouts)
    return Manifest(tuple(layouts), manifest.tied)

"""A worker's client of the controller: one connection, one receiving task, a queue per type of message."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.rollout.following import Publication
from cosmos_rl_core.rollout.spool.store import Spool
from cosmos_rl_core.rollout.worker import PromptLease
from cosmos_rl_core.types import Prompt, RolloutGroup
from cosmos_rl_core.wire.channel import ConnectionClosed
from cosmos_rl_core.wire.frames import MAX_FRAME_BYTES
from cosmos_rl_core.wire.payload import encode_group
from cosmos_rl_core.workers.connection import LastingConnection
from cosmos_rl_core.workers.context import WorkerContext

HEARTBEAT_S = 1.0
MOST_BYTES = MAX_FRAME_BYTES - 2**20
"""Size of a group below which it fits into a message."""


class ControllerClient:
    """Receives a worker's messages and sends its heartbeats.

    client = ControllerClient(connection, context, lineage=welcome.lineage)
    await client.beside(work, pulse=lambda: Heartbeat(progress=..., waited_s=..., holding=...))
    """

    def __init__(self, connection: LastingConnection, context: WorkerContext, *, lineage: int) -> None:
        """lineage: of the Welcome."""
        self._context = context
        self.leaving = context.leaving
        """Set when the worker shall leave."""
        self.connection = connection
        self.lineage = lineage
        """The run's lineage, as of the last message."""
        self.grants: asyncio.Queue[p.Grant | None] = asyncio.Queue()
        self.cancels: asyncio.Queue[int] = asyncio.Queue()
        self.releases: asyncio.Queue[list[str]] = asyncio.Queue()
        self.batches: asyncio.Queue[p.Batch | p.Remesh | None] = asyncio.Queue()
        self.commits: asyncio.Queue[p.Committed | p.Remesh | None] = asyncio.Queue()
        self.leaves: asyncio.Queue[p.Leave | None] = asyncio.Queue()
        """Policy: the answers to Leaving; None at the end of the run."""
        self._queues: dict[type, asyncio.Queue[Any]] = {
            p.Grant: self.grants,
            p.Batch: self.batches,
            p.Committed: self.commits,
            p.Leave: self.leaves,
        }
        self.epoch = 0
        """Policy: the newest epoch of the mesh."""
        self.publications: asyncio.Queue[Publication | None] = asyncio.Queue()
        self._published: Publication | None = None
        self.stopped = asyncio.Event()

    async def beside(self, work: Coroutine[Any, Any, None], *, pulse: Callable[[], p.Heartbeat]) -> None:
        """Receive messages and send heartbeats while `work` runs; an error in any of them ends all and is raised."""
        main = asyncio.create_task(work)
        helpers = {asyncio.create_task(each) for each in (self._receive(), self._beat(pulse), self._leave())}
        try:
            while not main.done():
                done, _ = await asyncio.wait({main, *helpers}, return_when=asyncio.FIRST_COMPLETED)
                for helper in done & helpers:
                    helper.result()
                    helpers.discard(helper)
            main.result()
        finally:
            for task in (main, *helpers):
                task.cancel()
            await asyncio.gather(main, *helpers, return_exceptions=True)

    async def _receive(self) -> None:
        try:
            while True:
                self._sort(await self.connection.receive())
        except ConnectionClosed:
            self._stop()
            self.commits.put_nowait(None)

    async def _leave(self) -> None:
        """Let a policy that waits for a batch leave."""
        await self.leaving.wait()
        self.batches.put_nowait(None)

    def _sort(self, message: p.ToWorker) -> None:
        if (queue := self._queues.get(type(message))) is not None:
            return queue.put_nowait(message)
        match message:
            case p.Cancel():
                self.cancels.put_nowait(message.sample)
            case p.Release():
                self.releases.put_nowait(message.paths)
            case p.Remesh():
                self.epoch = message.epoch
                self.batches.put_nowait(message)
                if not self.connection.unanswered.is_committed(message):
                    self.commits.put_nowait(message)
            case p.SyncFrom() | p.LineageRolledBack():
                self._publish(message)
            case p.Drain():
                self.leaving.set()
            case p.Reject():
                self._context.end_removed(message.reason)
            case p.Stop():
                self._stop()

    def _publish(self, message: p.SyncFrom | p.LineageRolledBack) -> None:
        publication = Publication(address="", lineage=message.lineage)
        if isinstance(message, p.SyncFrom):
            publication = replace(publication, address=message.address, version=message.version)
        if publication.lineage != self.lineage and not self.stopped.is_set():
            while not self.grants.empty():  # their leases are over
                self.grants.get_nowait()
        self.lineage = publication.lineage
        if publication != self._published:
            self._published = publication
            self.publications.put_nowait(publication)

    def _stop(self) -> None:
        self.stopped.set()
        self.publications.put_nowait(None)
        self.leaves.put_nowait(None)
        self.grants.put_nowait(None)
        self.batches.put_nowait(None)

    async def _beat(self, pulse: Callable[[], p.Heartbeat]) -> None:
        while not self.connection.closed.is_set():
            self.connection.post(pulse())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.connection.closed.wait(), HEARTBEAT_S)


class RemoteLeases:
    """`rollout.worker.LeaseSource` over the control channel."""

    def __init__(
        self,
        client: ControllerClient,
        spool: Spool | None = None,
        *,
        shared_by: Callable[[int], None] = lambda replicas: None,
    ) -> None:
        """spool: storage of large groups; without it all groups are sent to the controller.

        shared_by: called with the number of rollout replicas that share the work, before a grant is returned.
        """
        self._client = client
        self._spool = spool
        self._shared_by = shared_by
        self._requested: p.RequestLeases | None = None

    def request(self, *, version: int, capacity: int, lineage: int) -> None:
        message = p.RequestLeases(version=version, capacity=capacity, lineage=lineage)
        ending = self._client.stopped.is_set() or self._client.leaving.is_set()
        if capacity > 0 and message != self._requested and not ending:
            self._requested = message
            self._client.connection.post(message)

    async def granted(self) -> Sequence[PromptLease] | None:
        grant = await self._client.grants.get()
        while grant is not None and self._client.leaving.is_set():
            self.give_back(tuple(item.sample for item in grant.prompts if not item.evaluation))
            grant = await self._client.grants.get()
        if grant is None or self._client.stopped.is_set():
            return None
        self._requested = None
        if grant.rollouts:
            self._shared_by(grant.rollouts)
        return [
            PromptLease(
                prompt=Prompt(sample_id=item.sample, row=json.loads(item.row), origin=item.origin),
                attempt=item.attempt,
                evaluation=item.evaluation,
                lineage=self._client.lineage,
            )
            for item in grant.prompts
        ]

    def give_back(self, samples: tuple[int, ...] = ()) -> None:
        """Return leases, and withdraw the waiting request: the worker leaves."""
        self._client.connection.post(p.Return(samples=samples))

    async def send_files(self) -> None:
        """Send the groups in the spool to the controller, before this worker and its files are gone."""
        if self._spool is None:
            return
        for group in list(self._client.connection.unanswered.groups.values()):
            if isinstance(group, p.Failed) or isinstance(group.payload, bytes) or group.payload.num_bytes >= MOST_BYTES:
                continue
            path, num_bytes = group.payload.path, group.payload.num_bytes
            content = await asyncio.to_thread(self._spool.read, path, offset=0, num_bytes=num_bytes)
            if content is not None and len(content) == num_bytes:
                await self._client.connection.send(msgspec.structs.replace(group, payload=content))

    async def deliver(self, lease: PromptLease, group: RolloutGroup, *, compared: RolloutGroup | None) -> None:
        payload = encode_group(_as_read(group) if lease.evaluation else group, compared=compared)
        is_sent = self._client.leaving.is_set() and len(payload) < MOST_BYTES
        if self._spool is not None and not lease.evaluation and not is_sent:
            payload = await self._spool.put(payload, name=f"{lease.prompt.sample_id}-{lease.attempt}")
        await self._client.connection.send(
            p.Deliver(
                sample=lease.prompt.sample_id,
                attempt=lease.attempt,
                min_version=group.min_policy_version,
                max_version=group.max_policy_version,
                num_terms=group.num_terms,
                payload=payload,
                evaluation=lease.evaluation,
                lineage=lease.lineage,
                mean_reward=group.mean_reward,
            )
        )

    async def fail(self, lease: PromptLease, error: SampleError) -> None:
        await self._client.connection.send(
            p.Failed(
                sample=lease.prompt.sample_id,
                attempt=lease.attempt,
                reason=error.reason,
                final=error.final,
                evaluation=lease.evaluation,
                lineage=lease.lineage,
                mean_reward=error.mean_reward,
            )
        )

    async def cancelled(self) -> int:
        return await self._client.cancels.get()

    async def released(self) -> Sequence[str]:
        return await self._client.releases.get()


def _as_read(group: RolloutGroup) -> RolloutGroup:
    """Return the group without its arrays, which only training uses."""
    return replace(group, rollouts=tuple(replace(rollout, arrays={}) for rollout in group.rollouts))

"""The controller's side of the training loop in each rank of a policy replica.

    PolicySteps -- DirectLink     the connected process: the only one, or rank 0, which relays messages to the others
                \\- FollowerLink   all other ranks: they receive from rank 0 and send nothing

next_batch(0)             next_batch(1)   ...   next_batch(n)
^ held-out loss before the first step           ^ after the last; every [eval] every_steps in between (ValidatedSteps)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

import msgspec

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.errors import EpochOver, PeersUnreachable
from cosmos_rl_core.loop import Steps
from cosmos_rl_core.observe.trace import WAITS, Timeline
from cosmos_rl_core.types import StepResult, TrainBatch
from cosmos_rl_core.wire.channel import ConnectionClosed
from cosmos_rl_core.workers.client import ControllerClient
from cosmos_rl_core.workers.ranks import Ranks

T = TypeVar("T")
GONE = "the connection to the controller closed before step {} was committed"
NOTICE_S = 0.5
"""Seconds in which the controller usually notices a lost replica by itself."""


class ControllerLink(Protocol):
    """A policy rank's connection to the controller."""

    def request_batch(self, step: int, *, epoch: int) -> None: ...

    async def batch(self) -> p.Batch | p.Remesh | None:
        """Return the next batch or mesh, or None if the run has no more."""
        ...

    async def committed(self) -> p.Committed | p.Remesh | None:
        """Return the commit of the step that was voted for, or a mesh; None if the controller is gone."""
        ...

    async def leave(self) -> bool | None:
        """Leave the other policies, if this one shall leave: return whether it must save a checkpoint first.

        None: it need not leave, or the run is over. All ranks call it after the last step.
        """
        ...

    def is_over(self, epoch: int) -> bool:
        """Return whether a later epoch is known here. Safe in any thread."""
        ...

    def peers_lost(self, epoch: int, reason: str, suspects: tuple[str, ...] = ()) -> None:
        """Report that another policy replica cannot be reached, unless the controller notices it first."""
        ...

    @property
    def is_waiting(self) -> bool:
        """Whether this process waits for a message of the controller."""
        ...

    async def send(self, message: p.ToController) -> None:
        """Send a message once per replica: from rank 0 only."""
        ...

    def post(self, message: p.ToController) -> None:
        """Like `send`, without waiting for space in the send buffer."""
        ...


class DirectLink:
    """Link of the connected process. Relays each message to the other ranks before it acts on it."""

    def __init__(self, client: ControllerClient, ranks: Ranks | None, *, saving: asyncio.Event) -> None:
        """saving: set when a checkpoint shall be saved after the step in work."""
        self._client = client
        self._ranks = ranks
        self._saving = saving
        self.is_waiting = False

    def request_batch(self, step: int, *, epoch: int) -> None:
        if not (self._client.stopped.is_set() or self._client.leaving.is_set()):
            self.post(p.RequestBatch(step=step, epoch=epoch))

    async def batch(self) -> p.Batch | p.Remesh | None:
        message = await self._next(self._client.batches)
        stopped = self._client.stopped.is_set() or self._client.leaving.is_set()
        if message is None or (isinstance(message, p.Batch) and (stopped or not message.samples)):
            await self._relay(p.Stop(reason="no more batches"))
            return None
        await self._relay(message)
        return message

    def is_over(self, epoch: int) -> bool:
        return self._client.epoch > epoch or self._client.connection.closed.is_set()

    def peers_lost(self, epoch: int, reason: str, suspects: tuple[str, ...] = ()) -> None:
        def report() -> None:
            if not self.is_over(epoch):
                self.post(p.PeersLost(epoch=epoch, reason=reason, suspects=suspects))

        asyncio.get_running_loop().call_later(NOTICE_S, report)

    async def committed(self) -> p.Committed | p.Remesh | None:
        message = await self._next(self._client.commits)
        if isinstance(message, p.Committed) and self._saving.is_set():
            self._saving.clear()
            message = msgspec.structs.replace(message, save=True)
        await self._relay(message or p.Stop(reason="the controller is gone"))
        return message

    async def leave(self) -> bool | None:
        answer = None
        if self._client.leaving.is_set() and not self._client.stopped.is_set():
            await self._client.send(p.Leaving())
            answer = await self._next(self._client.leaves)
        await self._relay(answer or p.Stop(reason="the run is over"))
        return answer and answer.save

    async def send(self, message: p.ToController) -> None:
        await self._client.send(message)

    def post(self, message: p.ToController) -> None:
        self._client.post(message)

    async def _next(self, messages: asyncio.Queue[T]) -> T:
        self.is_waiting = True
        try:
            return await messages.get()
        finally:
            self.is_waiting = False

    async def _relay(self, message: p.ToWorker) -> None:
        if self._ranks is not None:
            await self._ranks.broadcast(message)


class FollowerLink:
    """Link of all other ranks. Rank 0 sends for the replica."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def request_batch(self, step: int, *, epoch: int) -> None:
        pass

    async def batch(self) -> p.Batch | p.Remesh | None:
        message = await self._ranks.receive()
        return message if isinstance(message, p.Batch | p.Remesh) else None

    async def committed(self) -> p.Committed | p.Remesh | None:
        message = await self._ranks.receive()
        return message if isinstance(message, p.Committed | p.Remesh) else None

    async def leave(self) -> bool | None:
        message = await self._ranks.receive()
        return message.save if isinstance(message, p.Leave) else None

    def is_over(self, epoch: int) -> bool:
        return False  # the ranks agree in each wait, and rank 0 knows

    def peers_lost(self, epoch: int, reason: str, suspects: tuple[str, ...] = ()) -> None:
        pass

    @property
    def is_waiting(self) -> bool:
        return False

    async def send(self, message: p.ToController) -> None:
        pass

    def post(self, message: p.ToController) -> None:
        pass


class PolicySteps:
    """`loop.Steps` of one rank. All ranks of a replica call it in lockstep."""

    def __init__(
        self,
        link: ControllerLink,
        *,
        mesh: Callable[[p.Remesh], Awaitable[int]],
        batch: Callable[[p.Batch], Awaitable[TrainBatch | p.PayloadsUnreadable]],
        written: Callable[[], Awaitable[None]],
        checkpoint: Callable[[p.Committed], Awaitable[None]],
        idle: Callable[[], Awaitable[None]],
        timeline: Timeline | None = None,
    ) -> None:
        """Set up the steps of a rank.

        mesh: joins the replicas of a mesh and returns the version of the weights, which may be those of a peer by then;
        raises EpochOver. batch: returns this rank's training batch, or the groups that some rank cannot read; raises
        EpochOver. written: waits until the step's files are written. idle: called before each wait for a message.
        """
        self._link = link
        self._mesh = mesh
        self._batch = batch
        self._written = written
        self._checkpoint = checkpoint
        self._idle = idle
        self._timeline = timeline or Timeline("policy")
        self._epoch = 0
        """Epoch of the mesh that this replica has joined."""
        self._requested = (-1, -1)
        """Epoch and step of the last requested batch."""
        self._last_batch = (-1, -1)
        """Epoch and step of the last batch that was returned."""
        self._committed: p.Committed | None = None

    async def next_batch(self, step: int) -> TrainBatch | None:
        if self._last_batch == (self._epoch, step):  # the step could not be computed together
            self._link.peers_lost(self._epoch, f"no sum of the gradients of step {step} over the policy replicas")
        while (message := await self._next(step)) is not None:
            if isinstance(message, p.Remesh):
                step = await self._join(message, step=step)
            elif message.epoch == self._epoch:  # otherwise a Remesh follows, or came
                assert message.step == step
                try:
                    batch = await self._batch(message)
                except EpochOver as error:
                    self._link.peers_lost(message.epoch, str(error))
                    continue
                if not isinstance(batch, p.PayloadsUnreadable):
                    self._last_batch = self._epoch, step
                    return batch
                await self._link.send(batch)
        return None

    async def _next(self, step: int) -> p.Batch | p.Remesh | None:
        await self._idle()
        with self._timeline.span("wait for batch", track=WAITS, step=step):
            return await self._link.batch()

    async def _join(self, message: p.Remesh, *, step: int) -> int:
        """Join a mesh and request its batch; return the step. A mesh that is over already is followed by another."""
        if message.epoch <= self._epoch:
            return step
        try:
            step = await self._mesh(message)
        except EpochOver as error:
            places = error.places if isinstance(error, PeersUnreachable) else ()
            self._link.peers_lost(message.epoch, str(error), tuple(message.members[place] for place in places))
            return step
        self._epoch = message.epoch
        self._request(step)
        return step

    async def commit(self, step: int) -> None:
        await self._link.send(p.Vote(step=step, epoch=self._epoch))
        with self._timeline.span("wait for commit", track=WAITS, step=step):
            answer = await self._link.committed()
            while isinstance(answer, p.Remesh):
                if answer.epoch > self._epoch:
                    raise EpochOver(f"epoch {answer.epoch} began before step {step} was committed")
                answer = await self._link.committed()  # a mesh of the past
        if answer is None:
            raise ConnectionClosed(GONE.format(step))
        assert answer.step == step
        self._committed = answer
        self._request(step + 1)  # the next batch can be assembled and sent during this step

    def _request(self, step: int) -> None:
        if (self._epoch, step) > self._requested:
            self._requested = self._epoch, step
            self._link.request_batch(step, epoch=self._epoch)

    async def report(self, result: StepResult, sync: Mapping[str, float]) -> None:
        assert self._committed is not None
        metrics = {**result.metrics, **sync}
        await self._written()
        await self._link.send(p.StepDone(step=self._committed.step, version=result.policy_version, metrics=metrics))
        await self._checkpoint(self._committed)


class ValidatedSteps:
    """`loop.Steps` that measures the held-out loss before requesting a batch, when due. Every rank wraps its own."""

    def __init__(
        self,
        steps: Steps,
        *,
        due: Callable[[int], bool],
        measure: Callable[[], Awaitable[Mapping[str, float]]],
        report: Callable[[int, Mapping[str, float]], Awaitable[None]],
    ) -> None:
        """Wrap `steps`. If `due(version)`, the metrics of `measure` are sent by `report(version, metrics)`."""
        self._steps = steps
        self._due = due
        self._measure = measure
        self._report = report

    async def next_batch(self, step: int) -> TrainBatch | None:
        if self._due(step):
            await self._report(step, await self._measure())
        return await self._steps.next_batch(step)

    async def commit(self, step: int) -> None:
        await self._steps.commit(step)

    async def report(self, result: StepResult, sync: Mapping[str, float]) -> None:
        await self._steps.report(result, sync)


class ProfiledSteps:
    """`loop.Steps` that calls `advance` before it requests each batch, and `stop` once there are no more."""

    def __init__(
        self, steps: Steps, *, advance: Callable[[], Awaitable[None]], stop: Callable[[], Awaitable[None]]
    ) -> None:
        self._steps = steps
        self._advance = advance
        self._stop = stop

    async def next_batch(self, step: int) -> TrainBatch | None:
        await self._advance()
        batch = await self._steps.next_batch(step)
        if batch is None:
            await self._stop()
        return batch

    async def commit(self, step: int) -> None:
        await self._steps.commit(step)

    async def report(self, result: StepResult, sync: Mapping[str, float]) -> None:
        await self._steps.report(result, sync)

"""The controller's side of the training loop in each rank of a policy replica.

    PolicySteps -- DirectLink     the connected process: the only one, or rank 0, which relays messages to the others
                \\- FollowerLink   all other ranks: they receive from rank 0 and send nothing

next_batch(0)             next_batch(1)   ...   next_batch(n)
^ held-out loss before the first step           ^ after the last; every [eval] every_steps in between (ValidatedSteps)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.loop import Steps
from cosmos_rl_core.types import StepResult, TrainBatch
from cosmos_rl_core.wire.channel import ConnectionClosed
from cosmos_rl_core.workers.client import ControllerClient
from cosmos_rl_core.workers.ranks import Ranks

GONE = "the connection to the controller closed before step {} was committed"


class ControllerLink(Protocol):
    """A policy rank's connection to the controller."""

    def request_batch(self, step: int) -> None: ...

    async def batch(self) -> p.Batch | None:
        """Return the next batch, or None if the run has no more."""
        ...

    async def committed(self) -> p.Committed | None:
        """Return the commit of the step that was voted for, or None if the controller is gone."""
        ...

    async def send(self, message: p.ToController) -> None:
        """Send a message once per replica: from rank 0 only."""
        ...

    def post(self, message: p.ToController) -> None:
        """Like `send`, without waiting for space in the send buffer."""
        ...


class DirectLink:
    """Link of the connected process. Relays each message to the other ranks before it acts on it."""

    def __init__(self, client: ControllerClient, ranks: Ranks | None) -> None:
        self._client = client
        self._ranks = ranks

    def request_batch(self, step: int) -> None:
        if not self._client.stopped.is_set():
            self.post(p.RequestBatch(step=step))

    async def batch(self) -> p.Batch | None:
        message = await self._client.batches.get()
        if message is None or not message.samples or self._client.stopped.is_set():
            await self._relay(p.Stop(reason="no more batches"))
            return None
        await self._relay(message)
        return message

    async def committed(self) -> p.Committed | None:
        message = await self._client.commits.get()
        await self._relay(message or p.Stop(reason="the controller is gone"))
        return message

    async def send(self, message: p.ToController) -> None:
        await self._client.send(message)

    def post(self, message: p.ToController) -> None:
        self._client.post(message)

    async def _relay(self, message: p.ToWorker) -> None:
        if self._ranks is not None:
            await self._ranks.broadcast(message)


class FollowerLink:
    """Link of all other ranks. Rank 0 sends for the replica."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def request_batch(self, step: int) -> None:
        pass

    async def batch(self) -> p.Batch | None:
        message = await self._ranks.receive()
        return message if isinstance(message, p.Batch) else None

    async def committed(self) -> p.Committed | None:
        message = await self._ranks.receive()
        return message if isinstance(message, p.Committed) else None

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
        batch: Callable[[p.Batch], Awaitable[TrainBatch | p.PayloadsLost]],
        checkpoint: Callable[[p.Committed], Awaitable[None]],
    ) -> None:
        """`batch` returns this rank's training batch, or the groups that some rank cannot read."""
        self._link = link
        self._batch = batch
        self._checkpoint = checkpoint
        self._epoch = 0
        self._requested = -1
        """Step of the last requested batch."""
        self._committed: p.Committed | None = None

    async def next_batch(self, step: int) -> TrainBatch | None:
        self._request(step)
        while (message := await self._link.batch()) is not None:
            assert message.step == step
            self._epoch = message.epoch
            batch = await self._batch(message)
            if not isinstance(batch, p.PayloadsLost):
                return batch
            await self._link.send(batch)
        return None

    async def commit(self, step: int) -> None:
        await self._link.send(p.Vote(step=step, epoch=self._epoch))
        self._committed = await self._link.committed()
        if self._committed is None:
            raise ConnectionClosed(GONE.format(step))
        assert self._committed.step == step
        self._request(step + 1)  # the next batch can be assembled and sent during this step

    def _request(self, step: int) -> None:
        if step != self._requested:
            self._requested = step
            self._link.request_batch(step)

    async def report(self, result: StepResult, sync: Mapping[str, float]) -> None:
        assert self._committed is not None
        metrics = {**result.metrics, **sync}
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

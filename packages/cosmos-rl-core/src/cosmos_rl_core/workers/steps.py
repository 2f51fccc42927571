"""The controller's side of the training loop in a policy process: direct, through rank 0, with held-out loss between.

next_batch(0)             next_batch(1)   ...   next_batch(n)
^ held-out loss before the first step           ^ after the last; every [eval] every_steps between
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.loop import Steps
from cosmos_rl_core.types import StepResult, TrainBatch
from cosmos_rl_core.workers.client import ControllerClient, RemoteSteps
from cosmos_rl_core.workers.ranks import FollowerSteps, Ranks

MakeBatch = Callable[[p.Batch], Awaitable[TrainBatch | p.PayloadsLost]]
Checkpoint = Callable[[p.Committed], Awaitable[None]]


class Desk(Protocol):
    """A policy process's line to the controller."""

    def steps(self, *, batch: MakeBatch, checkpoint: Checkpoint) -> Steps:
        """Return the controller's side of the loop."""
        ...

    async def report(self, message: p.ToController) -> None:
        """Tell the controller something that the replica says once."""
        ...

    def post(self, message: p.ToController) -> None:
        """As `report`, without waiting."""
        ...


class ControllerDesk:
    """Of the process that is connected: the only one, or rank 0, which hands on what it hears."""

    def __init__(self, client: ControllerClient, ranks: Ranks | None) -> None:
        self._client = client
        self._ranks = ranks

    def steps(self, *, batch: MakeBatch, checkpoint: Checkpoint) -> Steps:
        relay = None if self._ranks is None else self._ranks.tell
        return RemoteSteps(self._client, batch=batch, checkpoint=checkpoint, relay=relay)

    async def report(self, message: p.ToController) -> None:
        await self._client.say(message)

    def post(self, message: p.ToController) -> None:
        self._client.say_soon(message)


class FollowerDesk:
    """Of all other ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def steps(self, *, batch: MakeBatch, checkpoint: Checkpoint) -> Steps:
        return FollowerSteps(self._ranks, batch=batch, checkpoint=checkpoint)

    async def report(self, message: p.ToController) -> None:
        """Rank 0 says it."""

    def post(self, message: p.ToController) -> None:
        """Rank 0 says it."""


class ValidatedSteps:
    """`loop.Steps` that measures before it asks for a batch, wherever that is due. Every rank wraps its own."""

    def __init__(
        self,
        steps: Steps,
        *,
        due: Callable[[int], bool],
        measure: Callable[[], Awaitable[Mapping[str, float]]],
        tell: Callable[[int, Mapping[str, float]], Awaitable[None]],
    ) -> None:
        """Wrap `steps`; `due(version)` says when to `measure`, `tell(version, figures)` hands on what came of it."""
        self._steps = steps
        self._due = due
        self._measure = measure
        self._tell = tell

    async def next_batch(self, step: int) -> TrainBatch | None:
        if self._due(step):
            await self._tell(step, await self._measure())
        return await self._steps.next_batch(step)

    async def commit(self, step: int) -> None:
        await self._steps.commit(step)

    async def report(self, result: StepResult, sync: Mapping[str, float]) -> None:
        await self._steps.report(result, sync)

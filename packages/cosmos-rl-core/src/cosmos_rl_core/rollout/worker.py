"""A rollout replica: two loops around one engine.

    leases     waits for granted prompts, generates each group in its own task, delivers the group or its failure
    weights    waits for a newer version, pulls and verifies it next to the live weights, switches between two terms
               (following.py)

consumes   leases, weight versions
produces   scored groups with advantages
waits for  a grant (none while the staleness window is full), room in the spool, a published version
unblocks   the trainer's next batch
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.observe.trace import WAITS, Timeline, row
from cosmos_rl_core.rollout.following import WeightFollower
from cosmos_rl_core.rollout.rollouter import FILTERED, Rollouter
from cosmos_rl_core.rollout.spool.store import Spool
from cosmos_rl_core.types import Prompt, RolloutGroup
from cosmos_rl_core.wire.listening import SeldomLog


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLease:
    """The right to generate the group of one prompt."""

    prompt: Prompt
    attempt: int
    evaluation: bool = False
    lineage: int = 0
    """Lineage of the weights to generate with."""


class LeaseSource(Protocol):
    """A rollout replica's interface to the controller."""

    def request(self, *, version: int, capacity: int, lineage: int) -> None:
        """Request up to `capacity` leases for weights `version` of `lineage`; replaces an earlier waiting request."""
        ...

    async def granted(self) -> Sequence[PromptLease] | None:
        """Return the next grant, or None when the run is over."""
        ...

    async def deliver(self, lease: PromptLease, group: RolloutGroup, *, compared: RolloutGroup | None) -> None:
        """Send a group. compared: rollouts that travel with it, by which the policy compares the engine with itself."""
        ...

    async def fail(self, lease: PromptLease, error: SampleError) -> None: ...

    async def cancelled(self) -> int:
        """Return the next sample id whose lease was cancelled."""
        ...

    async def released(self) -> Sequence[str]:
        """Return the next files of the spool that are no longer needed."""
        ...


class RolloutWorker:
    """Generates the groups of granted leases until the run is over."""

    def __init__(
        self,
        rollouter: Rollouter,
        *,
        weights: WeightFollower,
        leases: LeaseSource,
        max_groups: int,
        spool: Spool | None = None,
        timeline: Timeline | None = None,
        beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        """spool: where large groups are stored; while it is full, no leases are requested. beside: started with it
        and run until its end; their errors are its own. log: receives the reason of a group that fails, once a minute.
        """
        self._complain = SeldomLog(log)
        self._engine = rollouter.engine
        self._rollouter = rollouter
        self._weights = weights
        self._leases = leases
        self.max_groups = max_groups
        """Maximum number of groups in work."""
        self._spool = spool
        self._timeline = timeline or Timeline("rollout")
        self._beside = beside
        self._lanes: set[int] = set()
        """Rows of the timeline in use: groups overlap, so each needs its own row."""
        self._running: dict[tuple[int, bool], asyncio.Task[None]] = {}
        """(sample, evaluation) -> the task that generates its group."""
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the first error of a task other than SampleError."""
        self._changed = asyncio.Event()
        """Set after each change of the groups in work and of the spool."""
        self._num_answered = 0
        self._idle = ExitStack()
        """Holds the span in which no group is in work."""

    @property
    def progress(self) -> int:
        """Work of the engine, and groups that were scored or have failed; constant if the engine hangs."""
        return self._engine.progress + self._num_answered

    @property
    def version(self) -> int:
        """Version of the engine's weights; -1: none yet."""
        return self._engine.version

    @property
    def holding(self) -> list[int]:
        """Samples in work, without those of an evaluation."""
        return [sample for sample, evaluation in self._running if not evaluation]

    @property
    def num_rows(self) -> int:
        """Rows of an evaluation in work."""
        return len(self._running) - len(self.holding)

    async def run(self) -> None:
        weights = self._weights.run(switched=self._request, rolled_back=self._drop_groups)
        following = [weights, self._follow_cancels(), *(start() for start in self._beside)]
        if self._spool is not None:
            following.append(self._follow_releases(self._spool))
        helpers = [asyncio.create_task(each) for each in following]
        leases = asyncio.create_task(self._answer_leases())
        self._begin_idle()
        try:
            await asyncio.wait([self._broken, leases, *helpers], return_when=asyncio.FIRST_COMPLETED)
            for ended in [self._broken, *helpers, leases]:
                if ended.done():
                    ended.result()
        finally:
            self._idle.close()
            self._broken.cancel()
            for task in [leases, *helpers, *self._running.values()]:
                task.cancel()
            await asyncio.gather(leases, *helpers, *self._running.values(), return_exceptions=True)

    async def drain(self) -> None:
        """Wait until no group is in work, and all spooled ones were released; `leases` must grant nothing more."""
        while self._running or (self._spool is not None and self._spool.num_bytes > 0):
            self._changed.clear()
            await self._changed.wait()

    async def _answer_leases(self) -> None:
        while (leases := await self._leases.granted()) is not None:
            for lease in leases:
                if not self._running:
                    self._idle.close()
                task = asyncio.create_task(self._answer(lease))
                task.add_done_callback(self._notice_failure)
                self._running[lease.prompt.sample_id, lease.evaluation] = task

    def _notice_failure(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _answer(self, lease: PromptLease) -> None:
        lane = next(i for i in count() if i not in self._lanes)
        self._lanes.add(lane)
        work = self._rollouter.evaluate if lease.evaluation else self._rollouter.run
        name = "evaluate" if lease.evaluation else "rollout"
        row.set(f"group {lane:03d}")
        try:
            with self._timeline.span(name, sample=lease.prompt.sample_id):
                group = await work(lease.prompt)
                compared = None if lease.evaluation else await self._rollouter.rollouts_to_compare()
            self._num_answered += 1
            await self._leases.deliver(lease, group, compared=compared)
        except SampleError as error:
            self._num_answered += 1
            if error.reason != FILTERED:
                self._complain("a group failed", f": {error.reason}")
            await self._leases.fail(lease, error)
        finally:
            self._lanes.discard(lane)
            key = (lease.prompt.sample_id, lease.evaluation)
            if self._running.get(key) is asyncio.current_task():  # not a newer task for the same sample
                del self._running[key]
            if not self._running:
                self._begin_idle()
            self._request()

    def _begin_idle(self) -> None:
        self._idle.close()
        self._idle.enter_context(self._timeline.span("wait for leases", track=WAITS, version=self._engine.version))

    def _drop_groups(self) -> None:
        """Stop generating: after a rollback the weights of all groups in work are void, and their leases over."""
        for task in self._running.values():
            task.cancel()

    async def _follow_cancels(self) -> None:
        while True:
            task = self._running.get((await self._leases.cancelled(), False))
            if task is not None:
                task.cancel()
                await asyncio.wait([task])

    async def _follow_releases(self, spool: Spool) -> None:
        while True:
            spool.release(await self._leases.released())
            self._request()

    def _request(self) -> None:
        self._changed.set()
        if self._engine.version >= 0:
            room = self.max_groups if self._spool is None else min(self.max_groups, self._spool.room())
            capacity = room - len(self._running)
            self._leases.request(version=self._engine.version, capacity=capacity, lineage=self._weights.lineage)

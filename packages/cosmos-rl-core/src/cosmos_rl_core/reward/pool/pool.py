"""The worker processes of one reward and their queue of requests.

    submit(task) --> queue --> a free worker takes up to batch_size --> scores | error --> task.result
                       ^                    |
                       +--- worker died ----+     its requests return to the front, each to run alone

Every request gets a result. A request whose worker died is run again, up to `max_attempts` times in total, and alone,
so that a request that crashes its worker affects no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cosmos_rl_core.connected_process import ConnectedProcess, ProcessDied, TimeLimit
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.processes import environment
from cosmos_rl_core.reward.pool.body import BodySpool
from cosmos_rl_core.reward.pool.settings import ServedReward
from cosmos_rl_core.reward.pool.worker import Ask, Build, FromWorker, Result, RewardAnswer, RewardItem
from cosmos_rl_core.reward.remote import TOKEN_VARIABLES

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0


@dataclass(eq=False, slots=True, kw_only=True)
class RewardTask:
    """One reward of a request, or of a group."""

    spool: BodySpool
    """The bytes that are scored."""
    item: RewardItem
    since: float
    """Time of queueing."""
    result: asyncio.Future[Result]
    """Set by the pool. Whoever cancels it may close the spool."""
    attempts: int = 0
    death: ProcessDied | None = None
    """That of the last worker that died of it."""


class PoolMetrics:
    """Counts nothing."""

    def restarted(self) -> None:
        """Count a worker that died."""

    def scored(self, *, seconds: float) -> None:
        """Count a batch."""

    def settled(self, *, since: float, failed: bool) -> None:
        """Count a finished request."""


@dataclass(eq=False)
class RewardPool:
    """Workers that compute one reward.

    async with RewardPool(settings, ...) as pool:         # every worker has built the reward; UserError
        pool.submit(task)
    """

    settings: ServedReward
    metrics: PoolMetrics
    log: Callable[[str], None]
    """Receives a message for each worker that dies."""
    python_path: Sequence[str] = ()
    _queue: deque[RewardTask] = field(default_factory=deque)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _workers: dict[int, ConnectedProcess] = field(default_factory=dict)
    _runners: list[asyncio.Task[str]] = field(default_factory=list)
    _num_out: int = 0
    """Number of abandoned workers."""
    _broken: str = ""
    """The reason if no worker is left."""

    async def __aenter__(self) -> RewardPool:
        starting = [self._start() for _ in range(self.settings.workers)]
        started = await asyncio.gather(*starting, return_exceptions=True)
        self._workers = {i: one for i, one in enumerate(started) if isinstance(one, ConnectedProcess)}
        failed = [one for one in started if isinstance(one, BaseException)]
        if failed:
            await self._kill_all()
            if isinstance(failed[0], UserError | ProcessDied):
                raise UserError(f"[[rewards]] {self.settings.name}: {failed[0]}") from failed[0]
            raise failed[0]
        self._runners = [asyncio.create_task(self._run(slot)) for slot in self._workers]
        for runner in self._runners:
            runner.add_done_callback(self._count_out)
        return self

    async def __aexit__(self, *_: object) -> None:
        for runner in self._runners:
            runner.cancel()
        await asyncio.gather(*self._runners, return_exceptions=True)
        await self._kill_all()

    def abandon(self) -> None:
        """End the workers with the next turn of the event loop, if that has not ended and with it the workers."""
        for runner in self._runners:
            if not runner.get_loop().is_closed():
                runner.cancel()

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [worker.process.pid for worker in self._workers.values()]

    @property
    def depth(self) -> int:
        """Number of requests waiting for a worker."""
        return len(self._queue)

    def submit(self, task: RewardTask) -> None:
        """Queue a request."""
        if self._broken:
            self._settle(task, Result(error=self._broken))
            return
        self._queue.append(task)
        self._arrived.set()

    async def _run(self, slot: int) -> str:
        """Run a worker and replace it when it dies. Returns the reason if no replacement starts."""
        while True:
            worker = self._workers[slot]
            try:
                await self._feed(worker)
            except ProcessDied as death:
                del self._workers[slot]
                self.log(f"{self.settings.called}: {death}; starting another")
            except asyncio.CancelledError:  # of an event loop that ends, too
                await worker.close()
                raise
            self.metrics.restarted()
            try:
                self._workers[slot] = await self._restart()
            except ProcessDied as death:
                return f"{self.settings.called}: its worker cannot be started again: {death}"

    async def _feed(self, worker: ConnectedProcess) -> None:
        """Send batches to a worker. Raises ProcessDied, also for an idle worker."""
        ended = asyncio.create_task(worker.process.ended())
        ended.add_done_callback(lambda _: self._arrived.set())
        try:
            while True:
                batch = await self._take(ended)
                if not batch:
                    raise worker.died(await worker.close())
                await self._score(worker, batch)
        finally:
            ended.cancel()

    async def _take(self, ended: asyncio.Task[str]) -> list[RewardTask]:
        """Wait for requests and return up to batch_size, or one that must run alone; none if `ended` is done."""
        await self._wait_for(1, ended)
        if self.settings.batch_wait_s and self._queue and not self._queue[0].attempts:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.batch_wait_s):
                    await self._wait_for(self.settings.batch_size, ended)
            await self._wait_for(1, ended)  # another worker may have taken them
        if ended.done():
            return []
        # A request whose worker died runs alone: it begins a batch that nothing joins, and it joins no other.
        batch = [self._queue.popleft()]
        while self._queue and len(batch) < self.settings.batch_size and not batch[0].attempts:
            if self._queue[0].attempts:
                break
            batch.append(self._queue.popleft())
        if self._queue:
            self._arrived.set()  # for the other workers, which wait for the same event
        return batch

    async def _wait_for(self, count: int, ended: asyncio.Task[str]) -> None:
        while len(self._queue) < count and not ended.done():
            self._arrived.clear()
            await self._arrived.wait()

    async def _score(self, worker: ConnectedProcess, batch: Sequence[RewardTask]) -> None:
        """Score a batch. Raises ProcessDied after returning its requests to the queue."""
        batch = [task for task in batch if not task.result.done()]  # another reward may have failed the request
        if not batch:
            return
        limit = TimeLimit("timeout_s", self.settings.timeout_s)
        ask = Ask(items=[task.item for task in batch], timeout_s=limit.seconds)
        try:
            answer = await worker.ask(ask, limit=limit, descriptors=[task.spool.descriptor for task in batch])
            if not isinstance(answer, RewardAnswer) or len(answer.results) != len(batch):
                await worker.close()
                raise ProcessDied("the worker answered out of turn and was killed")
        except ProcessDied as death:
            for task in batch:
                task.attempts, task.death = task.attempts + 1, death
            spent = [task for task in batch if task.attempts >= self.settings.max_attempts]
            for task in spent:
                times = f"{task.attempts} times" if task.attempts > 1 else "once"
                self._settle(task, Result(error=f"{self.settings.called} was tried {times}: {death}"))
            self._put_back([task for task in batch if task not in spent])
            raise
        self.metrics.scored(seconds=answer.seconds)
        for task, result in zip(batch, answer.results, strict=True):
            self._settle(task, result)

    def _settle(self, task: RewardTask, result: Result) -> None:
        self.metrics.settled(since=task.since, failed=bool(result.error))
        if not task.result.done():  # cancelled meanwhile
            task.result.set_result(result)

    def _put_back(self, batch: Sequence[RewardTask]) -> None:
        if batch:
            self._queue.extendleft(reversed(batch))
            self._arrived.set()

    async def _start(self) -> ConnectedProcess:
        """Start a worker and wait until its reward is built. Raises UserError if that fails, and ProcessDied."""
        settings = self.settings
        variables = {name: v for name, v in environment(self.python_path).items() if name not in TOKEN_VARIABLES}
        worker = ConnectedProcess(
            [settings.python or sys.executable, "-P", "-m", "cosmos_rl_core.reward.pool.worker"],
            name="the worker",
            environment={**variables, **settings.env},
        )
        await worker.open(decode=FromWorker)
        build = Build(name=settings.name, label=settings.called, options=settings.options)
        try:
            await worker.ask(build, limit=TimeLimit("start_timeout_s", settings.start_timeout_s))
        except ProcessDied as death:
            raise ProcessDied(f"{death} while it was building the reward") from death
        return worker

    async def _restart(self) -> ConnectedProcess:
        """Start a replacement for a dead worker, with backoff. Raises ProcessDied after repeated failures."""
        number = 0
        while True:
            try:
                return await self._start()
            except (ProcessDied, UserError) as error:
                self.log(f"{self.settings.called}: {error}")
                number += 1
                if number == self.settings.max_failed_starts:
                    raise ProcessDied(str(error)) from error
            await asyncio.sleep(min(_FIRST_PAUSE_S * 2**number, _LONGEST_PAUSE_S))

    def _count_out(self, runner: asyncio.Task[str]) -> None:
        """Continue with one worker fewer; if none is left, fail all waiting requests."""
        if runner.cancelled():
            return
        error = runner.exception()
        reason = runner.result() if error is None else f"{self.settings.called}: the server failed: {error!r}"
        self.log(reason)
        self._num_out += 1
        if self._num_out < self.settings.workers:
            return
        self._broken = reason
        while self._queue:
            self._settle(self._queue.popleft(), Result(error=reason))

    async def _kill_all(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))

"""Jobs and the pools that score them: the server without HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

from prometheus_client import Gauge

from cosmos_rl_core.ops.reward_service.jobs import Jobs, RewardJob
from cosmos_rl_core.ops.reward_service.metrics import RewardMetrics, ServerMetrics
from cosmos_rl_core.ops.reward_service.settings import ServerSettings
from cosmos_rl_core.reward.pool.body import BodySpool
from cosmos_rl_core.reward.pool.pool import RewardPool, RewardTask
from cosmos_rl_core.reward.pool.worker import Result, RewardItem
from cosmos_rl_core.reward.request import Header, RewardSpec

_SWEEP_S = 1.0


class Unserved(Exception):
    """A reward or an option that this server does not serve."""


class Backend:
    """Queues requests, scores them, and stores results until they expire.

    async with Backend(settings, log=print) as backend:        # workers are up; UserError
        job = backend.add(header, spool)                       # Unserved, RequestConflict
        await job.done.wait()
    """

    def __init__(
        self, settings: ServerSettings, *, log: Callable[[str], None], python_path: Sequence[str] = ()
    ) -> None:
        self.settings = settings
        self._stack = AsyncExitStack()
        self.jobs = Jobs(settings, clock=time.monotonic)
        self.metrics = ServerMetrics()
        self.pools = {
            name: RewardPool(served, RewardMetrics(self.metrics, name), log=log, python_path=tuple(python_path))
            for served in settings.rewards
            for name in [served.called]
        }
        for name, pool in self.pools.items():
            self.metrics.depths.labels(name).set_function(lambda pool=pool: pool.depth)
            self.metrics.workers.labels(name).set_function(lambda pool=pool: len(pool.pids))
        is_open = self.metrics.add(Gauge, "requests_open", "Requests that are arriving or not done.", ())
        is_open.set_function(lambda: self.jobs.num_open)
        open_bytes = self.metrics.add(Gauge, "open_bytes", "Size of their bodies.", ())
        open_bytes.set_function(lambda: self.jobs.open_bytes)

    async def __aenter__(self) -> Backend:
        async with AsyncExitStack() as stack:
            for pool in self.pools.values():
                await stack.enter_async_context(pool)
            sweeper = asyncio.create_task(self._sweep())
            stack.callback(sweeper.cancel)
            stack.callback(self.jobs.close)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def add(self, header: Header, spool: BodySpool) -> RewardJob:
        """Queue a request for each of its rewards; a request with a known id is not queued again.

        Raises Unserved for rewards and options that this server does not serve, and RequestConflict.
        """
        for i, reward in enumerate(header.rewards):
            self._check(reward, at=f"$.rewards[{i}]")
        job, is_new = self.jobs.add(header, spool)
        if is_new:
            now, loop = time.monotonic(), asyncio.get_running_loop()
            job.results = [loop.create_future() for _ in header.rewards]
            for i, (reward, result) in enumerate(zip(header.rewards, job.results, strict=True)):
                result.add_done_callback(partial(self._take, job, i))
                item = RewardItem(num_bytes=job.num_bytes, reward=i)
                self.pools[reward.name].submit(RewardTask(spool=spool, item=item, since=now, result=result))
        return job

    def down(self) -> list[str]:
        """Rewards without a worker."""
        return [name for name, pool in self.pools.items() if not pool.pids]

    def _take(self, job: RewardJob, reward: int, result: asyncio.Future[Result]) -> None:
        if result.cancelled():
            return
        if (answer := result.result()).error:
            self.jobs.fail(job, answer.error)
        else:
            self.jobs.score(job, reward, answer.scores)

    def _check(self, reward: RewardSpec, *, at: str) -> None:
        pool = self.pools.get(reward.name)
        if pool is None:
            raise Unserved(f"header: no reward {reward.name!r} is served; known: {', '.join(self.pools)} - at `{at}`")
        allowed = pool.settings.request_options
        for option in reward.options:
            if option not in allowed:
                names = ", ".join(allowed) or "none"
                raise Unserved(f"header: option {option!r} is not for requests to set; those are: {names} - at `{at}`")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.jobs.forget_expired()

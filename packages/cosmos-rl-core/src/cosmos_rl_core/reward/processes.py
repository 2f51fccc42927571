"""Rewards in worker processes, each of which is killed and replaced when it does not answer in time.

    ProcessReward.steps(group) --body--> RewardPool --a free worker--> reward(group) --> steps | SampleError
                                             ^                |
                                             +-- timeout_s ---+   the worker is killed, and another one is started

For rewards whose time depends on what a model has written: an expression that is evaluated, a search by a regular
expression. In a thread such a call cannot be ended, and a search keeps the interpreter's lock too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from cosmos_rl_core.connected_process import ProcessDied
from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.reward.pool.body import BodySpool
from cosmos_rl_core.reward.pool.pool import PoolMetrics, RewardPool, RewardTask
from cosmos_rl_core.reward.pool.settings import ServedReward
from cosmos_rl_core.reward.pool.worker import OF_ITEMS, Build, Result, RewardItem
from cosmos_rl_core.reward.values import place, too_long
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_core.wire.payload import encode_group

log = logging.getLogger(__name__)


class RewardProcesses:
    """The processes of a rubric's rewards, started at the first call; each builds the rewards that it is asked for."""

    def __init__(self, *, timeout_s: float, workers: int = 2) -> None:
        self.timeout_s = timeout_s
        self._workers = workers
        self._pool: RewardPool | None = None
        self._starting = asyncio.Lock()

    def reward(self, name: str, *, label: str, options: Mapping[str, Any]) -> ProcessReward:
        """Return a reward that runs in these processes. name: as of `build_by_name`."""
        return ProcessReward(self, Build(name=name, label=label, options=dict(options)))

    async def started(self) -> RewardPool:
        """Return the pool, once its processes run."""
        async with self._starting:
            if self._pool is None:
                settings = ServedReward(
                    name=OF_ITEMS,
                    label="rewards",
                    workers=self._workers,
                    batch_size=1,
                    timeout_s=self.timeout_s,
                    max_attempts=1,
                )
                self._pool = await RewardPool(settings, PoolMetrics(), log=log.warning).__aenter__()
            return self._pool

    def close(self) -> None:
        """End the processes, which also end with the event loop of their calls, and with this process."""
        if self._pool is not None:
            self._pool.abandon()


class ProcessReward:
    """A reward of a rubric that runs in `RewardProcesses`."""

    def __init__(self, processes: RewardProcesses, build: Build) -> None:
        self._processes = processes
        self._build = build

    async def steps(self, group: RolloutGroup) -> list[np.ndarray]:
        """Return for each rollout the rewards of its steps, or one. Raises SampleError."""
        where = place(self._build.label, group)
        try:
            body = encode_group(group, for_rewards=True)
            result, death = await self._score(body)
        except (ValueError, UserError) as error:
            raise SampleError(f"{where}: {error}", final=True) from error
        if death is not None:
            if not death.is_late:
                raise SampleError(f"{where}: {death}")
            late = f"{where} {too_long(self._processes.timeout_s)}, and its process was killed"
            raise SampleError(late, final=True)  # the same text would take as long again
        if result.error:
            raise SampleError(result.error, final=result.is_final)
        return [np.array(steps) for steps in result.steps]

    async def _score(self, body: bytes) -> tuple[Result, ProcessDied | None]:
        """Return the result of an encoded group once a process is free and has scored it, and the process's death."""
        pool = await self._processes.started()
        spool = BodySpool()
        try:
            spool.write(body)
            item = RewardItem(num_bytes=spool.num_bytes, own=self._build)
            result = asyncio.get_running_loop().create_future()  # cancelled with this call
            task = RewardTask(spool=spool, item=item, since=0.0, result=result)
            pool.submit(task)
            return await task.result, task.death
        finally:
            spool.close()

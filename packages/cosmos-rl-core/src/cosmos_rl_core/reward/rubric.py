"""Weighted reward functions over a group. A failure is an error of the sample and never becomes a score."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.interfaces import RewardFn
from cosmos_rl_core.reward.processes import ProcessReward, RewardProcesses
from cosmos_rl_core.reward.values import checked_steps, failure, is_async, name_of, place, too_long
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_core.wire.listening import SeldomLog

log = logging.getLogger(__name__)
_MAX_THREADS = 1000
"""Threads of functions that do not return are not used again."""
SLOW_S = 10.0
"""Seconds after which a call is reported, unless earlier ones took half as long as it already has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedReward:
    """One reward of the rubric."""

    name: str
    """Key in `reward_breakdown` and in metrics."""
    weight: float
    """0 records the value without training on it."""
    function: RewardFn | ProcessReward


class Rubric:
    """Scores groups with every function and computes the weighted sum.

        scored = await rubric.score(group)      # sets reward and reward_breakdown of rollouts, rewards of episodes

    Plain functions run in threads, `threads` at a time, so that a slow one does not block generation; `async def`
    functions run on the caller's event loop. The time of a function begins when it is called. One that takes too long
    keeps its thread, and others run in its place; `processes` can be ended.
    """

    def __init__(
        self,
        rewards: Sequence[WeightedReward],
        *,
        timeout_s: float = 60.0,
        threads: int = 2,
        processes: RewardProcesses | None = None,
        report: Callable[[str, str], None] | None = None,
        slow_s: float = SLOW_S,
    ) -> None:
        """processes: those of the rewards that run in processes, which end with the rubric.

        report: receives a complaint about each call that is slow or hangs, and its details; default: the log.
        """
        self._rewards = tuple(rewards)
        self._timeout_s, self._slow_s = timeout_s, slow_s
        self._processes = processes
        self._report = report or SeldomLog(log.warning)
        self._longest: dict[str, float] = {}
        """Seconds of the longest call that has returned, by reward."""
        self._free = asyncio.Semaphore(threads)
        self._pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="reward")

    async def score(self, group: RolloutGroup) -> RolloutGroup:
        columns = await asyncio.gather(*(self._values(reward, group) for reward in self._rewards))
        rollouts = []
        for i, rollout in enumerate(group.rollouts):
            steps = {r.name: values[i] for r, values in zip(self._rewards, columns, strict=True)}
            breakdown = {name: float(values.sum()) for name, values in steps.items()}
            total = sum(r.weight * breakdown[r.name] for r in self._rewards)
            if not math.isfinite(total):
                raise SampleError(f"the rewards of {name_of(group)} add up to {total}: {breakdown}", final=True)
            episode = rollout.episode
            if episode is not None:
                episode = replace(episode, rewards=self._of_steps(steps, num_steps=episode.num_steps))
            rollouts.append(replace(rollout, reward=float(total), reward_breakdown=breakdown, episode=episode))
        return replace(group, rollouts=tuple(rollouts))

    def _of_steps(self, values: Mapping[str, np.ndarray], *, num_steps: int) -> np.ndarray:
        """Return the weighted sum of step rewards [S]; a single value for the episode is added to its last step."""
        total = np.zeros(num_steps)
        for reward in self._rewards:
            rewards = values[reward.name]
            total[-len(rewards) :] += reward.weight * rewards
        return total.astype(np.float32)

    async def _values(self, reward: WeightedReward, group: RolloutGroup) -> list[np.ndarray]:
        function, where = reward.function, place(reward.name, group)
        if isinstance(function, ProcessReward):  # which has the time limit: calls may wait for a free process
            with self._watched(reward.name, group):
                return await function.steps(group)
        limit = asyncio.timeout(None)
        try:
            async with nullcontext() if is_async(function) else self._free, limit:
                limit.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
                with self._watched(reward.name, group):
                    values = await self._call(function, group)
        except (Exception, SystemExit) as error:  # user code may raise anything; it is reported and counted
            if limit.expired():
                raise SampleError(f"{where} {too_long(self._timeout_s)}") from error
            raise failure(error, where=where) from error
        return checked_steps(values, rollouts=group.rollouts, where=where)

    @contextmanager
    def _watched(self, name: str, group: RolloutGroup) -> Iterator[None]:
        """Report a call that takes far longer than the earlier ones of this reward, while it does."""
        loop = asyncio.get_running_loop()
        began, slow_s = loop.time(), max(self._slow_s, 2 * self._longest.get(name, 0.0))
        complaint = f"reward '{name}' is slow or hangs: [reward] timeout_s = {self._timeout_s:g} ends a call"
        reporting = loop.call_later(slow_s, self._report, complaint, f"; {slow_s:.0f} s so far on {name_of(group)}")
        try:
            yield
            self._longest[name] = max(self._longest.get(name, 0.0), loop.time() - began)
        finally:
            reporting.cancel()

    async def _call(self, function: RewardFn, group: RolloutGroup) -> Any:
        if is_async(function):
            return await cast(Awaitable[Any], function(group))
        return await asyncio.get_running_loop().run_in_executor(self._pool, _in_thread, function, group)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()


def _in_thread(function: RewardFn, group: RolloutGroup) -> Any:
    try:
        return function(group)
    except StopIteration as error:  # a future cannot hold it and would never be done
        raise RuntimeError("StopIteration") from error

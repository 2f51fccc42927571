"""Weighted reward functions over a group. A failure is an error of the sample and never becomes a score."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.interfaces import RewardFn
from cosmos_rl_core.types import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedReward:
    """One reward of the rubric."""

    name: str
    """Key in `reward_breakdown` and in metrics."""
    weight: float
    """0 records the value without training on it."""
    function: RewardFn


class Rubric:
    """Scores groups with every function and computes the weighted sum.

        scored = await rubric.score(group)      # sets reward and reward_breakdown of rollouts, rewards of episodes

    Plain functions run in a small thread pool, so that a slow one does not block generation; `async def` functions run
    on the caller's event loop.
    """

    def __init__(self, rewards: Sequence[WeightedReward], *, timeout_s: float = 60.0, threads: int = 2) -> None:
        self._rewards = tuple(rewards)
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="reward")

    async def score(self, group: RolloutGroup) -> RolloutGroup:
        columns = await asyncio.gather(*(self._values(reward, group) for reward in self._rewards))
        rollouts = []
        for i, rollout in enumerate(group.rollouts):
            steps = {r.name: values[i] for r, values in zip(self._rewards, columns, strict=True)}
            breakdown = {name: float(values.sum()) for name, values in steps.items()}
            total = sum(r.weight * breakdown[r.name] for r in self._rewards)
            if not math.isfinite(total):
                raise SampleError(f"the rewards of {_name(group)} add up to {total}: {breakdown}", final=True)
            episode = rollout.episode
            if episode is not None:
                episode = replace(episode, rewards=self._of_steps(steps, num_steps=episode.num_steps))
            rollouts.append(replace(rollout, reward=float(total), reward_breakdown=breakdown, episode=episode))
        return replace(group, rollouts=tuple(rollouts))

    def _of_steps(self, values: Mapping[str, np.ndarray], *, num_steps: int) -> np.ndarray:
        """Return the weighted sum of step rewards [S]; a single value for the episode is added to its last step."""
        total = np.zeros(num_steps)
        for reward in self._rewards:
            given = values[reward.name]
            total[-len(given) :] += reward.weight * given
        return total.astype(np.float32)

    async def _values(self, reward: WeightedReward, group: RolloutGroup) -> list[np.ndarray]:
        where = f"reward '{reward.name}' on {_name(group)}"
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                values = await self._call(reward.function, group)
        except (Exception, SystemExit) as error:  # user code may raise anything; it is reported and counted
            if limit.expired():
                raise SampleError(f"{where} took longer than [reward] timeout_s = {self._timeout_s:g}") from error
            again = isinstance(error, ConnectionError | TimeoutError)  # a retry may reach its server
            final = error.final if isinstance(error, SampleError) else not again
            raise SampleError(f"{where} raised {type(error).__name__}: {error}", final=final) from error
        return _checked_steps(values, rollouts=group.rollouts, where=where)

    async def _call(self, function: RewardFn, group: RolloutGroup) -> Any:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await cast(Awaitable[Any], function(group))
        return await asyncio.get_running_loop().run_in_executor(self._pool, _in_thread, function, group)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _in_thread(function: RewardFn, group: RolloutGroup) -> Any:
    try:
        return function(group)
    except StopIteration as error:  # a future cannot hold it and would never be done
        raise RuntimeError("StopIteration") from error


def _name(group: RolloutGroup) -> str:
    return group.prompt.origin or f"sample {group.prompt.sample_id}"


def _checked_steps(values: Any, *, rollouts: Sequence[Rollout], where: str) -> list[np.ndarray]:
    """Like `checked_values`: arrays [S] for episodes with one reward per step, [1] for all others."""
    if all(rollout.episode is None for rollout in rollouts) or not isinstance(values, Sequence):
        return [np.array([value]) for value in checked_values(values, expected=len(rollouts), where=where)]
    totals = checked_values(
        [value.sum() if _is_vector(value) else value for value in values], expected=len(rollouts), where=where
    )
    checked = []
    for i, (rollout, value, total) in enumerate(zip(rollouts, values, totals, strict=True)):
        steps = np.asarray(value, np.float64) if _is_vector(value) else np.array([total])
        if _is_vector(value) and (rollout.episode is None or len(steps) != rollout.episode.num_steps):
            have = "no steps" if rollout.episode is None else f"{rollout.episode.num_steps} steps"
            raise SampleError(f"{where} returned {len(steps)} values for rollout {i}, which has {have}", final=True)
        checked.append(steps)
    return checked


def checked_values(values: Any, *, expected: int, where: str) -> list[float]:
    """Return the values of a reward as floats. Raises SampleError with the problem of the first invalid value."""
    if isinstance(values, str | bytes) or (not isinstance(values, Sequence) and not _is_vector(values)):
        raise SampleError(
            f"{where} returned {type(values).__name__}; it must return one number per rollout", final=True
        )
    if len(values) != expected:
        raise SampleError(f"{where} returned {len(values)} values for {expected} rollouts", final=True)
    checked = []
    for i, value in enumerate(values):
        try:
            number = float(value) if not isinstance(value, str | bytes) else math.nan
        except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: torch's for a complex one
            number = math.nan
        if not math.isfinite(number):
            raise SampleError(f"{where} returned {value!r} for rollout {i}; it must be a finite number", final=True)
        checked.append(number)
    return checked


def _is_vector(values: Any) -> bool:
    """Whether the values are a 1-D numpy array or torch tensor."""
    return getattr(values, "ndim", None) == 1

"""Rewards of real data: scores rows of [eval.loss_data] like rollouts, to measure the highest reward of data."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup

BEST = "data/reward_max"
AT_ONCE = 8
"""Rows scored concurrently."""


async def score_real_rows(
    domain: DomainBase,
    data: Any,
    rows: Sequence[Mapping[str, Any]],
    *,
    score: Callable[[RolloutGroup], Awaitable[RolloutGroup]],
) -> dict[str, float]:
    """Return the mean and the highest reward of the rows, and the number of scored rows.

    Rows whose media or reward fail are left out. Raises the first row's SampleError if all fail.
    """
    room = asyncio.Semaphore(AT_ONCE)

    async def reward(place: int, row: Mapping[str, Any]) -> float | SampleError:
        async with room:
            try:
                media = await asyncio.to_thread(domain.row_media, data, row)
                [rollout] = (await score(_as_group(Prompt(sample_id=place, row=row), media))).rollouts
            except SampleError as error:
                return error
            return rollout.reward

    results = await asyncio.gather(*(reward(place, row) for place, row in enumerate(rows)))
    rewards = [value for value in results if isinstance(value, float)]
    if not rewards:
        raise next((value for value in results if isinstance(value, SampleError)), SampleError("there are no rows"))
    return {"data/reward_mean": float(np.mean(rewards)), BEST: max(rewards), "data/rows": float(len(rewards))}


def _as_group(prompt: Prompt, media: Mapping[str, np.ndarray]) -> RolloutGroup:
    """Wrap a row as a rollout without terms."""
    rollout = Rollout(
        arrays={},
        rollout_logprobs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, bool),
        media=media,
    )
    return RolloutGroup(prompt=prompt, rollouts=(rollout,))

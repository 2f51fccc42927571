"""What real data earns: rows of [eval.loss_data], scored as rollouts are, so that the monitor knows their best."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.optional import ShowsRows
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup

BEST = "data/reward_max"
AT_ONCE = 8
"""Rows in work at the same time."""


async def score_real_rows(
    domain: ShowsRows,
    data: Any,
    rows: Sequence[Mapping[str, Any]],
    *,
    score: Callable[[RolloutGroup], Awaitable[RolloutGroup]],
) -> dict[str, float]:
    """Return the mean and the best reward of rows under [data], and their number.

    A row that gives no media or no reward is left out. Raises SampleError, for the first of them, where all are.
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

    found = await asyncio.gather(*(reward(place, row) for place, row in enumerate(rows)))
    rewards = [value for value in found if isinstance(value, float)]
    if not rewards:
        raise next((value for value in found if isinstance(value, SampleError)), SampleError("there are no rows"))
    return {"data/reward_mean": float(np.mean(rewards)), BEST: max(rewards), "data/rows": float(len(rewards))}


def _as_group(prompt: Prompt, media: Mapping[str, np.ndarray]) -> RolloutGroup:
    """A row as if a model had answered with it, in no terms."""
    rollout = Rollout(
        arrays={},
        rollout_logprobs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, bool),
        media=media,
    )
    return RolloutGroup(prompt=prompt, rollouts=(rollout,))

"""What real data earns."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.monitor.data_rewards import score_real_rows


class Bright:
    """Rows are a brightness; those below 0 have no clip."""

    def row_media(self, data, row):
        if row["value"] < 0:
            raise SampleError(f"no clip in {data}")
        return {"video": np.full((1, 1, 1, 3), row["value"], np.uint8)}


async def score(group):
    [rollout] = group.rollouts
    if group.prompt.row["value"] == 13:
        raise SampleError("unlucky")
    return replace(group, rollouts=(replace(rollout, reward=float(rollout.media["video"].mean())),))


def scored(*values):
    return asyncio.run(score_real_rows(Bright(), "clips", [{"value": value} for value in values], score=score))


def test_mean_and_best_are_of_the_rows_that_can_be_scored():
    assert scored(4, -1, 13, 8, 6) == {"data/reward_mean": 6.0, "data/reward_max": 8.0, "data/rows": 3.0}


def test_where_none_can_be_the_first_reason_is_told():
    with pytest.raises(SampleError, match="no clip in clips"):
        scored(-1, 13)


def test_more_rows_than_are_in_work_at_once():
    assert scored(*range(1, 13))["data/rows"] == 12

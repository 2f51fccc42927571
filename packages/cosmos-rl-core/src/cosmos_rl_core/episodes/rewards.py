"""The reward `environment`: what the environment of [environment] gave."""

from __future__ import annotations

import numpy as np

from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.types import Rollout, RolloutGroup


class EnvironmentReward:
    """The rewards of the environment for each turn of an episode; a turn without one counts as 0 beside those with.

    Raises SampleError for an episode in which no turn was given a reward.
    """

    needs_episodes = True

    def __call__(self, group: RolloutGroup) -> list[np.ndarray]:
        return [_of(rollout) for rollout in group.rollouts]


def _of(rollout: Rollout) -> np.ndarray:
    rewards = [exchange.reward for exchange in rollout.exchanges]
    if all(reward is None for reward in rewards):
        cut = rollout.finish_reason == "length"
        raise SampleError(
            "the environment gave an episode no reward"
            + (", which was cut; [environment] unfinished_reward gives it one" if cut else ""),
            final=not cut,
        )
    return np.array([reward or 0.0 for reward in rewards])

"""Rewards of the simulator: its own per step, and success."""

from __future__ import annotations

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import RolloutGroup


class SimulatorReward:
    """The simulator's reward of each step of an episode, times `scale`.

    difference: return the increase over the step before. This is potential-based shaping if the simulator's reward
    measures the distance to the goal (Ng, Harada, Russell, 1999): staying near the goal earns nothing.

    discount: factor of a reward for each step before it, so that groups compare discounted returns. Leave it at 1 with
    a critic, whose advantages discount by [algorithm] gamma.
    """

    def __init__(self, scale: float = 1.0, difference: bool = False, discount: float = 1.0) -> None:
        if not 0 < discount <= 1:
            raise UserError(f"reward simulator: discount = {discount} must be above 0 and at most 1")
        self._scale = scale
        self._difference = difference
        self._discount = discount

    def __call__(self, group: RolloutGroup) -> list[np.ndarray]:
        return [self._scale * self._of(rollout.media["sim_rewards"]) for rollout in group.rollouts]

    def _of(self, rewards: np.ndarray) -> np.ndarray:
        rewards = np.diff(rewards, prepend=rewards[:1]) if self._difference else rewards
        return rewards if self._discount == 1 else rewards * self._discount ** np.arange(len(rewards))


class Success:
    """1 for an episode in which the task was completed, else 0; assigned to the episode's last step."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        return [float(rollout.media["success"][0]) for rollout in group.rollouts]

"""Rewards of the simulator: its own per step, and success."""

from __future__ import annotations

import numpy as np

from cosmos_rl_core.types import RolloutGroup


class SimulatorReward:
    """The simulator's reward of each step of an episode, times `scale`.

    difference: return the increase over the step before. This is potential-based shaping if the simulator's reward
    measures the distance to the goal (Ng, Harada, Russell, 1999): staying near the goal earns nothing.
    """

    def __init__(self, scale: float = 1.0, difference: bool = False) -> None:
        self._scale = scale
        self._difference = difference

    def __call__(self, group: RolloutGroup) -> list[np.ndarray]:
        return [self._scale * self._of(rollout.media["sim_rewards"]) for rollout in group.rollouts]

    def _of(self, rewards: np.ndarray) -> np.ndarray:
        return np.diff(rewards, prepend=rewards[:1]) if self._difference else rewards


class Success:
    """1 for an episode in which the task was completed, else 0; assigned to the episode's last step."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        return [float(rollout.media["success"][0]) for rollout in group.rollouts]

"""Rewards of the simulator: its own, step by step, and success."""

from __future__ import annotations

import numpy as np

from cosmos_rl_core.types import RolloutGroup


class SimulatorReward:
    """What the simulator gave for each step of an episode, times `scale`.

    difference: give how much more than the step before, which is potential-based shaping where the simulator's reward
    says how near the goal is (Ng, Harada, Russell, 1999): staying near it earns nothing.
    """

    def __init__(self, scale: float = 1.0, difference: bool = False) -> None:
        self._scale = scale
        self._difference = difference

    def __call__(self, group: RolloutGroup) -> list[np.ndarray]:
        return [self._scale * self._of(rollout.media["sim_rewards"]) for rollout in group.rollouts]

    def _of(self, rewards: np.ndarray) -> np.ndarray:
        return np.diff(rewards, prepend=rewards[:1]) if self._difference else rewards


class Success:
    """1 for an episode in which the task was done, 0 for any other; it counts at the episode's last step."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        return [float(rollout.media["success"][0]) for rollout in group.rollouts]

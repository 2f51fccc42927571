"""The rewards this package ships, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cosmos_rl_core.interfaces import RewardFn
from cosmos_rl_vla.rewards.simulator import SimulatorReward, Success

REWARDS: Mapping[str, Callable[..., RewardFn]] = {"success": Success, "simulator": SimulatorReward}

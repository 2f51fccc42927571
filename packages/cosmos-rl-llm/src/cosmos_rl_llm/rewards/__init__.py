"""Shipped rewards by name. Each is a strict model of its options and is called with a group.

    reward = REWARDS["numeric"](tolerance=0.01)
    values = reward(group)                          # one float per rollout

The reference answer is `group.prompt.row["answer"]`: data.answer_column, cut out by data.answer_pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cosmos_rl_core.interfaces import RewardFn
from cosmos_rl_llm.rewards.math import BoxedReward, MathReward, NumericReward
from cosmos_rl_llm.rewards.rules import ExactReward, FormatReward, LengthReward

REWARDS: Mapping[str, Callable[..., RewardFn]] = {
    "boxed": BoxedReward,
    "exact": ExactReward,
    "format": FormatReward,
    "length": LengthReward,
    "math": MathReward,
    "numeric": NumericReward,
}

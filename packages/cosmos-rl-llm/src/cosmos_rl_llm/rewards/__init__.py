"""Shipped rewards by name. Each is a strict model of its options and is called with a group.

    reward = REWARDS["numeric"](tolerance=0.01)
    values = reward(group)                          # one float per rollout

The reference answer is `group.prompt.row["answer"]`: data.answer_column, cut out by data.answer_pattern. Pictures and
videos of the prompt are in `rollout.media`: "image" uint8 [H, W, 3], "image_1", ..., "video" uint8 [T, H, W, 3].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cosmos_rl_core.interfaces import RewardFn
from cosmos_rl_llm.rewards.code import CodeReward
from cosmos_rl_llm.rewards.judge import JudgeReward
from cosmos_rl_llm.rewards.math import BoxedReward, MathReward, NumericReward
from cosmos_rl_llm.rewards.places import IouReward, PointReward
from cosmos_rl_llm.rewards.reward_model import RewardModelReward
from cosmos_rl_llm.rewards.rules import ExactReward, FormatReward, LengthReward, MultipleChoiceReward

REWARDS: Mapping[str, Callable[..., RewardFn]] = {
    "boxed": BoxedReward,
    "code": CodeReward,
    "exact": ExactReward,
    "format": FormatReward,
    "iou": IouReward,
    "judge": JudgeReward,
    "length": LengthReward,
    "math": MathReward,
    "multiple_choice": MultipleChoiceReward,
    "numeric": NumericReward,
    "point": PointReward,
    "reward_model": RewardModelReward,
}

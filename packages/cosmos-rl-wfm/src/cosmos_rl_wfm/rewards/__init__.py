"""Shipped rewards by name. Each is a strict model of its options and is called with a group.

    reward = REWARDS["speed"](floor=0.05)
    values = reward(group)                          # one float per rollout

A clip is `rollout.media["video"]`, uint8 [F, H, W, 3]; texts come from the group's row. Torch and transformers are
imported when a reward that needs them scores its first group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cosmos_rl_core.interfaces import RewardFn
from cosmos_rl_wfm.rewards.aesthetic import AestheticReward
from cosmos_rl_wfm.rewards.judges import ClipScoreReward, VlmJudgeReward
from cosmos_rl_wfm.rewards.ocr import OcrReward
from cosmos_rl_wfm.rewards.pixels import (
    BrightnessReward,
    ContrastReward,
    DiversityReward,
    FlickerReward,
    MotionReward,
    SaturationReward,
    SharpnessReward,
    SpeedReward,
)

REWARDS: Mapping[str, Callable[..., RewardFn]] = {
    "aesthetic": AestheticReward,
    "brightness": BrightnessReward,
    "clip_score": ClipScoreReward,
    "contrast": ContrastReward,
    "diversity": DiversityReward,
    "flicker": FlickerReward,
    "motion": MotionReward,
    "ocr": OcrReward,
    "saturation": SaturationReward,
    "sharpness": SharpnessReward,
    "speed": SpeedReward,
    "vlm_judge": VlmJudgeReward,
}

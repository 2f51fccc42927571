"""The response has the shape that was asked for."""

from __future__ import annotations

import re

from pydantic import field_validator

from cosmos_rl_core.config.base import Strict
from cosmos_rl_core.types import RolloutGroup


class FormatReward(Strict):
    """1 where the regular expression matches the response, else 0."""

    pattern: str
    """Python regular expression; "." matches line ends too: "<think>.*</think>.*<answer>.*</answer>"."""
    whole: bool = False
    """The whole response must match, not a part of it."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern

    def __call__(self, group: RolloutGroup) -> list[float]:
        pattern = re.compile(self.pattern, re.DOTALL)
        match = pattern.fullmatch if self.whole else pattern.search
        return [float(match(rollout.text.strip()) is not None) for rollout in group.rollouts]

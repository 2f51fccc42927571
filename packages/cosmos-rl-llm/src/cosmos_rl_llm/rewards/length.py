"""The response is neither too short nor too long."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from cosmos_rl_core.config.base import Strict
from cosmos_rl_core.types import RolloutGroup


class LengthReward(Strict):
    """1 between `min_terms` and `max_terms`; outside it falls along a line to 0 over `slack_terms`.

    With `num` generated tokens and `outside = max(min_terms - num, num - max_terms, 0)`, the reward is
    max(0, 1 - outside / slack_terms).
    """

    min_terms: int = Field(default=0, ge=0)
    """Fewest tokens that earn the full reward."""
    max_terms: int = Field(ge=0)
    """Most tokens that earn the full reward."""
    slack_terms: int = Field(default=1, ge=1)
    """This many tokens outside the range earn nothing."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min_terms > self.max_terms:
            raise ValueError(f"min_terms = {self.min_terms} is above max_terms = {self.max_terms}")
        return self

    def __call__(self, group: RolloutGroup) -> list[float]:
        return [self._score(rollout.num_terms) for rollout in group.rollouts]

    def _score(self, num: int) -> float:
        outside = max(self.min_terms - num, num - self.max_terms, 0)
        return max(0.0, 1.0 - outside / self.slack_terms)

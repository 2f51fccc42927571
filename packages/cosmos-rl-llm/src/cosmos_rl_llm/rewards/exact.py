"""The response is the reference answer, letter by letter."""

from __future__ import annotations

from cosmos_rl_core.config.base import Strict
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_llm.rewards.reference import reference_answer


class ExactReward(Strict):
    """1 where the response equals the reference answer, else 0. Runs of white space count as one blank."""

    ignore_case: bool = False
    """Compare without regard to upper and lower case."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        wanted = self._normal(reference_answer(group))
        return [float(self._normal(rollout.text) == wanted) for rollout in group.rollouts]

    def _normal(self, text: str) -> str:
        joined = " ".join(text.split())
        return joined.casefold() if self.ignore_case else joined

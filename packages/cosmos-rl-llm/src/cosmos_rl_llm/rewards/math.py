"""Rewards for correct answers: as mathematics, as a number, or inside a box."""

from __future__ import annotations

from pydantic import Field

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_llm.rewards.answers import (
    as_number,
    close,
    equivalent,
    final_answer,
    last_boxed,
    last_number,
    marked_answer,
)
from cosmos_rl_llm.rewards.rules import reference_answer


class MathReward(Strict):
    """1 if the response's final answer is equivalent to the reference, else 0.

    The final answer is the last \\boxed{...}, or the text after "####", "answer is" or "Answer:", or the last
    formula or number. Numbers are compared as numbers, the rest by `math-verify`.
    """

    tolerance: float = Field(default=1e-6, ge=0)
    """Allowed relative difference between two numbers."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        wanted = _marked_or_whole(reference_answer(group))
        answers = [final_answer(rollout.text) for rollout in group.rollouts]
        return [_score(answer, wanted, tolerance=self.tolerance) for answer in answers]


class BoxedReward(Strict):
    """1 if the last \\boxed{...} of the response is equivalent to the reference; 0 without a box."""

    tolerance: float = Field(default=1e-6, ge=0)
    """Allowed relative difference between two numbers."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        wanted = _marked_or_whole(reference_answer(group))
        answers = [last_boxed(rollout.text) for rollout in group.rollouts]
        return [_score(answer, wanted, tolerance=self.tolerance) for answer in answers]


class NumericReward(Strict):
    """1 if the last number in the response equals the reference, else 0."""

    tolerance: float = Field(default=1e-6, ge=0)
    """Allowed relative difference."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        reference = _marked_or_whole(reference_answer(group))
        wanted = as_number(reference)
        if wanted is None:
            raise UserError(f"the reference answer {reference[:80]!r} is not a number; see data.answer_pattern")
        numbers = [as_number(last_number(rollout.text) or "") for rollout in group.rollouts]
        return [float(n is not None and close(n, wanted, tolerance=self.tolerance)) for n in numbers]


def _marked_or_whole(reference: str) -> str:
    """The marked answer of a reference that is a whole solution; else the reference itself."""
    marked = marked_answer(reference)
    return reference.strip() if marked is None else marked


def _score(answer: str | None, wanted: str, *, tolerance: float) -> float:
    return float(answer is not None and equivalent(answer, wanted, tolerance=tolerance))

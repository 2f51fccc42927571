"""Rule-based rewards of a response: equality with the reference answer, choice, format, length."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup


class ExactReward(Strict):
    """1 if the response equals the reference answer, else 0. Runs of white space count as one blank."""

    ignore_case: bool = False
    """Ignore case."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        wanted = self._normal(reference_answer(group))
        return [float(self._normal(rollout.text) == wanted) for rollout in group.rollouts]

    def _normal(self, text: str) -> str:
        joined = " ".join(text.split())
        return joined.casefold() if self.ignore_case else joined


class FormatReward(Strict):
    """1 if the regular expression matches the response, else 0."""

    pattern: str = r"<think>.*?</think>\s*<answer>.*?</answer>"
    """Python regular expression; "." also matches line ends. Not set: the format of Cosmos-Reason."""
    whole: bool = False
    """Match the whole response instead of a part of it."""

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


class MultipleChoiceReward(Strict):
    """1 if the response has the letter of the reference answer, else 0; 0 without a letter, or with several.

    Read are the last <answer>...</answer>, or else the whole response: "B", "(B)", "B. a cup", "the answer is B".
    """

    letters: str = Field(default="ABCDEFGHIJ", pattern="^[A-Z]+$")
    """Letters of the options."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        reference = reference_answer(group)
        wanted = self._letter(reference)
        if wanted is None:
            raise UserError(
                f"the reference answer {reference[:80]!r} has no letter of an option; see data.answer_column"
            )
        return [float(self._letter(tagged(rollout.text)) == wanted) for rollout in group.rollouts]

    def _letter(self, text: str) -> str | None:
        one = f"[{self.letters}]"
        alone = re.fullmatch(rf"\W*({one})(?:[).:,].*|\W*)", text.strip(), re.DOTALL | re.IGNORECASE)
        if alone is not None:
            return alone[1].upper()
        named = re.findall(rf"(?i:answer|option|choice)(?i:\s+is)?\W*?({one})\b|\(({one})\)", text)
        found = {first or second for first, second in named}
        return found.pop() if len(found) == 1 else None


class LengthReward(Strict):
    """1 between `min_tokens` and `max_tokens`; outside it falls linearly to 0 over `slack_tokens`.

    With `num` generated tokens and `outside = max(min_tokens - num, num - max_tokens, 0)`, the reward is
    max(0, 1 - outside / slack_tokens).
    """

    min_tokens: int = Field(default=0, ge=0)
    """Minimum tokens for the full reward."""
    max_tokens: int = Field(ge=0)
    """Maximum tokens for the full reward."""
    slack_tokens: int = Field(default=1, ge=1)
    """Distance from the range, in tokens, at which the reward is 0."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens} is above max_tokens = {self.max_tokens}")
        return self

    def __call__(self, group: RolloutGroup) -> list[float]:
        return [self._score(rollout.num_terms) for rollout in group.rollouts]

    def _score(self, num: int) -> float:
        outside = max(self.min_tokens - num, num - self.max_tokens, 0)
        return max(0.0, 1.0 - outside / self.slack_tokens)


_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def tagged(text: str) -> str:
    """Return the last <answer>...</answer> of a response, without its tags, or the whole response."""
    answers = _ANSWER.findall(text)
    return answers[-1] if answers else text


def reference_answer(group: RolloutGroup) -> str:
    """Return the row's answer.

    Raises:
        UserError: the row has none.
    """
    answer = group.prompt.row.get("answer")
    if not isinstance(answer, str) or not answer.strip():
        raise UserError("the row has no reference answer; name its column in data.answer_column")
    return answer

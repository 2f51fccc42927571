"""Rule-based rewards of a response: equality with the reference answer, choice, format, length."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Self

from pydantic import Field, field_validator, model_validator

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.reward.cpu_limit import within
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_llm.rewards.thoughts import answer_part, last_between, opened_thought


class ExactReward(Strict):
    """1 if the response equals the reference answer, else 0. Runs of white space count as one blank."""

    ignore_case: bool = False
    """Ignore case."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        expected = self._normal(reference_answer(group))
        return [float(self._normal(rollout.text) == expected) for rollout in group.rollouts]

    def _normal(self, text: str) -> str:
        joined = " ".join(text.split())
        return joined.casefold() if self.ignore_case else joined


class FormatReward(Strict):
    """1 if the regular expression matches the response, else 0.

    Where the prompt opens the thought, the response with that mark before it may match instead.
    """

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

    @property
    def own_process(self) -> bool:
        return self.pattern != _COSMOS_REASON

    def __call__(self, group: RolloutGroup) -> list[float]:
        opening = opened_thought(group)
        texts = [rollout.text.strip() for rollout in group.rollouts]
        return [float(self._matches(text) or (bool(opening) and self._matches(opening + text))) for text in texts]

    def _matches(self, text: str) -> bool:
        if not self.own_process:
            return _is_cosmos_reason(text, whole=self.whole)
        pattern = re.compile(self.pattern, re.DOTALL)
        match = pattern.fullmatch if self.whole else pattern.search
        return within(_SEARCH_S, lambda: match(text) is not None, otherwise=False)


_COSMOS_REASON = FormatReward.model_fields["pattern"].default
_BETWEEN = re.compile(r"</think>\s*<answer>")
_SEARCH_S = 1.0
"""Maximum time of the processor for one search; then the response does not match."""


def _is_cosmos_reason(text: str, *, whole: bool) -> bool:
    """Whether the default pattern matches: its first occurrences in order, in linear time.

    Each ".*?" of the pattern may start another search at every mark, in a response that repeats them.
    """
    start = 0 if whole and text.startswith("<think>") else -1 if whole else text.find("<think>")
    between = _BETWEEN.search(text, start + len("<think>")) if start >= 0 else None
    if between is None:
        return False
    return text.endswith("</answer>", between.end()) if whole else text.find("</answer>", between.end()) >= 0


class MultipleChoiceReward(Strict):
    """1 if the response names the letter of the reference answer and no other, else 0.

    Read are the last <answer>...</answer>, or else all that follows the thought: "B", "(B)", "B. a cup", "I think B",
    "the answer is B". A response with the words of the reference answer has its letter.
    """

    letters: str = Field(default="ABCDEFGHIJ", pattern="^[A-Z]+$")
    """Letters of the options."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        reference = " ".join(reference_answer(group).split())
        letter = self._first(reference) or self._only(reference)
        if letter is None:
            raise UserError(
                f"the reference answer {reference[:80]!r} has no letter of an option; see data.answer_column"
            )
        answers = [tagged(answer_part(group, rollout)).strip() for rollout in group.rollouts]
        return [float(" ".join(each.split()) == reference or self._only(each) == letter) for each in answers]

    def _first(self, text: str) -> str | None:
        """The letter that a reference answer begins with; its words may have others."""
        match = re.match(rf"\W*([{self.letters}])(?:[).:,]|\W*$)", text, re.IGNORECASE)
        return match and match[1].upper()

    def _only(self, text: str) -> str | None:
        """The letter that a text names, unless it names several."""
        only = None
        for letter in self._named(text[-_LONGEST_TEXT:]):
            if only not in (None, letter.upper()):
                return None
            only = letter.upper()
        return only

    def _named(self, text: str) -> Iterator[str]:
        """Letters that stand for an option: "A" and "I" are words too, and so is a small letter."""
        one = f"[{self.letters}]"
        for match in re.finditer(rf"(?<![\w'’])({one})(?![\w'’])", text, re.IGNORECASE):
            first, end, letter = max(0, match.start() - _NEAR), match.end(), match[1]
            before, after = text[first : match.start()], text[end : end + _NEAR]
            ends = _ENDS.match(after) is not None
            if _NAMES.search(before):
                named = letter.isupper() or ends
            elif letter.islower():
                named = _BRACKET.match(after) is not None or (ends and not first and not before.strip(_MARKS))
            else:
                named = _BEFORE.search(before) is not None and (ends or letter not in "AI")
            if named:
                yield letter


_LONGEST_TEXT = 20_000
"""Characters searched for a letter, from the end."""
_NEAR = 100
"""Characters before and after a letter that decide whether it is one of an option."""
_MARKS = " \t\n*_\"'`(["
_NAMES = re.compile(r"\b(?:answer|option|choice|letter)s?(?:\s+is|\s+are)?\W*$", re.IGNORECASE)
"""Text before a letter that makes it one of an option."""
_BEFORE = re.compile(
    r"(?:^|[^\w\s'’]\s*|\n\s*|\b(?:or|and|nor|either|both|also|maybe|perhaps|possibly|probably|definitely|is|it's|be|are|think|"
    r"choose|pick|select|say|guess|with|so|then|thus|hence|therefore|[A-Za-z])\s+)$",
    re.IGNORECASE,
)
"""Text before a capital letter that may be one of an option: the beginning, a mark, another letter, or such a word."""
_ENDS = re.compile(r"\W*$|[).:,;/\]*]|\s*(?:\n|[&+|/-]|(?:or|and|nor|because|since|as)\b)", re.IGNORECASE)
"""Text after a letter that ends the name of an option."""
_BRACKET = re.compile(r"[)\]]")


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


def tagged(text: str) -> str:
    """Return the last <answer>...</answer> of a response, without its tags, or the whole response."""
    answer = last_between(text, "<answer>", "</answer>")
    return text if answer is None else answer


def reference_answer(group: RolloutGroup) -> str:
    """Return the row's answer.

    Raises:
        UserError: the row has none.
    """
    answer = group.prompt.row.get("answer")
    if not isinstance(answer, str) or not answer.strip():
        raise UserError("the row has no reference answer; name its column in data.answer_column")
    return answer

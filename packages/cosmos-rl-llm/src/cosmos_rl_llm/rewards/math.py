"""Rewards for correct answers: as mathematics, as a number, or inside a box.

Two answers are compared by `math-verify`, in a process of its own and for a limited time of the processor, as an answer
may be an expression whose value no computer finds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import cache
from typing import ClassVar

from pydantic import Field

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.reward.cpu_limit import within
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_llm.rewards.numbers import as_number, close, last_number, plain
from cosmos_rl_llm.rewards.rules import reference_answer
from cosmos_rl_llm.rewards.thoughts import answer_part

LONGEST_TEXT = 20_000
"""Characters searched for an answer, from the end."""
LONGEST_EXPRESSION = 2_000
"""Maximum characters of an expression that is compared."""
COMPARISON_S = 1.0
"""Maximum time of the processor for one comparison; then the answer counts as another one."""

_BOX = re.compile(r"\\boxed\s*\{|[{}]")
_AFTER_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_PHRASE = re.compile(r"\banswer\b", re.IGNORECASE)
_IS = re.compile(r"\s*(?:is\b)?\s*:?\s*", re.IGNORECASE)
_IN_DOLLARS = re.compile(r"\$([^$\n]{1,200})\$")
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_POWER_OF_TEN = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w)")
_WORDS = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")
_WORD_LETTERS = 4
"""Letters of a reference's longest word from which it is no product: "xyz" equals "zyx", "listen" not "silent"."""


def last_boxed(text: str) -> str | None:
    """Return the content of the last closed \\boxed{...}, or None."""
    text = text[-LONGEST_TEXT:]
    opened: list[tuple[int, bool]] = []
    last = (-1, -1)
    for mark in _BOX.finditer(text):
        if mark[0] != "}":
            opened.append((mark.end(), mark[0] != "{"))
        elif opened:
            start, is_box = opened.pop()
            last = max(last, (start, mark.start())) if is_box else last
    return text[slice(*last)].strip() if last[0] >= 0 else None


def marked_answer(text: str) -> str | None:
    """Return the answer marked by \\boxed{...} or "####", or None."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    hashes = _AFTER_HASHES.findall(text[-LONGEST_TEXT:])
    return hashes[-1].strip() if hashes else None


def final_answer(text: str) -> str | None:
    """Return the marked answer, else the text after "answer is", else the last $...$, else the last number."""
    marked = marked_answer(text)
    if marked is not None:
        return marked
    tail = text[-LONGEST_TEXT:]
    phrase = _after_phrase(tail)
    for candidates in (_IN_DOLLARS.findall(phrase), [phrase] if phrase else [], _IN_DOLLARS.findall(tail)):
        if candidates:
            return candidates[-1].strip().rstrip(".")
    return last_number(tail)


def _after_phrase(text: str) -> str:
    """Return the rest of the line after the last "answer" that something follows."""
    for phrase in reversed(list(_PHRASE.finditer(text))):
        between = _IS.match(text, phrase.end())
        assert between is not None, "it matches nothing too"
        line = text[between.end() :].partition("\n")[0]
        if line.strip(" .*"):
            return line
    return ""


def equivalent(answer: str, reference: str, *, tolerance: float = 0.0) -> bool:
    """Whether two answers mean the same: as words, or as mathematics through `math-verify`.

    tolerance: relative difference of two numbers that are equal too.
    """
    answer, reference = _readable(answer), _readable(reference)
    if answer == reference:
        return True
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(reference) and not tolerance:
        return int(answer) == int(reference)
    if _WORDS.fullmatch(reference) and max(map(len, reference.split())) >= _WORD_LETTERS:
        return answer.casefold() == reference.casefold()
    if tolerance:
        a, b = as_number(answer), as_number(reference)
        if a is not None and b is not None and close(a, b, tolerance=tolerance):
            return True
    if max(len(answer), len(reference)) > LONGEST_EXPRESSION:
        return False
    return _same_mathematics(answer, reference)


def _readable(text: str) -> str:
    """Return the text without what `math-verify` does not read: other minus signs, "1e5", the back-slash of "50\\%"."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", plain(text))
    text = " ".join(text.strip().strip("$").strip().rstrip(".").split())
    return _POWER_OF_TEN.sub(lambda match: rf"{match[1]}\times 10^{{{int(match[2])}}}", text)


def _same_mathematics(answer: str, reference: str) -> bool:
    _load_library()
    return within(COMPARISON_S, lambda: _verified(answer, reference), otherwise=False)


@cache
def _load_library() -> None:
    """Import math-verify and compare once, without a limit: sympy imports and caches for more than a second."""
    # It warns once that its timeouts are off; they are of whole seconds, and of a clock that other processes delay.
    for module in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(module).setLevel(logging.ERROR)
    _verified("(x+1)^2", r"x^2+\frac{2}{1}x+1")


def _verified(answer: str, reference: str) -> bool:
    from math_verify import parse, verify

    gold = parse(f"${reference}$", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    target = parse(f"${answer}$", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return verify(gold, target, timeout_seconds=None)


class _Equivalence(Strict):
    """Options of answers that `math-verify` compares."""

    own_process: ClassVar[bool] = True

    tolerance: float = Field(default=0.0, ge=0)
    """Relative difference of two numbers that are equal too; `math-verify` compares decimals to six places."""


class MathReward(_Equivalence):
    """1 if the response's final answer is equivalent to the reference, else 0.

    The final answer is the last \\boxed{...}, or the text after "####", "answer is" or "Answer:", or the last
    formula or number. It is compared by `math-verify`. A thought that was cut has no answer.
    """

    def __call__(self, group: RolloutGroup) -> list[float]:
        return _scores(group, [final_answer(answer_part(group, each)) for each in group.rollouts], self.tolerance)


class BoxedReward(_Equivalence):
    """1 if the last \\boxed{...} of the response is equivalent to the reference; 0 without a box."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        return _scores(group, [last_boxed(answer_part(group, each)) for each in group.rollouts], self.tolerance)


class NumericReward(Strict):
    """1 if the last number in the response equals the reference, else 0."""

    tolerance: float | None = Field(default=None, ge=0)
    """Allowed relative difference. Not set: 1e-6, and none between two integers."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        reference = _marked_or_whole(reference_answer(group))
        expected = as_number(reference)
        if expected is None:
            raise UserError(f"the reference answer {reference[:80]!r} is not a number; see data.answer_pattern")
        texts = [last_number(answer_part(group, rollout)[-LONGEST_TEXT:]) for rollout in group.rollouts]
        numbers = [as_number(text or "") for text in texts]
        return [float(n is not None and close(n, expected, tolerance=self.tolerance)) for n in numbers]


def _marked_or_whole(reference: str) -> str:
    """The marked answer of a reference that is a whole solution; else the reference itself."""
    marked = marked_answer(reference)
    return reference.strip() if marked is None else marked


def _scores(group: RolloutGroup, answers: Sequence[str | None], tolerance: float) -> list[float]:
    reference = _marked_or_whole(reference_answer(group))
    verdicts: dict[str | None, bool] = {None: False}
    for answer in answers:
        if answer is not None and answer not in verdicts:
            verdicts[answer] = equivalent(answer, reference, tolerance=tolerance)
    return [float(verdicts[answer]) for answer in answers]

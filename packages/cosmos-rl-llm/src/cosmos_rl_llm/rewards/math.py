"""Rewards for correct answers: as mathematics, as a number, or inside a box.

Rewards run in threads, where the timeouts of `math-verify` (SIGALRM) cannot work. They are turned off, and costly
expressions are excluded from the symbolic comparison: long ones, towers of powers, big factorials, sums and integrals.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction

from pydantic import Field

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_llm.rewards.rules import reference_answer

LONGEST_TEXT = 20_000
"""Characters searched for an answer, from the end."""
LONGEST_EXPRESSION = 200
"""Maximum characters of an expression in the symbolic comparison."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER_IN_TEXT = re.compile(rf"(?:(?<![\w)\]}}])-\s?)?\$?(?:{_DIGITS})(?:/\d+(?![\d/]))?")
_DECIMAL = re.compile(r"[+-]?(?:\d{1,100}(?:\.\d{0,100})?|\.\d{1,100})(?:[eE][+-]?\d{1,3})?")
_RATIO = re.compile(r"([+-]?\d{1,100})/(\d{1,100})")
_LATEX_RATIO = re.compile(r"([+-]?)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_AFTER_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_AFTER_PHRASE = re.compile(r"\banswer\b(?:\s+is)?\s*:?\s*([^\n]+)", re.IGNORECASE)
_IN_DOLLARS = re.compile(r"\$([^$\n]{1,200})\$")
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s-]+[^\W\d_]+)*")
_POWER = r"(?:\^|\*\*)\s*"
_COSTLY = re.compile(
    rf"{_POWER}[{{(]?\s*-?\d{{4,}}"  # 2^{100000}
    rf"|{_POWER}(?:[{{(][^}})]*|\w+\s*){_POWER}"  # 9^9^9, 9^{9^9}
    rf"|(?:\^[^()]*\)\s*){{2}}\^"  # ((9^9)^9)^9
    rf"|{_POWER}[{{(][^}})]*(?:[!*(]|\\cdot|\\times)|{_POWER}\w+\s*!"  # 2^{30!}, 2^{99*99}
    r"|\d{3,}\s*!|[)}!]\s*!"  # 999!, (9!)!
    r"|\\(?:sum|i*nt|prod|lim|[dt]?binom|frac\{d)|\d{40,}"
)


def last_boxed(text: str) -> str | None:
    """Return the content of the last closed \\boxed{...}, or None."""
    text = text[-LONGEST_TEXT:]
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth = 0
        for place in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : place].strip()
        end = start
    return None


def last_number(text: str) -> str | None:
    """Return the last number written in digits ("-1,234.5", "$20", "3/4"), or None."""
    found = _NUMBER_IN_TEXT.findall(text[-LONGEST_TEXT:])
    return found[-1] if found else None


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
    phrases = _AFTER_PHRASE.findall(tail)
    for candidates in (
        _IN_DOLLARS.findall(phrases[-1]) if phrases else [],
        phrases,
        _IN_DOLLARS.findall(tail),
    ):
        if candidates:
            return candidates[-1].strip().rstrip(".")
    return last_number(tail)


def as_number(text: str) -> Fraction | None:
    """Parse one number in common notation: "1,234.50", "$20", "50%", "\\frac{3}{4}"; None for other text."""
    plain = text.strip().strip("$").strip()
    for mark in ("\\$", "$", "\\%", "%", "\\!", "{,}", "\\,", " "):
        plain = plain.replace(mark, "," if mark == "{,}" else "")
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", plain.rstrip("."))
    plain = _LATEX_RATIO.sub(r"\1\2/\3", plain)
    ratio = _RATIO.fullmatch(plain)
    if ratio:
        return Fraction(int(ratio[1]), int(ratio[2])) if int(ratio[2]) else None
    return Fraction(plain) if _DECIMAL.fullmatch(plain) else None


def close(a: Fraction, b: Fraction, *, tolerance: float) -> bool:
    """Whether |a - b| <= tolerance * max(1, |b|)."""
    return abs(a - b) <= Fraction(tolerance) * max(abs(b), 1)


def equivalent(answer: str, reference: str, *, tolerance: float = 1e-6) -> bool:
    """Whether two answers mean the same: as strings, as numbers, or as mathematics through `math-verify`."""
    if _normal(answer) == _normal(reference):
        return True
    a, b = as_number(answer), as_number(reference)
    if a is not None and b is not None:
        return close(a, b, tolerance=tolerance)
    # math-verify reads a word as a product of its letters: alone it would find "listen" and "silent" equal.
    if _WORDS.fullmatch(_normal(reference)) or is_costly(answer) or is_costly(reference):
        return False
    return _same_mathematics(answer, reference)


def is_costly(expression: str) -> bool:
    """Whether evaluating the expression could take seconds or never end."""
    return len(expression) > LONGEST_EXPRESSION or _COSTLY.search(expression) is not None


def _normal(text: str) -> str:
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return " ".join(text.strip().strip("$").strip().rstrip(".").split()).casefold()


def _same_mathematics(answer: str, reference: str) -> bool:
    from math_verify import (  # sympy takes a second to import, at the first answer that is not a plain number
        parse,
        verify,
    )

    # It warns once that its timeouts are off, which they must be outside the main thread.
    for module in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(module).setLevel(logging.ERROR)
    gold = parse(f"${reference.strip('$')}$", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    target = parse(f"${answer.strip('$')}$", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return verify(gold, target, timeout_seconds=None)


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

"""Numbers in common notation: "-1,234.5", "$20", "50%", "3/4", "2 1/2", "2\\frac{1}{2}", "1e5", "1.5 \\times 10^3"."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

DEFAULT_TOLERANCE = 1e-6
_MOST_DIGITS = 100
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_BRACES = r"\{{\s*(?P<{0}>\d+)\s*\}}|(?P<{0}_digit>\d)"
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}])[-+]\s?)?\$?(?:"
    rf"(?:(?P<whole>\d+)\s*)?\\frac\s*(?:{_BRACES.format('over')})\s*(?:{_BRACES.format('under')})"
    r"|(?:(?P<text_whole>\d+)\s+)?(?P<text_over>\d+)/(?P<text_under>\d+)(?![\d/])"
    rf"|(?P<decimal>{_DIGITS})"
    r"(?:[eE](?P<exponent>[-+]?\d{1,3})(?!\w)"
    r"|\s*(?:\\times|\\cdot|×|\*)\s*10\s*(?:\^|\*\*)\s*\{?\s*(?P<power>-?\d{1,3})\s*\}?)?"
    r")(?P<percent>\s?%)?"
)
_SEPARATOR = re.compile(r"(?<=\d)(?:\\[,!;]|\{,\}|[\u202f\xa0])(?=\d{3}(?!\d))")
_MINUS = str.maketrans({"\N{MINUS SIGN}": "-", "\N{SMALL HYPHEN-MINUS}": "-", "\N{FULLWIDTH HYPHEN-MINUS}": "-"})


@dataclass(frozen=True, slots=True)
class Number:
    """A number that was read."""

    value: Fraction
    """Of "50%": 50."""
    is_percent: bool = False


def plain(text: str) -> str:
    """Return the text with one minus, ASCII digits, \\frac, unescaped $ and %, and no separators but commas."""
    if not text.isascii():
        text = "".join(str(unicodedata.digit(each)) if each.isdecimal() else each for each in text.translate(_MINUS))
    text = re.sub(r"\\([$%])", r"\1", _SEPARATOR.sub("", text))
    return text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def last_number(text: str) -> str | None:
    """Return the text of the last number, or None."""
    numbers = [match[0] for match in _NUMBER.finditer(plain(text))]
    return numbers[-1].strip() if numbers else None


def as_number(text: str) -> Number | None:
    """Return the number that a text is, or None for other text."""
    bare = plain(text).strip().strip("$").strip().rstrip(".")
    match = _NUMBER.fullmatch(bare)
    if match is None or len(bare) > 3 * _MOST_DIGITS:
        return None
    parts = {
        name.removeprefix("text_").removesuffix("_digit"): text for name, text in match.groupdict().items() if text
    }
    if any(len(part) > _MOST_DIGITS for part in parts.values()):
        return None
    if "under" in parts:
        if not int(parts["under"]):
            return None
        value = int(parts.get("whole", "0")) + Fraction(int(parts["over"]), int(parts["under"]))
    else:
        value = Fraction(parts["decimal"].replace(",", ""))
        value *= Fraction(10) ** int(parts.get("exponent", parts.get("power", "0")))
    sign = -1 if "-" in parts.get("sign", "") else 1
    return Number(sign * value, "percent" in parts)


def close(a: Number, b: Number, *, tolerance: float | None) -> bool:
    """Whether |a - b| <= tolerance * max(1, |b|). Both "50" and "0.5" are close to "50%".

    tolerance: None is DEFAULT_TOLERANCE, and 0 between two integers.
    """
    if tolerance is None:
        tolerance = 0.0 if a.value.denominator == b.value.denominator == 1 else DEFAULT_TOLERANCE
    pairs = [(a.value, b.value)]
    if a.is_percent != b.is_percent:
        pairs.append((a.value / 100, b.value) if a.is_percent else (a.value, b.value / 100))
    return any(abs(x - y) <= Fraction(tolerance) * max(abs(y), 1) for x, y in pairs)

"""Lines of a diagnosis: a level, a name, an observation and a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

Level = Literal["ok", "note", "bad"]


class Check(NamedTuple):
    """One line."""

    level: Level
    """note: works, with a limit that may matter. bad: runs fail, or are slow, because of it."""
    name: str
    text: str
    fix: str = ""
    """The remedy, for a note or a bad line."""


def render(checks: Sequence[Check]) -> str:
    """Return the lines as a table, each with its remedy below it."""
    from cosmos_rl_core.observe.console import table  # rich, which workers with a check of their own do not need

    rows = []
    for check in checks:
        first, *rest = check.text.splitlines() or [""]
        rows.append((check.level, check.name, first))
        rows += [("", "", line) for line in rest]  # the end of a log
        if check.fix:
            rows.append(("", "", f"fix: {check.fix}"))
    return table(rows)


def is_bad(checks: Iterable[Check]) -> bool:
    """Return whether any line is bad."""
    return any(check.level == "bad" for check in checks)


def as_rows(checks: Iterable[Check]) -> list[dict[str, Any]]:
    return [check._asdict() for check in checks]

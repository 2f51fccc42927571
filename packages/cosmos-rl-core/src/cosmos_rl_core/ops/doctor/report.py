"""Lines of a diagnosis: a level, a name, an observation and a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cosmos_rl_core.interfaces import Check


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

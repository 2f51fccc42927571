"""The meaning of each metric of metrics.jsonl and eval.jsonl: metrics.toml as values.

    metric("reward/numeric").meaning    # "Mean of one reward function, before its weight"
    metric("my_own")                    # None

docs/metrics.md and the notes of the dashboard are made from it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from pydantic import Field

from cosmos_rl_core.settings.base import Strict

FILE = Path(__file__).with_suffix(".toml")


class Metric(Strict):
    """One metric, or all whose names differ where `name` has a `*`."""

    name: str
    section: str
    """Such as "Learning": what the metric is about."""
    meaning: str = Field(min_length=1)
    unit: str = ""
    """Empty: a plain number."""
    healthy: str = ""
    """The range to expect. Empty: no range is better than another."""
    act: str = ""
    """Changes where the metric is outside of `healthy`, with the recipe's keys in backticks."""
    where: str = ""
    """The runs that have it, such as "RL". Empty: all."""


@cache
def all_metrics() -> Sequence[Metric]:
    """Return the metrics in the order of the page."""
    sections = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return tuple(
        Metric(name=name, section=section, **row) for section, rows in sections.items() for name, row in rows.items()
    )


def metric(name: str) -> Metric | None:
    """Return the entry of a metric, its own before that of a family; None for a metric of the user's own."""
    exact = {each.name: each for each in all_metrics()}
    families = (each for each in all_metrics() if each.name.endswith("*") and name.startswith(each.name[:-1]))
    return exact.get(name) or next(families, None)


def notes(names: Sequence[str]) -> dict[str, str]:
    """Return the meaning, and the range to expect, of those metrics that have an entry."""
    entries = {name: metric(name) for name in names}
    return {name: _note(each) for name, each in entries.items() if each is not None}


def _note(of: Metric) -> str:
    text = f"{of.meaning}. Healthy: {of.healthy}." if of.healthy else f"{of.meaning}."
    return text.replace("`", "")

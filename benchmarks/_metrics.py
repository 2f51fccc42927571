"""The output of every benchmark: a table, and benchmarks/out/NAME.json."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

OUT = Path(__file__).resolve().parent / "out"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number."""

    metric: str
    value: float
    unit: str
    target: str = ""
    """"<= 5" or ">= 20000"; empty for a number that is only reported."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target. A number that could not be measured misses it."""
        if not self.target:
            return None
        sign, bound = self.target.split()
        if sign not in ("<=", ">="):
            raise ValueError(f"{self.metric}: target {self.target!r} should read '<= number' or '>= number'")
        return self.value <= float(bound) if sign == "<=" else self.value >= float(bound)


def report(name: str, metrics: Sequence[Figure]) -> bool:
    """Print the table, write benchmarks/out/NAME.json, and return whether every target is met."""
    table = Table(title=name, title_justify="left")
    for column in ("metric", "value", "unit", "target", "met"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for metric in metrics:
        verdict = {None: "", True: "yes", False: "NO"}[metric.met]
        table.add_row(metric.metric, _readable(metric.value), metric.unit, metric.target, verdict)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    for note in dict.fromkeys(metric.note for metric in metrics if metric.note):
        console.print(f"- {note}", style="dim", highlight=False)
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{name}.json"
    rows = [{**asdict(metric), "value": _finite(metric.value), "met": metric.met} for metric in metrics]
    path.write_text(json.dumps(rows, indent=2) + "\n")
    return all(metric.met is not False for metric in metrics)


def _readable(value: float) -> str:
    if not math.isfinite(value):
        return "not measured"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

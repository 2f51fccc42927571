"""metrics.jsonl as columns, downsampled to the width of the page."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from cosmos_rl_core.ops.dashboard.lines import GrowingFile, as_object, short

STEP, TIME, TERMS = "step", "time_s", "terms"
AXES = (STEP, TIME, TERMS)
"""Horizontal axes of the curves; `terms` are summed."""


class Curves:
    """The metrics of one run. Memory: eight bytes a value. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._columns: dict[str, array[float]] = {}
        self._lock = RLock()
        self.steps = 0
        """Number of lines."""

    def update(self) -> None:
        """Read the lines that were added."""
        with self._lock:
            lines = self._file.new()
            if self._file.restarted:
                self._columns, self.steps = {}, 0
            for line in lines:
                row = as_object(line)
                if row is not None:
                    self._add(row)

    def _add(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name not in self._columns:
                self._columns[name] = array("d", [np.nan]) * self.steps
            number = value if isinstance(value, int | float) else np.nan
            self._columns[name].append(number)
        self.steps += 1
        for column in self._columns.values():
            if len(column) < self.steps:
                column.append(np.nan)

    @property
    def names(self) -> list[str]:
        return sorted(self._columns)

    def column(self, name: str) -> np.ndarray:
        """Return the values of a metric by line, NaN where it was not measured; [0] for an unknown one."""
        with self._lock:
            return np.array(self._columns.get(name, ()), np.float64)

    def mean(self, name: str, *, last: int = 0, first: int = 0) -> float | None:
        """Return the mean over the last or first lines that have the metric; None without any."""
        column = self.column(name)
        part = column[-last:] if last else column[:first]
        finite = part[np.isfinite(part)]
        return float(finite.mean()) if finite.size else None

    def axis(self, name: str) -> np.ndarray:
        """Return the values of one of AXES, which never fall."""
        column = self.column(name)
        if name == TERMS:
            return np.nancumsum(column)
        if name == TIME and column.size:  # a resumed run counts from its own start
            steps = np.diff(column, prepend=0.0)
            return np.nancumsum(np.where(steps >= 0, steps, column))
        return column

    def points(
        self, *, axis: str, names: Sequence[str], most: int, low: float = -np.inf, high: float = np.inf
    ) -> dict[str, Any]:
        """Return at most `most` points of each metric between two values of the axis.

        Where several lines share a point, it is their mean, with the smallest and the largest value in `low` and
        `high`.
        """
        with self._lock:  # columns of one length
            return self._points(axis=axis, names=names, most=most, low=low, high=high)

    def _points(self, *, axis: str, names: Sequence[str], most: int, low: float, high: float) -> dict[str, Any]:
        x = self.axis(axis)
        inside = np.flatnonzero((x >= low) & (x <= high))
        size = -(-len(inside) // most) if len(inside) else 1
        starts = np.arange(0, len(inside), size)
        result: dict[str, Any] = {"x": _shorten(x[inside][starts]), "size": size, "steps": self.steps, "series": {}}
        for name in names:
            values = self.column(name)[inside] if name in self._columns else np.full(len(inside), np.nan)
            if not np.isfinite(values).any():
                continue
            result["series"][name] = _bucketed(values, starts, size)
        return result


def _bucketed(values: np.ndarray, starts: np.ndarray, size: int) -> dict[str, Any]:
    if size == 1:
        return {"mean": _shorten(values)}
    counts = np.add.reduceat(np.isfinite(values).astype(np.float64), starts)
    sums = np.add.reduceat(np.where(np.isfinite(values), values, 0.0), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums / counts
    low = np.minimum.reduceat(np.where(np.isfinite(values), values, np.inf), starts)
    high = np.maximum.reduceat(np.where(np.isfinite(values), values, -np.inf), starts)
    return {"mean": _shorten(mean), "low": _shorten(low), "high": _shorten(high)}


def _shorten(values: np.ndarray) -> list[float | None]:
    return [short(value) for value in values.tolist()]

"""Many observations, one number a name: what a step reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum


class Reduction(Enum):
    """How the observations of a name become one number."""

    MEAN = "mean"
    """Weighted by count: the mean over all that was counted, however it was split into observations."""
    SUM = "sum"
    MAX = "max"
    MIN = "min"


class Metrics:
    """Collects named observations and reduces them.

        metrics.add("reward", 0.5, count=8)             # the mean of 8 rewards
        metrics.add("staleness_max", 2, reduction=Reduction.MAX)
        step_metrics = metrics.summarise()

    Observations arrive in any order and split; the result is the same up to rounding, and `merge` joins two.
    """

    def __init__(self) -> None:
        self._values: dict[str, _Accumulator] = {}

    def add(self, name: str, value: float, *, count: float = 1, reduction: Reduction = Reduction.MEAN) -> None:
        """Take one observation that stands for `count` of them; a count of 0 is no observation.

        Raises ValueError for a negative count, or where `name` was added with another reduction.
        """
        if not count >= 0:
            raise ValueError(f"metric {name!r}: count must be 0 or more, got {count}")
        self._merge(name, _Accumulator.of(reduction, float(value), float(count)))

    def merge(self, other: Metrics) -> None:
        """Take all observations of another collection, for example of another rank."""
        for name, accumulator in other._values.items():
            self._merge(name, accumulator)

    def summarise(self) -> dict[str, float]:
        """Return one number a name, in the order they first came. A name never observed is absent."""
        return {name: a.result() for name, a in self._values.items() if a.count > 0}

    def _merge(self, name: str, more: _Accumulator) -> None:
        held = self._values.get(name)
        if held is None:
            self._values[name] = more
            return
        if held.reduction is not more.reduction:
            raise ValueError(
                f"metric {name!r} is a {held.reduction.value}, now added as a {more.reduction.value}: "
                "give one of the two another name"
            )
        self._values[name] = held.joined(more)


class _Accumulator:
    """A reduction of what was seen so far; never changed, only joined."""

    __slots__ = ("count", "reduction", "value")

    def __init__(self, reduction: Reduction, value: float, count: float) -> None:
        self.reduction = reduction
        self.value = value
        """MEAN: the weighted sum. Otherwise the result."""
        self.count = count

    @classmethod
    def of(cls, reduction: Reduction, value: float, count: float) -> _Accumulator:
        if reduction is Reduction.MEAN:
            value = value * count if count > 0 else 0.0
        elif count == 0:
            value = {Reduction.SUM: 0.0, Reduction.MAX: -math.inf, Reduction.MIN: math.inf}[reduction]
        return cls(reduction, value, count)

    def joined(self, other: _Accumulator) -> _Accumulator:
        match self.reduction:
            case Reduction.MEAN | Reduction.SUM:
                value = self.value + other.value
            case Reduction.MAX:
                value = _nan_or(max, self.value, other.value)
            case Reduction.MIN:
                value = _nan_or(min, self.value, other.value)
        return _Accumulator(self.reduction, value, self.count + other.count)

    def result(self) -> float:
        return self.value / self.count if self.reduction is Reduction.MEAN else self.value


def _nan_or(choose: Callable[[float, float], float], left: float, right: float) -> float:
    """`max` and `min` that do not hide a NaN."""
    return math.nan if math.isnan(left) or math.isnan(right) else choose(left, right)

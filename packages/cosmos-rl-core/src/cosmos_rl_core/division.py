"""Divides costs into parts of nearly equal sum. Pure arithmetic, the same in every process."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def divide(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Return the items of `costs` in `parts` parts of nearly equal sum, each ascending, costliest part first.

    Karmarkar and Karp's differencing (1982) for several parts: the two partial solutions that are least even are
    joined, heavy parts with light ones. The sums differ by at most the costliest item.
    """
    solutions = [_Solution.of(index, cost, parts) for index, cost in enumerate(costs)] or [_Solution([0.0] * parts)]
    heapq.heapify(solutions)
    while len(solutions) > 1:
        first = heapq.heappop(solutions)
        heapq.heapreplace(solutions, first.joined(solutions[0]))
    return [sorted(members) for members in solutions[0].parts]


class _Solution:
    """Some of the items in parts, heaviest first; the least even solution is the smallest, for the heap."""

    __slots__ = ("order", "parts", "sums")

    def __init__(self, sums: list[float], parts: list[list[int]] | None = None, order: int = 0) -> None:
        self.sums = sums
        self.parts = parts or [[] for _ in sums]
        self.order = order
        """Smallest item: breaks ties the same way everywhere."""

    @classmethod
    def of(cls, index: int, cost: float, parts: int) -> _Solution:
        return cls([cost] + [0.0] * (parts - 1), [[index]] + [[] for _ in range(parts - 1)], index)

    def joined(self, other: _Solution) -> _Solution:
        sums = [a + b for a, b in zip(self.sums, reversed(other.sums), strict=True)]
        parts = [a + b for a, b in zip(self.parts, reversed(other.parts), strict=True)]
        heaviest_first = sorted(range(len(sums)), key=lambda part: -sums[part])
        return _Solution(
            [sums[part] for part in heaviest_first],
            [parts[part] for part in heaviest_first],
            min(self.order, other.order),
        )

    def __lt__(self, other: _Solution) -> bool:
        spread, others = self.sums[0] - self.sums[-1], other.sums[0] - other.sums[-1]
        return (-spread, self.order) < (-others, other.order)

"""Assigns sequences to ranks and to microbatches. Pure arithmetic, the same on every rank.

    sequences --pieces--> shares of equal cost --pieces--> microbatches of at most `capacity` tokens
    a a a b b c           share 0: a a a c                 [a a a] [c]
                          share 1: b b                     [b b]   []      as many for every share

Ranks of all shares take part in every collective of a step, so that the slowest share sets the pace and all run the
same number of passes. A *piece* is a run of one group's sequences, which share their prompt and are cheaper beside each
other; pieces are halved until the parts are even.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import groupby

from cosmos_rl_core.types import Share

EVEN = 1.03
"""Parts are even once the costliest costs at most this times the mean; groups are then cut no further."""
QUADRATIC_LENGTH = 24_576
"""Length at which attention costs as much as all matrix products: 12 x hidden, at a hidden size of 2048."""

Piece = list[int]
"""Members that stay together, ascending."""


def time_of(length: int) -> float:
    """Return the time of a sequence of `length` tokens, in that of a token of a short one."""
    return length + length * length / QUADRATIC_LENGTH


def deal(
    lengths: Sequence[int],
    *,
    capacity: int,
    share: Share,
    costs: Sequence[float] | None = None,
    groups: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the microbatches of `share`, each the ascending indices of its sequences.

    Every sequence is in one microbatch of one share; all shares have the same number of microbatches, a multiple of
    `share.multiple`, of which some may be empty. A microbatch holds at most `capacity` tokens or one sequence. A batch
    that is not divided (one share, multiple 1) keeps the order of its sequences; with groups it keeps that of its
    groups, but for those that fit into the room of an earlier microbatch.

    Args:
        lengths: tokens of each sequence, at least 1.
        costs: time of each sequence in any unit; by default its length and attention's quadratic part.
        groups: the group of each sequence, members beside each other; by default each is its own.
    """
    if share.count == share.multiple == 1:
        if groups is None:
            return _in_order(lengths, capacity)
        uncut = _first_fit(_cut(_pieces(groups), lengths, capacity), lengths, capacity)
        return [[index for piece in part for index in piece] for part in uncut]
    if costs is None:
        costs = [time_of(length) for length in lengths]
    pieces = _pieces(groups if groups is not None else range(len(lengths)))
    shares = [_cut(part, lengths, capacity) for part in _evenly(pieces, share.count, costs)]
    filled = [_first_fit(_longest_first(part, lengths), lengths, capacity) for part in shares]
    number = -(-max(map(len, filled)) // share.multiple) * share.multiple
    bins = filled[share.index]
    if share.multiple > 1:  # a pipeline fills and drains at the pace of its largest microbatch
        even = _evenly(shares[share.index], number, costs)
        bins = even if all(_fits(part, lengths, capacity) for part in even) else bins
    microbatches = [sorted(index for piece in part for index in piece) for part in bins]
    microbatches += [[] for _ in range(number - len(microbatches))]
    return sorted(microbatches, key=lambda part: (-sum(costs[index] for index in part), part))


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


def _in_order(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    used = 0
    for index, length in enumerate(lengths):
        if not bins or used + length > capacity:
            bins.append([])
            used = 0
        bins[-1].append(index)
        used += length
    return bins


def _pieces(groups: Sequence[int]) -> list[Piece]:
    return [list(members) for _, members in groupby(range(len(groups)), key=lambda index: groups[index])]


def _halved(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces as they are, in halves, in quarters, ..., alone."""
    current = list(pieces)
    yield current
    while any(len(piece) > 1 for piece in current):
        halves = ((piece[: (len(piece) + 1) // 2], piece[(len(piece) + 1) // 2 :]) for piece in current)
        current = [half for pair in halves for half in pair if half]
        yield current


def _evenly(pieces: Sequence[Piece], parts: int, costs: Sequence[float]) -> list[list[Piece]]:
    """Divide pieces into parts of even cost, cutting them no finer than that needs."""
    if not pieces:
        return [[] for _ in range(parts)]
    best: list[list[Piece]] = []
    lightest = float("inf")
    mean = sum(costs[index] for piece in pieces for index in piece) / parts
    for current in _halved(pieces):
        sums = [sum(costs[index] for index in piece) for piece in current]
        divided = divide(sums, parts)
        heaviest = max(sum(sums[piece] for piece in part) for part in divided)
        if heaviest < lightest:
            best, lightest = [[current[piece] for piece in part] for part in divided], heaviest
        if heaviest <= EVEN * mean:
            break
    return best


def _cut(pieces: Sequence[Piece], lengths: Sequence[int], capacity: int) -> list[Piece]:
    """Cut pieces that are longer than a microbatch."""
    return [
        [piece[index] for index in part]
        for piece in pieces
        for part in _in_order([lengths[index] for index in piece], capacity)
    ]


def _longest_first(pieces: Sequence[Piece], lengths: Sequence[int]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: (-sum(lengths[index] for index in piece), piece))


def _first_fit(pieces: Sequence[Piece], lengths: Sequence[int], capacity: int) -> list[list[Piece]]:
    """Put pieces into bins of at most `capacity` tokens, each into the first with room."""
    bins: list[list[Piece]] = []
    room: list[int] = []
    for piece in pieces:
        tokens = sum(lengths[index] for index in piece)
        place = next((place for place, left in enumerate(room) if tokens <= left), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(capacity)
        bins[place].append(piece)
        room[place] -= tokens
    return bins


def _fits(part: Sequence[Piece], lengths: Sequence[int], capacity: int) -> bool:
    members = [index for piece in part for index in piece]
    return len(members) == 1 or sum(lengths[index] for index in members) <= capacity

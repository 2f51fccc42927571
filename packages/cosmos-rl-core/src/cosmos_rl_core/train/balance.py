"""Assigns sequences to ranks and to microbatches. Pure arithmetic, the same on every rank.

    sequences --pieces--> shares of equal cost --pieces--> microbatches of at most `capacity` tokens
    a a a b b c           share 0: a a a c                 [a a a] [c]
                          share 1: b b                     [b b]   []      as many for every share

All ranks take part in every collective of a step. Hence the slowest share sets the pace, and all shares run the same
number of passes. A *piece* is a run of consecutive sequences of one group. They share their prompt, which is computed
once if they are in the same microbatch, so pieces are kept whole where that leaves the shares even, and halved where it
does not.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import groupby

from cosmos_rl_core.types import Share

EVEN = 1.03
"""Parts count as even if the costliest one costs at most this times the mean; pieces are then not halved further."""
QUADRATIC_LENGTH = 24_576
"""Length at which attention costs as much as all matrix products: 12 x hidden, at a hidden size of 2048."""

Piece = list[int]
"""Indices of sequences that stay together, ascending."""


def time_of(length: int) -> float:
    """Return the relative cost of a sequence; 1.0 is the cost of one token of a short sequence."""
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

    Every sequence is in one microbatch of one share. All shares have the same number of microbatches, a multiple of
    `share.multiple`; some may be empty. A microbatch has at most `capacity` tokens, or a single longer sequence. A
    batch that is not divided (one share, multiple 1) keeps the order of its sequences. With groups it keeps the order
    of the groups, except for those that are moved forward to fill an earlier microbatch.

    Args:
        lengths: tokens of each sequence, at least 1.
        costs: relative cost of each sequence, in any unit; default: `time_of` its length.
        groups: the group of each sequence, members consecutive; default: each sequence is a group of its own.
    """
    if share.count == share.multiple == 1:  # nothing to balance: one rank runs all microbatches, in any sizes
        if groups is None:
            return _in_order(lengths, capacity)
        uncut = _first_fit(_cut(_pieces(groups), lengths, capacity), lengths, capacity)
        return [[index for piece in part for index in piece] for part in uncut]
    if costs is None:
        costs = [time_of(length) for length in lengths]
    pieces = _pieces(groups if groups is not None else range(len(lengths)))
    # Every rank computes the split of all shares, although it trains on one: the number of microbatches that each of
    # them has to run is the maximum over the shares, rounded up to the multiple that the pipeline's schedule requires.
    shares = [_cut(part, lengths, capacity) for part in _evenly(pieces, share.count, costs)]
    filled = [_first_fit(_longest_first(part, lengths), lengths, capacity) for part in shares]
    number = -(-max(map(len, filled)) // share.multiple) * share.multiple
    bins = filled[share.index]
    if share.multiple > 1:
        # The stages of a pipeline wait for its largest microbatch, so that equal ones are better than full ones. Equal
        # cost does not imply that all fit: then the full ones of `_first_fit` remain.
        even = _evenly(shares[share.index], number, costs)
        bins = even if all(_fits(part, lengths, capacity) for part in even) else bins
    microbatches = [sorted(index for piece in part for index in piece) for part in bins]
    microbatches += [[] for _ in range(number - len(microbatches))]
    # Costliest first, in all shares: ranks wait for one another in each pass, and passes of one place are alike.
    return sorted(microbatches, key=lambda part: (-sum(costs[index] for index in part), part))


def divide(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Divide the indices of `costs` into parts of nearly equal sum, each ascending; the costliest part comes first.

    Karmarkar and Karp's differencing (1982) for several parts. Every item begins as a solution of its own: one part has
    the item, the others are empty. The two least even solutions are joined, the heaviest part of one with the lightest
    of the other, until a single solution has all items. The sums differ by at most the costliest item.
    """
    solutions = [_Solution.of(index, cost, parts) for index, cost in enumerate(costs)] or [_Solution([0.0] * parts)]
    heapq.heapify(solutions)
    while len(solutions) > 1:
        first = heapq.heappop(solutions)
        heapq.heapreplace(solutions, first.joined(solutions[0]))
    return [sorted(members) for members in solutions[0].parts]


class _Solution:
    """A division of some of the items, heaviest part first. In the heap the least even solution is the smallest."""

    __slots__ = ("order", "parts", "sums")

    def __init__(self, sums: list[float], parts: list[list[int]] | None = None, order: int = 0) -> None:
        self.sums = sums
        self.parts = parts or [[] for _ in sums]
        self.order = order
        """Index of its first item, which breaks ties: all ranks must divide alike."""

    @classmethod
    def of(cls, index: int, cost: float, parts: int) -> _Solution:
        return cls([cost] + [0.0] * (parts - 1), [[index]] + [[] for _ in range(parts - 1)], index)

    def joined(self, other: _Solution) -> _Solution:
        # The lists are in opposite orders here: the differences between the parts of both cancel out.
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
    """Yield the pieces whole, in halves, in quarters, ..., and at last as single sequences."""
    current = list(pieces)
    yield current
    while any(len(piece) > 1 for piece in current):
        halves = ((piece[: (len(piece) + 1) // 2], piece[(len(piece) + 1) // 2 :]) for piece in current)
        current = [half for pair in halves for half in pair if half]
        yield current


def _evenly(pieces: Sequence[Piece], parts: int, costs: Sequence[float]) -> list[list[Piece]]:
    """Divide pieces into parts of even cost; they are halved only until the parts are `EVEN`."""
    if not pieces:
        return [[] for _ in range(parts)]
    best: list[list[Piece]] = []
    lightest = float("inf")
    mean = sum(costs[index] for piece in pieces for index in piece) / parts
    for current in _halved(pieces):
        sums = [sum(costs[index] for index in piece) for piece in current]
        divided = divide(sums, parts)
        heaviest = max(sum(sums[piece] for piece in part) for part in divided)
        if heaviest < lightest:  # halves are not always better: differencing is a heuristic
            best, lightest = [[current[piece] for piece in part] for part in divided], heaviest
        if heaviest <= EVEN * mean:
            break
    return best


def _cut(pieces: Sequence[Piece], lengths: Sequence[int], capacity: int) -> list[Piece]:
    """Cut pieces that are longer than a microbatch, in order."""
    return [
        [piece[index] for index in part]
        for piece in pieces
        for part in _in_order([lengths[index] for index in piece], capacity)
    ]


def _longest_first(pieces: Sequence[Piece], lengths: Sequence[int]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: (-sum(lengths[index] for index in piece), piece))


def _first_fit(pieces: Sequence[Piece], lengths: Sequence[int], capacity: int) -> list[list[Piece]]:
    """Put pieces into bins of at most `capacity` tokens, each into the first bin with room.

    With pieces in descending order of length this is first-fit decreasing: at most 11/9 of the optimum, plus one bin.
    """
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

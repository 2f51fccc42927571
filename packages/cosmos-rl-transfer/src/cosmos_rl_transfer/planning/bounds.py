"""The fairest way to share bytes among their owners, which is also the proof that none is fairer.

    demand  D_s   bytes that any of the ranks s may send           (s: the owners of some part of some tensor)
    speed   beta  of each rank's NIC

The busiest NIC needs at least max over sets S of ranks of  D(S) / beta(S),  D(S) = what only ranks of S hold, for
somebody in S must send it. By max-flow / min-cut some sharing reaches that. The decomposition of Fujishige (1980,
"Lexicographically optimal base of a polymatroid") finds it, and the same for the second busiest and so on:

    split(E):  try to give every rank of E the mean D(E) / beta(E), by max-flow from owner sets to ranks
               it fits   -> these ranks are equally busy
               it does not -> the min cut is a set S that is busier than the mean: split(S), split(E without S)
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from cosmos_rl_transfer.layout.overlay import Owners


@dataclass(frozen=True, slots=True)
class Balance:
    """Who sends how much."""

    shares: Mapping[Owners, Mapping[int, int]]
    """Bytes each owner sends of what the owners hold; rounded down."""
    busiest: Fraction
    """Seconds that the busiest NIC is busy: the least possible."""


def balance(demand: Mapping[Owners, int], speed: Mapping[int, int]) -> Balance:
    """Share `demand`, bytes by owners, among NICs of `speed`, bytes a second by rank."""
    shares: dict[Owners, dict[int, int]] = {owners: dict.fromkeys(owners, 0) for owners in demand}
    busiest = Fraction(0)
    todo = [{owners: (owners, size) for owners, size in demand.items() if size}]
    while todo:
        group = todo.pop()
        ranks = sorted({rank for owners, _ in group.values() for rank in owners})
        if not ranks:
            continue
        total, width = sum(size for _, size in group.values()), sum(speed[rank] for rank in ranks)
        flow = Flow(
            [(owners, size * width) for owners, size in group.values()], {rank: total * speed[rank] for rank in ranks}
        )
        busy = flow.saturate()
        if not busy:
            busiest = max(busiest, Fraction(total, width))
            for key, sent in zip(group, flow.sent):
                shares[key] = {rank: sent.get(rank, 0) // width for rank in key}
            continue
        inside = {key: (owners, size) for key, (owners, size) in group.items() if busy.issuperset(owners)}
        outside = {
            key: (tuple(rank for rank in owners if rank not in busy), size)
            for key, (owners, size) in group.items()
            if key not in inside
        }
        todo += [inside, outside]
    return Balance(shares, busiest)


class Flow:
    """A maximum flow from owner sets to ranks, along shortest augmenting paths (Edmonds and Karp 1972)."""

    def __init__(self, demand: Sequence[tuple[Owners, int]], room: Mapping[int, int]) -> None:
        self._owners = [owners for owners, _ in demand]
        self._left = [size for _, size in demand]
        self._room = dict(room)
        self._users: defaultdict[int, list[int]] = defaultdict(list)
        for place, owners in enumerate(self._owners):
            for rank in owners:
                self._users[rank].append(place)
        self.sent: list[defaultdict[int, int]] = [defaultdict(int) for _ in demand]
        """For each owner set, the bytes each rank sends."""

    def saturate(self) -> set[int]:
        """Send all that fits; return the ranks of a minimum cut, which are all full, none if everything fits."""
        for place in sorted(range(len(self._owners)), key=lambda i: len(self._owners[i])):
            for rank in sorted(self._owners[place], key=lambda r: -self._room[r]):
                self._send(place, rank, min(self._left[place], self._room[rank]))
        while any(self._left):
            reached = self._augment()
            if reached is not None:
                return reached
        return set()

    def _send(self, place: int, rank: int, size: int) -> None:
        self.sent[place][rank] += size
        self._left[place] -= size
        self._room[rank] -= size

    def _augment(self) -> set[int] | None:
        """Push more along one shortest path; where there is none, return the ranks that were reached."""
        came_from: dict[int, int] = {}
        """By rank: the set it was reached from."""
        gave_up: dict[int, int] = {}
        """By set: the rank whose bytes it could send by another."""
        queue = deque(place for place, left in enumerate(self._left) if left)
        starts = set(queue)
        while queue:
            place = queue.popleft()
            for rank in self._owners[place]:
                if rank in came_from:
                    continue
                came_from[rank] = place
                if self._room[rank]:
                    self._push(rank, came_from, gave_up, starts)
                    return None
                for user in self._users[rank]:
                    if self.sent[user][rank] and user not in gave_up and user not in starts:
                        gave_up[user] = rank
                        queue.append(user)
        return set(came_from)

    def _push(self, rank: int, came_from: Mapping[int, int], gave_up: Mapping[int, int], starts: set[int]) -> None:
        path, last = [], rank
        while True:
            place = came_from[rank]
            path.append((place, rank))
            if place in starts:
                break
            rank = gave_up[place]
        size = min(self._room[last], self._left[path[-1][0]])
        size = min([size, *(self.sent[place][gave_up[place]] for place, _ in path[:-1])])
        for place, rank in path:
            self.sent[place][rank] += size
            if place not in starts:
                self.sent[place][gave_up[place]] -= size
        self._room[last] -= size
        self._left[path[-1][0]] -= size

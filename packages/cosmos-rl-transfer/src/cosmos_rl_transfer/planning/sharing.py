"""Share bytes among their owners: the fairest way, the proof that none is fairer, and whole copies dealt by it.

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

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np

from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.box import Box, Owners
from cosmos_rl_transfer.planning.bucket import split
from cosmos_rl_transfer.planning.match import Match, TensorClass


@dataclass(frozen=True, slots=True)
class Balance:
    """Bytes by sender."""

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
        # The fair share of rank r is total * speed[r] / width bytes. All sizes are multiplied by `width`, so that the
        # flow is one of integers and the shares are exact.
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
        # what any rank of the cut may send it sends, for the cut is busier than the mean: the others get the rest
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
        """Push more along one shortest path; where there is none, return the ranks that were reached.

        A breadth-first search over set -> rank (the set has bytes left, or can move some there) and rank -> set (the
        rank sends bytes of the set, which the set could send by another rank). It ends at a rank with room.
        """
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
        # Back from the rank with room to a set with bytes left: each set on the way moves bytes from the rank that it
        # gave up to the one that it was left for.
        path, last = [], rank
        while True:
            place = came_from[rank]
            path.append((place, rank))
            if place in starts:
                break
            rank = gave_up[place]
        # as much as the narrowest place of the path takes
        size = min(self._room[last], self._left[path[-1][0]])
        size = min([size, *(self.sent[place][gave_up[place]] for place, _ in path[:-1])])
        for place, rank in path:
            self.sent[place][rank] += size
            if place not in starts:
                self.sent[place][gave_up[place]] -= size
        self._room[last] -= size
        self._left[path[-1][0]] -= size


LEAST_SPLIT_BYTES = 64 << 10
"""Smaller runs cost more than balance gains."""
LONE_SHARE = 16
"""A unit fewer in number than its owners is split among them if it is more than this part of what each sends: else its
sender would send little of all other layers, and idle while they are read."""


class Lot(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """n equal copies and their senders."""

    kind: int
    """Place of the tensors' class."""
    box: Box
    num_bytes: int
    """Of one copy."""
    copies: int
    """One a tensor of the class."""
    slot: int
    """The target rank."""
    owners: Owners
    """Source ranks that hold the box."""
    counts: tuple[int, ...] = ()
    """Number of copies that each owner sends."""
    turn: int = 0
    """Where the owners' sequence over the tensors begins."""


def cut_lots(match: Match, classes: Sequence[TensorClass]) -> list[Lot]:
    """Cut the boxes of all slots into lots; those with one owner are dealt already.

    Raises LayoutError where no source rank holds a part.
    """
    lots = []
    for number, kind in enumerate(classes):
        copies = len(kind.tensors)
        alone = (copies,)
        for slot, target_box in kind.boxes.items():
            for box, owners in match.source.overlays[kind.source_cut].units(target_box):
                if not owners:
                    name, holders = match.names[kind.tensors[0]], sorted(match.source.cuts[kind.source_cut])
                    raise LayoutError(
                        f"{name}: no source rank of {holders} holds offset {box.offset} shape {box.shape}, "
                        f"which target rank {slot} needs"
                    )
                size, counts = box.numel * kind.item_bytes, alone if len(owners) == 1 else ()
                lots.append(
                    Lot(kind=number, box=box, num_bytes=size, copies=copies, slot=slot, owners=owners, counts=counts)
                )
    return lots


def split_shared(lots: Sequence[Lot], most_bytes: int | None) -> Iterator[Lot]:
    """Yield lots that several ranks own, in parts of whole rows where they are above `most_bytes` or lone and big."""
    total, number = demand(lots), Counter[tuple[int, Owners]]()
    for lot in lots:
        number[lot.kind, lot.owners] += lot.copies
    for lot in lots:
        width, limit = len(lot.owners), most_bytes or lot.num_bytes
        part = -(-lot.num_bytes // width)
        lone = number[lot.kind, lot.owners] < width and lot.num_bytes * LONE_SHARE * width > total[lot.owners]
        # a lone, big unit is cut into one part an owner; any other only if it is above the limit that is tried
        if lone and part >= LEAST_SPLIT_BYTES:
            limit = min(limit, part)
        if lot.num_bytes <= limit:
            yield lot
            continue
        item_bytes = lot.num_bytes // lot.box.numel
        for box in split(lot.box, item_bytes, limit):
            yield msgspec.structs.replace(lot, box=box, num_bytes=box.numel * item_bytes)


def demand(lots: Iterable[Lot]) -> Counter[Owners]:
    """Bytes by the ranks that may send them."""
    total = Counter[Owners]()
    for lot in lots:
        total[lot.owners] += lot.num_bytes * lot.copies
    return total


def loads(lots: Iterable[Lot]) -> Counter[int]:
    """Bytes each source rank sends."""
    sent = Counter[int]()
    for lot in lots:
        for owner, count in zip(lot.owners, lot.counts):
            sent[owner] += count * lot.num_bytes
    return sent


def deal(count: int, size: int, room: Sequence[int], *, turn: int) -> list[int]:
    """Return how many of `count` copies of `size` bytes each owner takes: one by one, to the owner with most room left.

    The same as doing so, in closed form: all owners end at one level, the odd copies go to those above it. Equal
    owners are taken from index `turn` on, so that replicas that plan alone do not all choose the first.
    """
    if count % len(room) == 0 and min(room) == max(room):
        return [count // len(room)] * len(room)
    ranked = sorted(range(len(room)), key=lambda i: (-room[i], (i - turn) % len(room)))
    # Water filling: the owners with most room take copies until all of them have `level` bytes of room left, with
    # level = (sum of their rooms - count * size) / their number. An owner with less room than that takes none.
    total, num_active = -count * size, 0
    for i in ranked:
        if num_active and room[i] * num_active <= total:
            break
        total, num_active = total + room[i], num_active + 1
    counts = [0] * len(room)
    for i in ranked[:num_active]:
        counts[i] = (room[i] * num_active - total) // (num_active * size)
    if odd := count - sum(counts):  # from rounding down, less than one copy an owner: to those furthest above the level
        above = sorted(ranked, key=lambda i: counts[i] * size - room[i])
        for i in above[:odd]:
            counts[i] += 1
    return counts


def deal_near(count: int, size: int, room: Sequence[int], distance: Sequence[int], *, turn: int) -> list[int]:
    """As `deal`, but whole copies that fit into the room of nearer owners go there first."""
    counts = [0] * len(room)
    for near in sorted(set(distance))[:-1]:
        places = [i for i, far in enumerate(distance) if far == near]
        fits = sum(max(0, room[i] // size) for i in places)
        taken = deal(min(count, fits), size, [room[i] for i in places], turn=turn)
        for i, number in zip(places, taken):
            counts[i] = number
        count -= sum(taken)
    rest = deal(count, size, [free - number * size for free, number in zip(room, counts)], turn=turn)
    return [near + far for near, far in zip(counts, rest)]


def interleave(counts: Sequence[int], turn: int) -> np.ndarray[Any, Any]:
    """Return [sum(counts)]: the owner of each copy, every owner's spread evenly, so that every window is balanced.

    In any window, an owner of the share s of all copies has s of the window's, give or take (1 - s) + s * (others that
    have copies). `turn` rotates the sequence.
    """
    if len(set(counts)) == 1:
        return (np.arange(sum(counts)) + turn) % len(counts)
    # an owner of n copies has its i-th at (2 i + 1) / 2 n of the sequence; sorting these mixes all owners evenly
    owners = np.repeat(np.arange(len(counts)), counts)
    middles = np.concatenate([(2 * np.arange(n) + 1) / (2 * n) for n in counts if n] or [np.zeros(0)])
    return np.roll(owners[np.argsort(middles, kind="stable")], -turn)

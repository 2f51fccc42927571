"""The plan for one copy of the weights: what one rollout replica reads, planned without looking at the others.

    classes   tensors cut alike                            one overlay for all of them
    lots      a unit of a class at one target rank         n equal copies, one a tensor, and the ranks that own them
    shares    bytes each owner sends of what it owns       the fairest possible (bounds.py)
    deal      biggest lots first, to who has most room     counts by owner, a few integers a lot
    stream    buckets of one source and target rank        made when somebody asks: usually one rank's own

Every replica's plan is balanced by itself, and `position` turns the choice among equal owners, so that all of them
together are balanced too, and one that joins or leaves changes nothing for the others.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec
import numpy as np

from cosmos_rl_transfer.bounds import Balance, Owners, balance
from cosmos_rl_transfer.box import Box
from cosmos_rl_transfer.bucket import Bucket, pack, split
from cosmos_rl_transfer.deal import deal, deal_near, interleave
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.match import Ints, Match, TensorClass
from cosmos_rl_transfer.overlay import Overlay, split_units
from cosmos_rl_transfer.topology import Topology

TOLERANCE = 1.01
"""Busiest NIC over its bound, above which units are split among their owners."""
LEAST_SPLIT_BYTES = 64 << 10
"""Smaller runs cost more than balance gains."""


@dataclass(slots=True, kw_only=True)
class Lot:
    """n equal copies: a unit of every tensor of a class, for one target rank."""

    kind: int
    """Place of the class."""
    box: Box
    num_bytes: int
    """Of one copy."""
    slot: int
    """The target rank."""
    owners: Owners
    counts: list[int] = field(default_factory=list)
    """How many copies each owner sends."""
    turn: int = 0
    """Where the owners' sequence over the tensors begins."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaPlan:
    """One replica's lots, dealt."""

    match: Match
    classes: Sequence[TensorClass]
    lots: Sequence[Lot]
    bucket_bytes: int
    position: int
    members: Mapping[int, tuple[int, ...]]
    """By slot: the target ranks that get its bytes. Several are a ring that relays; a slot alone is its own member."""
    made: dict[tuple[int, int], tuple[Bucket, ...]] = field(default_factory=dict)
    """Streams that were asked for, by source and target rank."""

    @classmethod
    def of(
        cls,
        match: Match,
        *,
        members: Mapping[int, tuple[int, ...]],
        position: int,
        bucket_bytes: int,
        topology: Topology,
    ) -> ReplicaPlan:
        """Plan for the slots of `members`. Raises LayoutError where nobody holds what a slot wants."""
        classes = match.classes(members)
        overlays = [Overlay(boxes) for boxes in match.source_cuts]
        most_bytes: int | None = None
        while True:
            lots = list(_lots(match, classes, overlays, most_bytes))
            fair = balance(demand(lots, classes), _speeds(lots, topology))
            _deal_all(lots, classes, fair, topology, position)
            limit = _finer(lots, classes, fair, topology, most_bytes)
            if limit is None:
                break
            most_bytes = limit
        return cls(
            match=match, classes=classes, lots=lots, bucket_bytes=bucket_bytes, position=position, members=members
        )

    @cached_property
    def live(self) -> list[Lot]:
        """Lots whose slot still has members."""
        return [lot for lot in self.lots if lot.slot in self.members]

    @cached_property
    def slot_of(self) -> dict[int, int]:
        """By target rank."""
        return {rank: slot for slot, ranks in self.members.items() for rank in ranks}

    @cached_property
    def bytes_out(self) -> Counter[int]:
        """By source rank."""
        return loads(self.live)

    @cached_property
    def bytes_in(self) -> dict[int, int]:
        """By target rank."""
        wanted = Counter[int]()
        for lot in self.live:
            wanted[lot.slot] += lot.num_bytes * sum(lot.counts)
        return {rank: wanted[slot] for rank, slot in self.slot_of.items()}

    @cached_property
    def sources(self) -> dict[int, list[int]]:
        """By slot: the source ranks it reads from, ascending."""
        found: defaultdict[int, set[int]] = defaultdict(set)
        for lot in self.live:
            found[lot.slot].update(owner for owner, n in zip(lot.owners, lot.counts) if n)
        return {slot: sorted(ranks) for slot, ranks in found.items()}

    def with_members(self, members: Mapping[int, tuple[int, ...]]) -> ReplicaPlan:
        """Return the same plan for other members of its slots; streams that were made are kept."""
        return replace(self, members=members)

    def without(self, ranks: Collection[int]) -> ReplicaPlan:
        """Return the plan for the members that are not in `ranks`."""
        left = {slot: tuple(r for r in ring if r not in ranks) for slot, ring in self.members.items()}
        return self.with_members({slot: ring for slot, ring in left.items() if ring})

    def stream(self, source: int, target: int) -> tuple[Bucket, ...]:
        """Return the buckets of one stream, made once."""
        if (source, target) not in self.made:
            self.made[source, target] = self._make(source, target)
        return self.made[source, target]

    def _make(self, source: int, target: int) -> tuple[Bucket, ...]:
        parts, tensors, places = list[Box](), list[Ints](), list[Ints]()
        sizes = list[int]()
        for lot in self._by_pair.get((source, self.slot_of[target]), ()):
            item_bytes = self.classes[lot.kind].item_bytes
            boxes = list(split(lot.box, item_bytes, self.bucket_bytes))
            mine = self.classes[lot.kind].tensors
            if len(lot.owners) > 1:
                mine = mine[interleave(lot.counts, lot.turn) == lot.owners.index(source)]
            tensors.append(np.repeat(mine, len(boxes)))
            places.append(np.tile(np.arange(len(parts), len(parts) + len(boxes)), len(mine)))
            parts += boxes
            sizes += [box.numel * item_bytes for box in boxes]
        if not parts:
            return ()
        tensor, place = np.concatenate(tensors), np.concatenate(places)
        order = np.argsort(tensor, kind="stable")  # tensors in order, the parts of each row-major
        tensor, place = tensor[order], place[order]
        names = list(map(self.match.names.__getitem__, tensor.tolist()))
        boxes = list(map(parts.__getitem__, place.tolist()))
        return pack(
            names,
            boxes,
            np.array(sizes, np.int64)[place],
            source=source,
            target=target,
            most_bytes=self.bucket_bytes,
        )

    @cached_property
    def _by_pair(self) -> dict[tuple[int, int], list[Lot]]:
        found: defaultdict[tuple[int, int], list[Lot]] = defaultdict(list)
        for lot in self.lots:
            for owner, count in zip(lot.owners, lot.counts):
                if count:
                    found[owner, lot.slot].append(lot)
        return dict(found)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all that the streams are a function of; not over the streams, which may be millions of pieces."""
        content = (
            [self.bucket_bytes, self.match.names, [self.match.wire_dtypes[name] for name in self.match.names]],
            [(kind.item_bytes, kind.tensors.tobytes()) for kind in self.classes],
            [(lot.kind, lot.box, lot.num_bytes, lot.slot, lot.owners, lot.counts, lot.turn) for lot in self.lots],
            sorted(self.members.items()),
        )
        return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()


def demand(lots: Sequence[Lot], classes: Sequence[TensorClass]) -> Counter[Owners]:
    """Bytes by the ranks that may send them."""
    total = Counter[Owners]()
    for lot in lots:
        total[lot.owners] += lot.num_bytes * len(classes[lot.kind].tensors)
    return total


def loads(lots: Sequence[Lot]) -> Counter[int]:
    """Bytes each source rank sends."""
    sent = Counter[int]()
    for lot in lots:
        for owner, count in zip(lot.owners, lot.counts):
            sent[owner] += count * lot.num_bytes
    return sent


def _speeds(lots: Sequence[Lot], topology: Topology) -> dict[int, int]:
    return {rank: topology.source(rank).egress for lot in lots for rank in lot.owners}


def _lots(
    match: Match, classes: Sequence[TensorClass], overlays: Sequence[Overlay], most_bytes: int | None
) -> Iterator[Lot]:
    for number, kind in enumerate(classes):
        for slot, wanted in kind.wanted.items():
            units = overlays[kind.source_cut].units(wanted)
            for box, owners in split_units(units, kind.item_bytes, most_bytes):
                if not owners:
                    raise LayoutError(
                        f"{match.names[kind.tensors[0]]}: no source rank of {sorted(match.source_cuts[kind.source_cut])} "
                        f"holds offset {box.offset} shape {box.shape}, which target rank {slot} needs"
                    )
                yield Lot(kind=number, box=box, num_bytes=box.numel * kind.item_bytes, slot=slot, owners=owners)


def _deal_all(
    lots: Sequence[Lot], classes: Sequence[TensorClass], fair: Balance, topology: Topology, position: int
) -> None:
    """Set the lots' counts: biggest copies first."""
    room = {owners: dict(shares) for owners, shares in fair.shares.items()}
    dealt = Counter[tuple[int, Owners]]()
    for lot in sorted(lots, key=lambda lot: -lot.num_bytes):
        count = len(classes[lot.kind].tensors)
        if len(lot.owners) == 1:
            lot.counts = [count]
            continue
        free = room[lot.owners]
        left = [free[rank] for rank in lot.owners]
        lot.turn = position + lot.kind + dealt[lot.kind, lot.owners]  # classes and units begin with other owners
        distance = [topology.distance(rank, lot.slot) for rank in lot.owners] if topology.targets else [0]
        if len(set(distance)) == 1:
            lot.counts = deal(count, lot.num_bytes, left, turn=lot.turn)
        else:
            lot.counts = deal_near(count, lot.num_bytes, left, distance, turn=lot.turn)
        dealt[lot.kind, lot.owners] += 1
        for rank, number in zip(lot.owners, lot.counts):
            free[rank] -= number * lot.num_bytes


def _finer(
    lots: Sequence[Lot],
    classes: Sequence[TensorClass],
    fair: Balance,
    topology: Topology,
    most_bytes: int | None,
) -> int | None:
    """Return the size above which shared units should be split; None where the busiest NIC is busy enough."""
    busiest = max((size / topology.source(rank).egress for rank, size in loads(lots).items()), default=0.0)
    if busiest <= TOLERANCE * float(fair.busiest):
        return None
    biggest = max((lot.num_bytes for lot in lots if len(lot.owners) > 1), default=0)
    limit = (min(most_bytes, biggest) if most_bytes else biggest) // 2
    return limit if limit >= LEAST_SPLIT_BYTES else None

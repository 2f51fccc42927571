"""The plan for one copy of the weights: the reads of one rollout replica, independent of the others.

    classes   tensors cut alike                            one overlay for all of them
    lots      a unit of a class for one target rank        n equal copies, and the ranks that own them (sharing.py)
    shares    bytes each owner sends of what it owns       the fairest possible (sharing.py)
    deal      biggest lots first, to who has most room     counts by owner, a few integers a lot
    stream    buckets of one source and target rank        made when somebody asks: usually one rank's own

Every replica's plan is balanced by itself, and `position` turns the choice among equal owners, so that all of them
together are balanced too.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np

from cosmos_rl_transfer.layout.box import Box, Owners
from cosmos_rl_transfer.planning.bucket import Bucket, pack, split
from cosmos_rl_transfer.planning.match import Ints, Match, TensorClass
from cosmos_rl_transfer.planning.sharing import (
    LEAST_SPLIT_BYTES,
    Balance,
    Lot,
    balance,
    cut_lots,
    deal,
    deal_near,
    demand,
    interleave,
    loads,
    split_shared,
)
from cosmos_rl_transfer.planning.topology import Topology

TOLERANCE = 1.01
"""Busiest NIC over its bound, above which units are split among their owners."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaPlan:
    """One replica's lots, dealt."""

    match: Match
    classes: Sequence[TensorClass]
    lots: Sequence[Lot]
    bucket_bytes: int
    members: Mapping[int, tuple[int, ...]]
    """By slot: the target ranks that get its bytes. Several are a ring that relays; a slot alone is its own member."""
    streams: dict[tuple[int, int], tuple[Bucket, ...]] = field(default_factory=dict)
    """Streams built so far, by source and target rank."""

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
        """Plan for the slots of `members`. position: of this replica among those planned together.

        Raises LayoutError if no source has a box of a slot.
        """
        classes = match.classes(members)
        uncut = cut_lots(match, classes)
        demands = demand(uncut)
        speed = {rank: topology.source(rank).egress for owners in demands for rank in owners}
        fair = balance(demands, speed)
        sole, shared = [lot for lot in uncut if lot.counts], [lot for lot in uncut if not lot.counts]
        # Whole units are dealt first: few large pieces. Where that leaves a rank above its fair share, the units that
        # several ranks own are cut smaller and dealt again, down to LEAST_SPLIT_BYTES. What one rank owns alone is
        # sent by it however the rest is dealt.
        forced, lots = loads(sole), uncut
        for most_bytes in _limits(shared):
            parts = list(split_shared(shared, most_bytes))
            _deal_all(parts, fair, topology, position)
            lots = sole + parts
            sent = forced + loads(parts)
            if all(size <= TOLERANCE * float(fair.busiest) * speed[rank] for rank, size in sent.items()):
                break
        return cls(match=match, classes=classes, lots=lots, bucket_bytes=bucket_bytes, members=members)

    @cached_property
    def slot_of(self) -> dict[int, int]:
        """By target rank."""
        return {rank: slot for slot, ranks in self.members.items() for rank in ranks}

    @cached_property
    def bytes_out(self) -> Counter[int]:
        """By source rank."""
        return loads(self.lots)

    @cached_property
    def bytes_in(self) -> dict[int, int]:
        """By target rank."""
        num_bytes = Counter[int]()
        for lot in self.lots:
            num_bytes[lot.slot] += lot.num_bytes * lot.copies
        return {rank: num_bytes[slot] for rank, slot in self.slot_of.items()}

    @cached_property
    def sources(self) -> dict[int, list[int]]:
        """By slot: the source ranks it reads from, ascending."""
        owners: defaultdict[int, set[int]] = defaultdict(set)
        for lot in self.lots:
            owners[lot.slot].update(owner for owner, n in zip(lot.owners, lot.counts) if n)
        return {slot: sorted(ranks) for slot, ranks in owners.items()}

    def stream(self, source: int, target: int) -> tuple[Bucket, ...]:
        """Return the buckets of one stream, built once."""
        if (source, target) not in self.streams:
            self.streams[source, target] = self._make(source, target)
        return self.streams[source, target]

    def _make(self, source: int, target: int) -> tuple[Bucket, ...]:
        # Columns instead of objects: a lot stands for thousands of equal tensors. Each lot adds its tensors, its boxes
        # cut to the size of a bucket, and for every (tensor, box) the place of the box in `parts`.
        parts, tensors, places = list[Box](), list[Ints](), list[Ints]()
        sizes = list[int]()
        for lot in self._by_pair.get((source, self.slot_of[target]), ()):
            item_bytes = self.classes[lot.kind].item_bytes
            boxes = list(split(lot.box, item_bytes, self.bucket_bytes))
            mine = self.classes[lot.kind].tensors
            if len(lot.owners) > 1:  # the tensors that this source sends, spread evenly over all
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
            list(map(self.match.wire_dtypes.__getitem__, names)),
            np.array(sizes, np.int64)[place],
            source=source,
            target=target,
            most_bytes=self.bucket_bytes,
        )

    @cached_property
    def _by_pair(self) -> dict[tuple[int, int], list[Lot]]:
        lots: defaultdict[tuple[int, int], list[Lot]] = defaultdict(list)
        for lot in self.lots:
            for owner, count in zip(lot.owners, lot.counts):
                if count:
                    lots[owner, lot.slot].append(lot)
        return dict(lots)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan's inputs to `stream`; hashing its pieces, which may be millions, would be slow."""
        content = (
            [self.bucket_bytes, self.match.names],
            [(kind.dtype, kind.tensors.tobytes()) for kind in self.classes],
            self.lots,
            sorted(self.members.items()),
        )
        return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()


def _limits(shared: Sequence[Lot]) -> Iterator[int | None]:
    """Sizes above which units are split, tried in turn: none, then ever smaller ones."""
    yield None
    limit = max((lot.num_bytes for lot in shared), default=0) // 2
    while limit >= LEAST_SPLIT_BYTES:
        yield limit
        limit //= 2


def _deal_all(lots: Sequence[Lot], fair: Balance, topology: Topology, position: int) -> None:
    """Set the lots' counts: biggest copies first, each set of owners by itself."""
    groups: defaultdict[Owners, list[Lot]] = defaultdict(list)
    for lot in sorted(lots, key=lambda lot: -lot.num_bytes):
        groups[lot.owners].append(lot)
    for owners, group in groups.items():
        room = [fair.shares[owners][rank] for rank in owners]  # bytes that each may still send
        begun = Counter[int]()
        for lot in group:
            lot.turn = position + lot.kind + begun[lot.kind]  # classes and units begin with other owners
            begun[lot.kind] += 1
            if topology.targets:
                distance = [topology.distance(rank, lot.slot) for rank in owners]
                lot.counts = tuple(deal_near(lot.copies, lot.num_bytes, room, distance, turn=lot.turn))
            else:
                lot.counts = tuple(deal(lot.copies, lot.num_bytes, room, turn=lot.turn))
            room = [free - number * lot.num_bytes for free, number in zip(room, lot.counts)]

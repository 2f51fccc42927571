"""Plans the boxes and buckets that each rank sends to each rank. Pure: two manifests in, a plan out.

    match       tensors by name, grouped into classes with equal shards           match.py
    rings       target ranks with the same boxes, if relaying is faster           relay.py
    a plan for each rollout replica, independent of the others                    replica_plan.py
    the whole   their union: bytes, bounds, digest

Every byte of a target rank is sent to it exactly once, so that bytes are at their lower bound by construction; the
busiest NIC is within 1 % of the lower bound (sharing.py), or as near as whole units of 64 KiB allow.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.box import Owners
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES, Manifest
from cosmos_rl_transfer.planning.bucket import ALIGN, Bucket, BucketPiece, aligned
from cosmos_rl_transfer.planning.match import Match, check_match, wire_dtype_of
from cosmos_rl_transfer.planning.relay import Relay, pays, rings, successor
from cosmos_rl_transfer.planning.replica_plan import ReplicaPlan
from cosmos_rl_transfer.planning.sharing import balance, demand
from cosmos_rl_transfer.planning.topology import Topology

__all__ = ["ALIGN", "Bucket", "BucketPiece", "TransferPlan", "aligned", "check_match", "plan", "wire_dtype_of"]

BUCKETS_IN_FLIGHT = 2
"""A rank packs one while another is sent."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TransferPlan:
    """The buckets between ranks, and their cost. Streams are built on first use."""

    replicas: tuple[ReplicaPlan, ...]
    """One per rollout replica; with relay, one per set of rings."""
    source: Manifest
    topology: Topology
    wire_dtype: str | None
    bucket_bytes: int
    relay: bool
    """Whether target ranks with the same boxes relay them (relay.py); the trainers then send them once."""
    relay_reason: str

    def stream(self, source: int, target: int) -> tuple[Bucket, ...]:
        """Return the buckets from `source` to `target`, possibly none; built once.

        With relay, all members of a ring have the same buckets, and `relay.predecessor` gives the source of each bucket
        for a member.
        """
        part = self._part_of.get(target)
        return part.stream(source, target) if part else ()

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(source rank, target rank) of the streams that exist, ascending."""
        pairs = (
            (source, rank)
            for part in self.replicas
            for rank, slot in part.slot_of.items()
            for source in part.sources.get(slot, ())
        )
        return tuple(sorted(pairs))

    @property
    def streams(self) -> Mapping[tuple[int, int], tuple[Bucket, ...]]:
        """Build all streams, by (source rank, target rank)."""
        return {pair: self.stream(*pair) for pair in self.pairs}

    def ring(self, target: int) -> tuple[int, ...]:
        """Return the ranks of `target`'s ring, in relay order."""
        part = self._part_of[target]
        return part.members[part.slot_of[target]]

    @cached_property
    def wire_dtypes(self) -> Mapping[str, str]:
        """Wire dtype by tensor, under the target's names and the source's."""
        merged = {s.name: wire_dtype_of(s, self.wire_dtype) for s in self.source.specs.values()}
        for part in self.replicas:
            merged.update(part.match.wire_dtypes)
        return merged

    @cached_property
    def bytes_out(self) -> Mapping[int, int]:
        """By source rank: bytes it sends, without padding."""
        sent = sum((part.bytes_out for part in self.replicas), Counter[int]())
        return {rank: sent[rank] for rank in self.source.ranks}

    @cached_property
    def bytes_in(self) -> Mapping[int, int]:
        """By target rank: bytes it receives, without padding."""
        received = {rank: size for part in self.replicas for rank, size in part.bytes_in.items()}
        return dict(sorted(received.items()))

    @cached_property
    def relay_bytes_out(self) -> Mapping[int, int]:
        """By target rank: bytes it relays. Builds one stream per ring and source."""
        passed = dict.fromkeys(self.bytes_in, 0)
        for part in self.replicas:
            for slot, ring in part.members.items():
                for bucket in (b for source in part.sources.get(slot, ()) for b in part.stream(source, ring[0])):
                    size = sum(p.box.numel * ITEM_BYTES[self.wire_dtypes[p.name]] for p in bucket.pieces)
                    for position, rank in enumerate(ring):
                        passed[rank] += size if successor(bucket.index, position, len(ring)) is not None else 0
        return passed

    @property
    def total_bytes(self) -> int:
        """Bytes received by the targets."""
        return sum(self.bytes_in.values())

    @cached_property
    def lower_bound(self) -> int:
        """Lower bound of received bytes: the targets' bytes, once each."""
        return sum(
            box.numel * kind.item_bytes * len(kind.tensors) * len(part.members[slot])
            for part in self.replicas
            for kind in part.classes
            for slot, box in kind.boxes.items()
        )

    @cached_property
    def egress_bound(self) -> int:
        """Lower bound of the busiest source's bytes: the maximum over sets of ranks of the bytes that only they hold,
        divided by their number. For different NICs, at the speed of the fastest. A ring counts as one target."""
        demands = sum((demand(part.lots) for part in self.replicas), Counter[Owners]())
        speeds = {rank: self.topology.source(rank).egress for rank in self.source.ranks}
        return ceil(balance(demands, speeds).busiest * max(speeds.values(), default=1))

    @property
    def ratio(self) -> float:
        """Busiest source's bytes over `egress_bound`: 1.0 is perfect balance."""
        busiest = self._busiest(self.bytes_out, {r: self.topology.source(r).egress for r in self.bytes_out})
        return busiest / self.egress_bound if self.egress_bound else 1.0

    @property
    def peak_extra_bytes(self) -> int:
        """Memory per rank beside its weights, in each direction: buckets in flight."""
        return BUCKETS_IN_FLIGHT * self.bucket_bytes

    @cached_property
    def digest(self) -> str:
        """SHA-256 over classes, lots and their senders; equal on both sides or the sync does not start."""
        return hashlib.sha256("".join(part.digest for part in self.replicas).encode()).hexdigest()

    @cached_property
    def _part_of(self) -> dict[int, ReplicaPlan]:
        return {rank: part for part in self.replicas for rank in part.slot_of}

    def _busiest(self, sizes: Mapping[int, int], speeds: Mapping[int, int]) -> int:
        fastest = max(speeds.values(), default=1)
        return max((-(-size * fastest // speeds[rank]) for rank, size in sizes.items()), default=0)


def plan(
    source: Manifest,
    target: Manifest,
    topology: Topology | None = None,
    *,
    relay: Relay = "auto",
    bucket_bytes: int,
    wire_dtype: str | None = None,
) -> TransferPlan:
    """Plan the transfer of all weights of `target` from `source`.

    target: one rollout replica, or several with their ranks in `Manifest.replicas`; each is planned alone, and the plan
    is their union. wire_dtype: what floating tensors are cast to on the way
    where that is narrower; None: the target's dtype. relay: whether equal target ranks pass buckets on; "auto": where
    their NICs are faster together than the source's. Raises LayoutError with tensor, shapes and ranks, where names,
    shapes or dtypes do not match or nobody holds a part of a target's box.
    """
    if bucket_bytes < max(ITEM_BYTES.values()):
        raise LayoutError(f"bucket_bytes = {bucket_bytes} is smaller than one element")
    topology = topology or Topology()
    match = Match.of(source, target, wire_dtype)
    groups = rings(target)
    out = sum(topology.source(rank).egress for rank in source.ranks)
    into = sum(topology.target(rank).ingress for rank in target.ranks)
    relays = pays(relay, groups, trainer_speed=out, rollout_speed=into)
    parts = (
        ReplicaPlan.of(match, members=members, position=place, bucket_bytes=bucket_bytes, topology=topology)
        for place, members in enumerate(_slots(target, groups, relays))
    )
    return TransferPlan(
        replicas=tuple(parts),
        source=source,
        topology=topology,
        wire_dtype=wire_dtype,
        bucket_bytes=bucket_bytes,
        relay=relays,
        relay_reason=_reason(relay, relays, groups, out / 1e9, into / 1e9),
    )


def _slots(target: Manifest, groups: list[tuple[int, ...]], relays: bool) -> Iterator[dict[int, tuple[int, ...]]]:
    """For each replica that plans: its ranks, with those that get the same bytes through them."""
    leaders = {group[0]: group for group in groups} if relays else {rank: (rank,) for rank in target.ranks}
    for ranks in target.copies:
        if members := {rank: leaders[rank] for rank in ranks if rank in leaders}:
            yield members


def _reason(relay: Relay, relays: bool, groups: list[tuple[int, ...]], out: float, into: float) -> str:
    if relay != "auto":
        return f"asked to be {relay}"
    if all(len(group) == 1 for group in groups):
        return "no two target ranks want the same boxes"
    compared = f"{into:,.0f} GB/s into the targets, {out:,.0f} GB/s out of the sources"
    return compared if relays else f"it would not be faster: {compared}"

"""The memory, plans and hashes that all readers of one rank's parts share.

Supply    memory, versions, slots, plans, hashes
Slots     memory that buckets are packed into, shared by readers

A publisher supplies the trainer's tensors, a subscriber the version it has staged (pull/peers.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from cosmos_rl_core.hardware_log import log_choice
from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_transfer.content.proof import NOT_HASHED, Proof, Proofs, packed_pieces, prove, shapes_of
from cosmos_rl_transfer.content.raw import Block, Raw
from cosmos_rl_transfer.content.staging import Spare
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.planning.plan import Bucket, BucketPiece, TransferPlan, plan, wire_dtype_of
from cosmos_rl_transfer.publish.holders import Directory, Partial
from cosmos_rl_transfer.publish.memory import PublishedMemory, StagedWeights
from cosmos_rl_transfer.publish.versions import Versions
from cosmos_rl_transfer.transports.base import Outlet, Transport, TransportUnavailable
from cosmos_rl_transfer.transports.select import between_gpus, named, open_outlet
from cosmos_rl_transfer.transports.selftest import driver_limit_s, in_time
from cosmos_rl_transfer.transports.tcp import Tcp


@dataclass(slots=True, eq=False)
class Hold:
    """One use of a slot, from `take` to `free`."""

    slot: int
    owner: object
    since: float = math.inf
    """When the reader got it; infinite while it is being filled."""


class Slots:
    """Lends slots. A reader that keeps one for longer than `patience_s` may lose it to the next.

    hold = take(owner)   nobody else may touch hold.slot while it is filled and hashed
    start_reading(hold)  the reader may keep it for `patience_s` from here on
    free(hold)           false if the slot was lost
    """

    def __init__(self, num_slots: int, *, patience_s: float) -> None:
        self._holds: list[Hold | None] = [None] * num_slots
        self._patience_s = patience_s
        self._changed = threading.Condition()

    def take(self, owner: object, *, wait: bool) -> Hold | None:
        """Return a slot for `owner`; None if `wait` is false and none is free or held too long by another owner."""
        with self._changed:
            while (slot := self._free(None if wait else owner)) is None:
                if not wait:
                    return None
                oldest = min((hold.since for hold in self._holds if hold is not None), default=math.inf)
                late_in = max(0.0, oldest + self._patience_s - time.monotonic())
                self._changed.wait(late_in if late_in < math.inf else None)
            self._holds[slot] = hold = Hold(slot, owner)
            return hold

    def start_reading(self, hold: Hold) -> None:
        """Start the time that a reader may keep a slot."""
        with self._changed:
            assert self._holds[hold.slot] is hold, "a slot that is being filled cannot be lost"
            hold.since = time.monotonic()
            self._changed.notify_all()

    def free(self, hold: Hold) -> bool:
        """Return a slot; false, without effect, if it was lost to another owner."""
        with self._changed:
            kept = self._holds[hold.slot] is hold
            if kept:
                self._holds[hold.slot] = None
                self._changed.notify()
            return kept

    def holds(self, owner: object) -> int:
        """Return the number of slots `owner` holds."""
        with self._changed:
            return sum(hold is not None and hold.owner is owner for hold in self._holds)

    def leave(self, owner: object) -> None:
        """Free all slots of `owner`."""
        with self._changed:
            self._holds = [None if hold is None or hold.owner is owner else hold for hold in self._holds]
            self._changed.notify_all()

    def _free(self, but: object | None) -> int | None:
        """Return a free slot, or one held too long by another owner than `but`. The lock is held."""
        late = time.monotonic() - self._patience_s
        for slot, hold in enumerate(self._holds):
            if hold is None:
                return slot
        return next((h.slot for h in self._holds if h is not None and h.since <= late and h.owner is not but), None)


NUM_SLOTS = 2
LEAST_PATIENCE_S = 0.5
"""A reader keeps a slot that others wait for at least so long."""
MOST_PLANS = 4
"""Plans kept: the ranks of a replica, and equal replicas, need the same one."""


@dataclass(frozen=True, slots=True)
class End:
    """An outlet with its slots."""

    outlet: Outlet
    slots: Slots


class Supply:
    """The memory of one rank's parts, and what all its readers share. Any thread may call."""

    def __init__(
        self,
        memory: PublishedMemory,
        *,
        settings: SyncSection,
        encrypted: bool,
        transport: Transport | None,
        partial: Partial | None,
    ) -> None:
        """Allocate two slots of a bucket each. encrypted: as for `open_outlet`; the others as for `WeightServer`."""
        self.memory, self.settings, self.partial = memory, settings, partial
        self.bucket_bytes = settings.bucket_bytes or memory.bucket_bytes
        self.wire_dtypes = {spec.name: wire_dtype_of(spec, settings.dtype) for spec in memory.manifest.specs.values()}
        """Dtype by tensor in which weights travel to the target that joined last, or will to the first."""
        self._shapes = shapes_of(memory.manifest)
        self.spare = Spare(self.bucket_bytes)
        self.versions = Versions(recycle=self.spare.give)
        self.holders = Directory("off" if settings.delta and settings.relay == "auto" else settings.relay)
        self.proofs = Proofs()
        self.transport, self.outlet = open_outlet(
            transport or settings.transport,
            bucket_bytes=self.bucket_bytes,
            num_slots=NUM_SLOTS,
            encrypted=encrypted,
        )
        self.on_gpu = any(isinstance(slot, Tensor) for slot in self.outlet.slots)
        """Whether buckets of `outlet` stay on the GPU."""
        self._ends = {self.transport: self._end_of(self.outlet)}
        """By transport."""
        offered = between_gpus(transport or settings.transport, encrypted=encrypted)
        self.between_gpus = offered if isinstance(memory, StagedWeights) else ()
        """Transports that subscribers may test."""
        self.driver_s = driver_limit_s(settings.timeout_s)
        """Longest wait for a driver."""
        self._refused: dict[str, TransportUnavailable] = {}
        """Why a transport of these cannot be used."""
        self._trying = threading.Lock()
        """Over what subscribers may test, and `_ends`."""
        self.link_outlet = Tcp().open(bucket_bytes=0, num_slots=0)
        """For subscribers that cannot use `outlet`: over the link, out of the slots of `outlet`."""
        self.sent_bytes = 0
        """Bytes of buckets sent so far."""
        self._plans: dict[tuple[bytes, tuple[int, ...]], TransferPlan] = {}
        self._guard = threading.Lock()
        """Over the two above."""
        if self.on_gpu and not isinstance(memory, StagedWeights):
            self.outlet.close()
            raise TransportUnavailable(f"{self.transport} moves weights of a GPU, without deltas; these are not")

    def route(self, transport: str) -> tuple[End, Outlet]:
        """Return the end in whose slots buckets are packed for a subscriber, and the outlet that sends them."""
        end = self._ends.get(transport)
        return (end, end.outlet) if end is not None else (self._ends[self.transport], self.link_outlet)

    def try_transport(self, name: str) -> Outlet:
        """Open an outlet between GPUs, once for all subscribers. Raises TransportUnavailable."""
        with self._trying:
            if name not in self.between_gpus:
                raise TransportUnavailable("the publisher does not offer it")
            if name in self._refused:
                raise self._refused[name]
            if name not in self._ends:
                kind = named(name)
                opening = partial(kind.open, bucket_bytes=self.bucket_bytes, num_slots=NUM_SLOTS)
                outlet = in_time(opening, limit_s=self.driver_s, late=lambda outlet: outlet.close())
                self._ends[name] = self._end_of(outlet)
                log_choice(f"weights are offered over {name} too")
            return self._ends[name].outlet

    def refuse(self, transport: str, reason: TransportUnavailable) -> None:
        """Let no further subscriber test a transport."""
        if transport in self.between_gpus:
            self._refused[transport] = reason

    def close_outlets(self) -> None:
        """Free all slots. Idempotent."""
        for end in self._ends.values():
            end.outlet.close()

    def _end_of(self, outlet: Outlet) -> End:
        return End(outlet, Slots(NUM_SLOTS, patience_s=max(self.settings.patience_s, LEAST_PATIENCE_S)))

    def plan_for(self, target: bytes, *, sources: tuple[int, ...]) -> TransferPlan:
        """Return the plan for an encoded target over these source ranks, () for all. Raises LayoutError as `plan`."""
        key = (target, sources)
        with self._guard:
            if key not in self._plans:
                manifest = self.memory.manifest
                self._plans[key] = plan(
                    manifest.only(sources) if sources else manifest,
                    Manifest.decode(target),
                    relay="off",
                    bucket_bytes=self.bucket_bytes,
                    wire_dtype=self.settings.dtype,
                )
                self.wire_dtypes = self._plans[key].wire_dtypes
                self.memory.want(self.wire_dtypes)
                while len(self._plans) > MOST_PLANS:
                    del self._plans[next(iter(self._plans))]
            return self._plans[key]

    def fill(self, version: int, bucket: Bucket, out: Block, copied: Raw | None) -> Proof | None:
        """Write a version's bucket into a slot: `copied`, or live memory. Return its hashes, if known afterwards."""
        if isinstance(out, Tensor):
            assert isinstance(self.memory, StagedWeights), "slots on a GPU are for weights there"
            if copied is None:
                return Proof(NOT_HASHED, self.memory.pack_on_gpu(bucket, out))
            self.memory.upload(copied, out)
            return Proof(NOT_HASHED, self.prove(version, bucket, packed_pieces(bucket, copied)).sums)
        if copied is None:
            return self.memory.pack(bucket, out)
        np.copyto(out, copied)
        return None

    def prove(
        self,
        version: int,
        bucket: Bucket,
        pieces: Iterable[tuple[BucketPiece, Raw]],
        *,
        known: Proof | None = None,
    ) -> Proof:
        """Return the hashes of a version's bucket, computed once. known: the same, if somebody has computed them."""
        proof = self.proofs.get(version, bucket)
        if proof is None:
            proof = known or prove(pieces, self._shapes)
            self.proofs.keep(version, bucket, proof)
            self.memory.keep_sums(version, bucket, proof.sums)
        return proof

    def count_sent(self, num_bytes: int) -> None:
        """Count the bytes of a bucket that was sent."""
        with self._guard:
            self.sent_bytes += num_bytes

"""One rank's weights, and the memory, plans and hashes that all its readers share.

    Slots       memory that buckets are packed into, shared by readers                  this file
    Spare       blocks for copies of buckets                                            this file
    Supply      memory, versions, slots, plans, hashes                                  this file
    Delivery    the buckets of one subscriber: packed in its thread, sent in another    delivery.py
    Session     one subscriber's requests and leases, with its delivery                 server.py
    Server      listens, and runs a session for each subscriber                         server.py

A publisher supplies the trainer's tensors, a subscriber the version it has staged (pull/peers.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from cosmos_rl_transfer.content.proof import NOT_HASHED, Proof, Proofs, packed_pieces, prove, shapes_of
from cosmos_rl_transfer.content.raw import Block, Raw
from cosmos_rl_transfer.content.staging import host_memory
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.planning.plan import Bucket, BucketPiece, TransferPlan, plan
from cosmos_rl_transfer.planning.relay import Relay
from cosmos_rl_transfer.publish.holders import Directory, Partial
from cosmos_rl_transfer.publish.outgoing import Outgoing
from cosmos_rl_transfer.publish.staged import StagedWeights
from cosmos_rl_transfer.publish.versions import Versions
from cosmos_rl_transfer.transports.base import ByteRun, Transport, TransportUnavailable
from cosmos_rl_transfer.transports.select import open_outlet
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


class Spare:
    """Blocks of one size. Any thread may call."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[Raw] = []
        self._taken: set[int] = set()
        self._guard = threading.Lock()

    def take(self, num_bytes: int) -> Raw:
        """Return uint8 [num_bytes] with any content; at most a block."""
        with self._guard:
            block = self._blocks.pop() if self._blocks else host_memory(self._block_bytes, lazy=True)
            self._taken.add(id(block))
        return block[:num_bytes]

    def give(self, taken: Raw) -> None:
        """Return what `take` returned, for the next `take`; other memory, such as a shared copy, is left alone."""
        with self._guard:
            if isinstance(taken.base, np.ndarray) and id(taken.base) in self._taken:
                self._taken.discard(id(taken.base))
                self._blocks.append(taken.base)

    def shrink(self) -> None:
        """Free half of the blocks: the last fence needed none."""
        with self._guard:
            del self._blocks[len(self._blocks) // 2 :]


NUM_SLOTS = 2
LEAST_PATIENCE_S = 0.5
"""A reader keeps a slot that others wait for at least so long."""
MOST_PLANS = 4
"""Plans kept: the ranks of a replica, and equal replicas, need the same one."""


class PublishedMemory(Protocol):
    """The memory of one rank's parts."""

    def runs(self, bucket: Bucket) -> list[ByteRun] | None:
        """Return the bucket's bytes in place, or None where they have to be packed."""
        ...

    def pack(self, bucket: Bucket, out: Raw) -> Proof:
        """Write the bucket's packed bytes into `out` uint8 [bucket.num_bytes]; return their hashes."""
        ...


class Supply:
    """Any thread may call."""

    def __init__(
        self,
        memory: PublishedMemory,
        manifest: Manifest,
        *,
        rank: int,
        wire_dtypes: Mapping[str, str],
        wire_dtype: str | None,
        bucket_bytes: int,
        transport: str | Transport,
        patience_s: float,
        relay: Relay = "off",
        outgoing: Outgoing | None = None,
        partial: Partial | None = None,
        staged: StagedWeights | None = None,
        encrypted: bool = False,
    ) -> None:
        """Allocate two slots of a bucket each.

        manifest, rank: what all ranks of this side hold, and which of them this is. wire_dtypes: by tensor, the dtype
        it travels in before a target has joined; wire_dtype: the option. outgoing: the same object as `memory` where
        deltas are on; staged: the same where the weights are on a GPU. partial: the buckets that a subscriber relays.
        encrypted: as for `open_outlet`.
        Raises TransportUnavailable where `transport` cannot serve.
        """
        self.memory, self.manifest, self.rank = memory, manifest, rank
        self.wire_dtype, self.bucket_bytes = wire_dtype, bucket_bytes
        self.wire_dtypes = wire_dtypes
        """Dtype by tensor in which weights travel to the target that joined last."""
        self._shapes = shapes_of(manifest)
        self.outgoing, self.partial, self.staged = outgoing, partial, staged
        self.spare = Spare(bucket_bytes)
        self.versions = Versions(recycle=self.spare.give)
        self.holders = Directory(relay)
        self.proofs = Proofs()
        self.slots = Slots(NUM_SLOTS, patience_s=max(patience_s, LEAST_PATIENCE_S))
        self.transport, self.outlet = open_outlet(
            transport, bucket_bytes=bucket_bytes, num_slots=NUM_SLOTS, encrypted=encrypted
        )
        self.on_gpu = any(isinstance(slot, Tensor) for slot in self.outlet.slots)
        """Whether buckets of `outlet` stay on the GPU."""
        if self.on_gpu and staged is None:
            self.outlet.close()
            raise TransportUnavailable(f"{self.transport} moves weights of a GPU, without deltas; these are not")
        self.link_outlet = Tcp().open(bucket_bytes=0, num_slots=0)
        """For subscribers that cannot use `outlet`: over the link, out of the slots of `outlet`."""
        self.sent_bytes = 0
        """Bytes of buckets sent so far."""
        self._plans: dict[tuple[bytes, int, tuple[int, ...]], TransferPlan] = {}
        self._guard = threading.Lock()
        """Over the two above."""

    def close(self) -> None:
        """End all waits for versions and free the slots. May be called twice."""
        self.versions.close()
        self.outlet.close()

    def plan_for(self, target: bytes, *, position: int, sources: tuple[int, ...]) -> TransferPlan:
        """Return the plan for an encoded target over these source ranks, () for all. Raises LayoutError as `plan`."""
        key = (target, position, sources)
        with self._guard:
            if key not in self._plans:
                self._plans[key] = plan(
                    self.manifest.only(sources) if sources else self.manifest,
                    Manifest.decode(target),
                    relay="off",
                    bucket_bytes=self.bucket_bytes,
                    wire_dtype=self.wire_dtype,
                    position=position,
                )
                self.wire_dtypes = self._plans[key].wire_dtypes
                if self.outgoing is not None:
                    self.outgoing.want(self.wire_dtypes)
                while len(self._plans) > MOST_PLANS:
                    del self._plans[next(iter(self._plans))]
            return self._plans[key]

    def copy(self, bucket: Bucket, copied: Raw | None = None) -> Raw:
        """Return a bucket's bytes in a spare block: those of `copied`, or those in live memory.

        From a GPU it is the copy that all readers share.
        """
        if self.staged is not None:
            return self.staged.packed(bucket).data if copied is None else copied
        out = self.spare.take(bucket.num_bytes)
        if copied is None:
            self.memory.pack(bucket, out)
        else:
            np.copyto(out, copied)
        return out

    def fill(self, version: int, bucket: Bucket, out: Block, copied: Raw | None) -> Proof | None:
        """Write a version's bucket into a slot: `copied`, or live memory. Return its hashes, if known afterwards."""
        if isinstance(out, Tensor):
            assert self.staged is not None, "slots on a GPU are for weights there"
            if copied is None:
                return Proof(NOT_HASHED, self.staged.pack_on_gpu(bucket, out))
            self.staged.upload(copied, out)
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
            if self.outgoing is not None:
                self.outgoing.keep_sums(version, bucket, proof.sums)
        return proof

    def count_sent(self, num_bytes: int) -> None:
        """Count the bytes of a bucket that was sent."""
        with self._guard:
            self.sent_bytes += num_bytes

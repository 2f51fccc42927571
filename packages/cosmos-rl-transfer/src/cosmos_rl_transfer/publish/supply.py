"""One rank's weights and all that the subscribers who read them share.

    Supply      memory, versions, slots, plans, hashes                                  this file
    Delivery    the buckets of one subscriber: packed in its thread, sent in another    delivery.py
    Session     one subscriber's requests and leases, with its delivery                 server.py
    Server      listens, and runs a session for each subscriber                         server.py

A publisher supplies the trainer's tensors, a subscriber the version it has staged (pull/peer_server.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from cosmos_rl_transfer.content.proof import Proof, Proofs, forms_of, pieces_hash, prove
from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.planning.plan import Bucket, Piece, Plan, plan
from cosmos_rl_transfer.planning.relay import Relay
from cosmos_rl_transfer.publish.holders import Directory
from cosmos_rl_transfer.publish.outgoing import Outgoing
from cosmos_rl_transfer.publish.partial import Partial
from cosmos_rl_transfer.publish.slots import Slots, Spare
from cosmos_rl_transfer.publish.versions import Versions
from cosmos_rl_transfer.transports.base import Run, Transport
from cosmos_rl_transfer.transports.select import open_outlet
from cosmos_rl_transfer.transports.tcp import Tcp

NUM_SLOTS = 2
LEAST_PATIENCE_S = 0.5
"""A reader keeps a slot that others wait for at least so long."""
MOST_PLANS = 4
"""Plans kept: the ranks of a replica, and equal replicas, need the same one."""


class Memory(Protocol):
    """The memory of one rank's parts."""

    def runs(self, bucket: Bucket) -> list[Run] | None:
        """Return the bucket's bytes in place, or None where they have to be packed."""
        ...

    def pack(self, bucket: Bucket, out: Raw) -> tuple[int, ...]:
        """Write the bucket's packed bytes into `out` uint8 [bucket.num_bytes]; return each piece's additive hash."""
        ...


class Supply:
    """Any thread may call."""

    def __init__(
        self,
        memory: Memory,
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
    ) -> None:
        """Allocate two slots of a bucket each.

        manifest, rank: what all ranks of this side hold, and which of them this is. wire_dtypes: by tensor, the dtype
        it travels in; wire_dtype: the option they follow from. outgoing: the same object as `memory` where deltas are
        on. partial: the buckets that a subscriber relays. Raises TransportUnavailable where `transport` cannot serve.
        """
        self.memory, self.manifest, self.rank = memory, manifest, rank
        self.wire_dtype, self.bucket_bytes = wire_dtype, bucket_bytes
        self.forms = forms_of(manifest, wire_dtypes)
        self.outgoing, self.partial = outgoing, partial
        self.spare = Spare(bucket_bytes)
        self.versions = Versions(recycle=self.spare.give)
        self.holders = Directory(relay)
        self.proofs = Proofs()
        self.slots = Slots(NUM_SLOTS, patience_s=max(patience_s, LEAST_PATIENCE_S))
        self.transport, self.outlet = open_outlet(transport, bucket_bytes=bucket_bytes, num_slots=NUM_SLOTS)
        self.link_outlet = Tcp().open(bucket_bytes=0, num_slots=0)
        """For subscribers that cannot use `outlet`: over the link, out of the slots of `outlet`."""
        self.sent_bytes = 0
        """Bytes of buckets sent so far."""
        self._plans: dict[tuple[bytes, int, tuple[int, ...]], Plan] = {}
        self._guard = threading.Lock()
        """Over the two above."""

    def close(self) -> None:
        """End all waits for versions and free the slots. May be called twice."""
        self.versions.close()
        self.outlet.close()

    def plan_for(self, target: bytes, *, position: int, sources: tuple[int, ...]) -> Plan:
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
                while len(self._plans) > MOST_PLANS:
                    del self._plans[next(iter(self._plans))]
            return self._plans[key]

    def copy(self, bucket: Bucket, copied: Raw | None = None) -> Raw:
        """Return a bucket's bytes in a spare block: those of `copied`, or those in live memory."""
        out = self.spare.take(bucket.num_bytes)
        if copied is None:
            self.memory.pack(bucket, out)
        else:
            np.copyto(out, copied)
        return out

    def prove(
        self,
        version: int,
        bucket: Bucket,
        pieces: Iterable[tuple[Piece, Raw]],
        *,
        sums: tuple[int, ...] | None = None,
    ) -> Proof:
        """Return the hashes of a version's bucket, computed once; `sums`: its pieces' additive hashes, if known."""
        proof = self.proofs.get(version, bucket)
        if proof is None:
            proof = prove(pieces, self.forms) if sums is None else Proof(pieces_hash(pieces), sums)
            self.proofs.keep(version, bucket, proof)
            if self.outgoing is not None:
                self.outgoing.keep_sums(version, bucket, proof.sums)
        return proof

    def count_sent(self, num_bytes: int) -> None:
        """Count the bytes of a bucket that was sent."""
        with self._guard:
            self.sent_bytes += num_bytes

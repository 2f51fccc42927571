"""What a publisher serves, and how: shared by the sessions of all its subscribers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cosmos_rl_transfer.content.digest import Raw
from cosmos_rl_transfer.content.proof import Form, Proof, Proofs, pieces_hash, prove
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.planning.plan import Bucket, Piece, Plan, plan
from cosmos_rl_transfer.publish.holders import Directory
from cosmos_rl_transfer.publish.outgoing import Outgoing
from cosmos_rl_transfer.publish.partial import Partial
from cosmos_rl_transfer.publish.ring import Ring, Spare
from cosmos_rl_transfer.publish.versions import Versions
from cosmos_rl_transfer.transports.base import Outlet, Run
from cosmos_rl_transfer.transports.tcp import Tcp


class Memory(Protocol):
    """Where one rank's parts lie."""

    def runs(self, bucket: Bucket) -> list[Run] | None:
        """Return the bucket's bytes where they lie, or None where they have to be packed."""
        ...

    def pack(self, bucket: Bucket, out: Raw) -> tuple[int, ...]:
        """Write the bucket's packed bytes into `out` uint8 [bucket.num_bytes]; return each piece's additive hash."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """Everything a session needs."""

    manifest: Manifest
    """All ranks of the publishing side."""
    rank: int
    wire_dtype: str | None
    bucket_bytes: int
    forms: Mapping[str, Form]
    memory: Memory
    versions: Versions
    spare: Spare
    """What `copy` copies into."""
    ring: Ring
    outlet: Outlet
    transport: str
    """Name of the transport that `outlet` is of."""
    link_outlet: Outlet = field(default_factory=lambda: Tcp().open(bucket_bytes=0, num_slots=0))
    """For subscribers that cannot use the other: over the link, out of the other's slots."""
    outgoing: Outgoing | None = None
    """The same as `memory` where deltas are on."""
    proofs: Proofs = field(default_factory=Proofs)
    plans: PlanCache = field(default_factory=lambda: PlanCache())
    holders: Directory = field(default_factory=Directory)
    partial: Partial | None = None
    """Of a subscriber that passes on."""
    sent: Sent = field(default_factory=lambda: Sent())

    def copy(self, bucket: Bucket, copied: Raw | None = None) -> Raw:
        """Return a bucket's bytes in memory of their own: those of `copied`, or those that lie in live memory."""
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
        """Return what proves a bucket of a version; `sums`: its pieces' additive hashes, if they are known."""
        proof = self.proofs.get(version, bucket)
        if proof is None:
            proof = prove(pieces, self.forms) if sums is None else Proof(pieces_hash(pieces), sums)
            self.proofs.keep(version, bucket, proof)
            if self.outgoing is not None:
                self.outgoing.keep_sums(version, bucket, proof.sums)
        return proof


class Sent:
    """Counts what was handed over. Any thread may add."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count a bucket."""
        with self._guard:
            self.num_bytes += num_bytes


class PlanCache:
    """Plans of the last few targets: the ranks of a replica, and replicas alike, ask for the same."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._guard = threading.Lock()
        self._known: dict[tuple[bytes, int, tuple[int, ...]], Plan] = {}

    def get(self, supply: Supply, target: bytes, *, position: int, sources: tuple[int, ...]) -> Plan:
        """Return the plan for an encoded target over these ranks, () for all. Raises LayoutError as `plan` does."""
        key = (target, position, sources)
        with self._guard:
            if key not in self._known:
                self._known[key] = plan(
                    supply.manifest.only(sources) if sources else supply.manifest,
                    Manifest.decode(target),
                    relay="off",
                    bucket_bytes=supply.bucket_bytes,
                    wire_dtype=supply.wire_dtype,
                    position=position,
                )
                while len(self._known) > self._most:
                    del self._known[next(iter(self._known))]
            return self._known[key]

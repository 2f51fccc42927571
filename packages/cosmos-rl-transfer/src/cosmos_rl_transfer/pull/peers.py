"""Rollouts serve rollouts: a replica that has staged a version serves it to late ones.

    holder                                        publisher                        joiner
    staged and verified v
    Holds(v, address)                    ------>  stores it
                                         <------  Registered
                                                  <------  FindHolders
                                                  ------>  Holders: addresses, least asked first
         <------------------------------------------------  Borrow(v), ReadBuckets ...   as from a publisher
    before it pulls v + 1: disconnects
    readers of v after PATIENCE_S        ------------------------------------------->  tries another, then the publisher

The trainers send nothing to a joiner, which can read even while they write. `choices`, `open_peers` and `RingPlace` are
the joiner's side, `Offer` the holder's.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from cosmos_rl_core.weight_sync import BETWEEN_GPUS, SyncSection
from cosmos_rl_core.wire.tls import Tls
from cosmos_rl_transfer.content.proof import Proof
from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.errors import LayoutError, PeerLost, TransferError
from cosmos_rl_transfer.layout.manifest import Manifest, TensorLayout
from cosmos_rl_transfer.planning.plan import Bucket, TransferPlan
from cosmos_rl_transfer.planning.relay import predecessor
from cosmos_rl_transfer.publish.holders import Partial
from cosmos_rl_transfer.publish.memory import PublishedMemory
from cosmos_rl_transfer.publish.server import WeightServer
from cosmos_rl_transfer.pull.landing import Shadow
from cosmos_rl_transfer.pull.sources import Feed, Sources, planned
from cosmos_rl_transfer.transports.base import ByteRun, Transport, TransportUnavailable
from cosmos_rl_transfer.wire.messages import Holders

log = logging.getLogger(__name__)

SILENCE_S = 5.0
"""Timeout of a silent peer; there are others."""
RING_SILENCE_S = 1.0
"""Timeout of a silent predecessor in a ring."""
MOST_TRIES = 4
"""Peers, or sets of them, that a joiner tries before the publishers."""


def choices(holders: Holders, *, layout: str, rank: int) -> Iterator[dict[int, str]]:
    """Yield sources for a joiner, best first: addresses by rank.

    A holder of the same part as `rank` in the manifest with digest `layout` comes first; else ranks of another layout
    together. The next choice has other addresses if there are any.
    """
    groups: defaultdict[str, defaultdict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for holder in holders.holders:
        groups[holder.layout][holder.rank].append(holder.address)
    if twins := groups.get(layout, {}).get(rank):
        yield from ({rank: address} for address in twins)
        del groups[layout]
    for ranks in groups.values():
        for turn in range(max(len(addresses) for addresses in ranks.values())):
            yield {r: addresses[turn % len(addresses)] for r, addresses in ranks.items()}


def open_peers(
    sources: Sources, addresses: Mapping[int, str], target: Manifest, *, rank: int, opened: ExitStack
) -> tuple[list[Feed], TransferPlan]:
    """Connect to those of `addresses`, by rank, that `rank` of `target` needs; `opened` closes them.

    Raises PeerLost, and LayoutError if they do not hold everything.
    """
    ranks = tuple(sorted(addresses))

    def connect(peer: int) -> Feed:
        feed = sources.open(addresses[peer], timeout_s=SILENCE_S)
        opened.callback(sources.drop, feed)
        if feed.welcome.rank != peer:
            raise LayoutError(f"rank {feed.welcome.rank} replied at the address of rank {peer}")
        return feed

    first = connect(ranks[0])
    plan = planned(first, target, sources=ranks)
    needed = [peer for peer in ranks if plan.stream(peer, rank)]
    return [first if peer == ranks[0] else connect(peer) for peer in needed], plan


@dataclass(frozen=True, slots=True)
class RingPlace:
    """A member of a ring whose subscribers relay buckets (planning/relay.py), and its sources by bucket.

    from the publishers           every R-th bucket of each stream
    from the predecessor          the others, as they land there
    missing buckets               from the publishers too: no member waits for a slow or lost one
    """

    members: tuple[str, ...]
    """Addresses, in the order of the ring."""
    position: int

    @classmethod
    def find(cls, members: tuple[str, ...], own: str | None) -> RingPlace | None:
        """Return the position of address `own`; None if it is not in the ring."""
        return cls(members, members.index(own)) if own is not None and own in members else None

    @property
    def before(self) -> str:
        """Address of the predecessor."""
        return self.members[self.position - 1]

    @property
    def share(self) -> tuple[int, int]:
        """Position and size, as in `Borrow`."""
        return self.position, len(self.members)

    def passed(self, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """Return the buckets that the predecessor relays."""
        return tuple(b for b in buckets if predecessor(b.index, self.position, len(self.members)) is not None)

    def join(
        self,
        feeds: Sequence[Feed],
        version: int,
        *,
        sources: Sources,
        plan_digest: str,
        transport: str | Transport,
        memory: Sequence[Raw],
        opened: ExitStack,
    ) -> list[Feed]:
        """Borrow from the predecessor the relayed buckets of each publisher's stream; `opened` closes the connections.

        Returns fewer, or none, if that member does not reply or has not begun the version.
        """
        passed: list[Feed] = []
        try:
            for source, buckets in ((feed.welcome.rank, self.passed(feed.buckets)) for feed in feeds):
                if buckets:
                    feed = sources.open(self.before, timeout_s=RING_SILENCE_S)
                    opened.callback(sources.drop, feed)
                    feed.join_ring(plan_digest, source=source, buckets=buckets, transport=transport, memory=memory)
                    feed.borrow(version, keep=False, base=-1)
                    passed.append(feed)
        except (TransferError, LayoutError, TransportUnavailable) as error:
            if sources.stopped:
                raise
            log.info("version %d is not relayed by %s: %s", version, self.before, error)
        return passed


PATIENCE_S = 0.2
"""Time that a pull waits for readers of the previous version."""


class ShadowMemory(PublishedMemory):
    """A subscriber's shadow, to be read by others in its own dtypes."""

    def __init__(self, shadow: Shadow, manifest: Manifest, *, rank: int) -> None:
        """manifest, rank: layout of all ranks of this replica, and this rank."""
        self._arena = shadow.arena
        dtypes = {name: slot.dtype for name, slot in self._arena.places.items()}
        layouts = (TensorLayout(replace(x.spec, dtype=dtypes[x.spec.name]), x.boxes) for x in manifest.layouts)
        super().__init__(Manifest(tuple(layouts), manifest.tied, manifest.replicas), rank=rank)

    def runs(self, bucket: Bucket) -> list[ByteRun] | None:
        return self._arena.runs(bucket)

    def pack(self, bucket: Bucket, out: Raw) -> Proof:
        return self._arena.pack(bucket, out)


class Offer:
    """A subscriber's service to others: its shadow, served from the first version on and announced to publishers."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        rank: int,
        settings: SyncSection,
        token: bytes,
        tls: Tls | None,
        transport: Transport | None,
    ) -> None:
        """transport: in place of the one that the settings name. Nothing is allocated before `open`."""
        self._manifest, self._rank, self._token, self._tls = manifest, rank, token, tls
        # an instance, or a process group, reaches one peer only; the shadow is in host memory
        one_to_one = transport is not None or settings.transport in ("collective", *BETWEEN_GPUS)
        changes: dict[str, Any] = {"patience_s": PATIENCE_S, "dtype": None, "delta": False, "relay": "off"}
        self._settings = settings.model_copy(update=changes | ({"transport": "auto"} if one_to_one else {}))
        self._server: WeightServer | None = None
        self._works = True
        self._version: int | None = None
        self.partial = Partial()
        """Buckets that can be read here."""

    @property
    def address(self) -> str | None:
        """Address for joiners; None before the first version."""
        return None if self._server is None else self._server.address

    def begin(self, version: int) -> None:
        """Serve landed buckets of an incoming version, after `fence`."""
        if self._server is not None:
            self.partial.begin(version)
            self._server.versions.publish(version)

    def open(self, version: int, shadow: Shadow, feeds: Sequence[Feed]) -> None:
        """Serve the version in the shadow and announce it to the publishers. Log one warning if that fails.

        Versions may decrease after a restart of the publishers.
        """
        if not self._works or not feeds:
            return
        if self._server is None:
            try:
                self._server = self._serve(shadow, feeds[0])
            except (TransportUnavailable, OSError) as error:
                self._works = False
                log.warning("other rollouts cannot read from this one: %s", error)
                return
        self._version = version
        if not self.partial.complete(version):
            self._server.versions.publish(version)
        with suppress(PeerLost):  # the next `stage` raises it
            self.announce(feeds)

    def _serve(self, shadow: Shadow, feed: Feed) -> WeightServer:
        """Listen at the address that the publisher at `feed` is reached from; nothing is readable yet."""
        server = WeightServer(
            ShadowMemory(shadow, self._manifest, rank=self._rank),
            settings=self._settings.model_copy(update={"bucket_bytes": feed.welcome.bucket_bytes}),
            token=self._token,
            tls=self._tls,
            bind=feed.link.local_host,
            partial=self.partial,
        )
        server.outlet.expose([shadow.arena.memory])
        return server

    def announce(self, feeds: Sequence[Feed]) -> None:
        """Announce the served version, if any, to publishers."""
        if self._server is not None and self._version is not None:
            for feed in feeds:
                feed.holds(self._version, self._server.address)

    def fence(self) -> None:
        """Return when the shadow may be written: readers get PATIENCE_S to finish, then are disconnected."""
        self._version = None
        if self._server is not None:
            self.partial.end()
            self._server.versions.fence(patience_s=PATIENCE_S, copy=False)
            self._server.proofs.forget()

    def close(self) -> None:
        """Disconnect all joiners and free the slots. Idempotent."""
        if self._server is not None:
            self._server.close()

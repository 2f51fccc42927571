"""Rollouts serve rollouts: a replica that has staged a version serves it to late ones.

    holder                                        publisher                        joiner
    staged and verified v
    Holds(v, address)                    ------>  remembers
                                         <------  Registered
                                                  <------  WhoHolds
                                                  ------>  Holders: addresses, least asked first
         <------------------------------------------------  Borrow(v), ReadBucket ...   as from a publisher
    about to pull v + 1: disconnects
    readers of v after PATIENCE_S        ------------------------------------------->  tries another, then the publisher

The trainers send nothing to a joiner, which can read even while they write.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.errors import LayoutError, TransferError
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.planning.plan import Bucket, Plan
from cosmos_rl_transfer.planning.relay import predecessor
from cosmos_rl_transfer.pull.feed import Feed
from cosmos_rl_transfer.pull.sources import Sources, planned
from cosmos_rl_transfer.transports.base import Transport, TransportUnavailable
from cosmos_rl_transfer.wire.messages import Holders

log = logging.getLogger(__name__)

SILENCE_S = 5.0
"""Timeout of a silent peer; there are others."""
RING_SILENCE_S = 1.0
"""Timeout of a silent predecessor in a ring."""
MOST_TRIES = 4
"""Peers, or sets of them, that a joiner tries before the publishers."""


def choices(found: Holders, *, layout: str, rank: int) -> Iterator[dict[int, str]]:
    """Yield sources for a joiner, best first: addresses by rank.

    A holder of the same part as `rank` in the manifest with digest `layout` comes first; else ranks of another layout
    together. The next choice has other addresses if there are any.
    """
    groups: defaultdict[str, defaultdict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for holder in found.holders:
        groups[holder.layout][holder.rank].append(holder.address)
    if twins := groups.get(layout, {}).get(rank):
        yield from ({rank: address} for address in twins)
        del groups[layout]
    for ranks in groups.values():
        for turn in range(max(len(addresses) for addresses in ranks.values())):
            yield {r: addresses[turn % len(addresses)] for r, addresses in ranks.items()}


def open_peers(
    sources: Sources, addresses: Mapping[int, str], target: Manifest, *, rank: int, position: int, opened: ExitStack
) -> tuple[list[Feed], Plan]:
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
    made = planned(first, target, sources=ranks, position=position)
    needed = [peer for peer in ranks if made.stream(peer, rank)]
    return [first if peer == ranks[0] else connect(peer) for peer in needed], made


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
    ) -> list[tuple[Feed, int]]:
        """Borrow from the predecessor the relayed buckets of each publisher's stream; `opened` closes the connections.

        Returns fewer, or none, if that member does not reply or has not begun the version.
        """
        passed: list[tuple[Feed, int]] = []
        try:
            for source, buckets in ((feed.welcome.rank, self.passed(feed.buckets)) for feed in feeds):
                if buckets:
                    feed = sources.open(self.before, timeout_s=RING_SILENCE_S)
                    opened.callback(sources.drop, feed)
                    feed.join_ring(plan_digest, source=source, buckets=buckets, transport=transport, memory=memory)
                    passed.append((feed, feed.borrow(version, keep=False, held=-1)))
        except (TransferError, LayoutError, TransportUnavailable) as error:
            if sources.stopped:
                raise
            log.info("version %d is not relayed by %s: %s", version, self.before, error)
        return passed

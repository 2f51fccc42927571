"""Rollouts feed rollouts: whoever has staged a version serves it to those that come late.

    holder                                        publisher                        joiner
    staged and verified v
    Holds(v, address)                    ------>  remembers
                                         <------  Noted
                                                  <------  WhoHolds
                                                  ------>  Holders: addresses, least asked first
         <------------------------------------------------  Borrow(v), ReadBucket ...   as from a publisher
    about to pull v + 1: who reads v
    is dropped after a moment            ------------------------------------------->  asks another, then the publisher

The trainers send nothing for a joiner, not even while they write and nobody could read from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.planning.plan import Plan
from cosmos_rl_transfer.pull.feed import Feed
from cosmos_rl_transfer.pull.sources import Sources, planned
from cosmos_rl_transfer.wire.messages import Holders

SILENCE_S = 5.0
"""A peer that sends nothing for so long is given up: there are others."""
MOST_TRIES = 4
"""Peers, or sets of them, that a joiner tries before it turns to the publishers."""


def choices(found: Holders, *, layout: str, rank: int) -> Iterator[dict[int, str]]:
    """Yield whom a joiner may read from, best first: addresses by their rank.

    One whose part is the very same as that of `rank` in the manifest with digest `layout` comes first; else ranks of
    another layout together. The next choice has other addresses where there are any.
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
    """Connect to those of `addresses`, by their rank, that `rank` of `target` needs; `opened` will close them.

    Raises PeerLost, and LayoutError where they do not hold everything.
    """
    ranks = tuple(sorted(addresses))

    def connect(peer: int) -> Feed:
        feed = sources.open(addresses[peer], timeout_s=SILENCE_S)
        opened.callback(sources.drop, feed)
        if feed.welcome.rank != peer:
            raise LayoutError(f"rank {feed.welcome.rank} answers where rank {peer} was said to be")
        return feed

    first = connect(ranks[0])
    made = planned(first, target, sources=ranks, position=position)
    needed = [peer for peer in ranks if made.stream(peer, rank)]
    return [first if peer == ranks[0] else connect(peer) for peer in needed], made

"""One member of a ring that passes buckets on (relay.py): what it reads from publishers, and what from the one before.

begin(v)                      the next in the ring may read from here, as fast as buckets land
from the publishers           every R-th bucket of each stream
from the one before           the others, when it has them
what does not come that way   from the publishers too: nobody waits for a member that is slow or gone
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from cosmos_rl_transfer.content.digest import Raw
from cosmos_rl_transfer.errors import LayoutError, TransferError
from cosmos_rl_transfer.planning.plan import Bucket
from cosmos_rl_transfer.planning.relay import predecessor
from cosmos_rl_transfer.pull.feed import Feed
from cosmos_rl_transfer.pull.sources import Sources
from cosmos_rl_transfer.transports.base import Transport, TransportUnavailable

log = logging.getLogger(__name__)

SILENCE_S = 1.0
"""How long the one before may send nothing."""


@dataclass(frozen=True, slots=True)
class Place:
    """A member's place in its ring."""

    members: tuple[str, ...]
    """Addresses, in the order of the ring."""
    position: int

    @classmethod
    def find(cls, members: tuple[str, ...], own: str | None) -> Place | None:
        """Return the place of `own`; None if it is not in the ring."""
        return cls(members, members.index(own)) if own is not None and own in members else None

    @property
    def before(self) -> str:
        """Address of the member before."""
        return self.members[self.position - 1]

    @property
    def share(self) -> tuple[int, int]:
        """What `Borrow` says of it."""
        return self.position, len(self.members)

    def passed(self, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """Return those that the member before passes on."""
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
        """Borrow from the member before what it passes on of each publisher's stream; `opened` closes the connections.

        Returns fewer, or none, where that member does not answer or has not begun with the version.
        """
        passed: list[tuple[Feed, int]] = []
        try:
            for source, buckets in ((feed.welcome.rank, self.passed(feed.buckets)) for feed in feeds):
                if buckets:
                    feed = sources.open(self.before, timeout_s=SILENCE_S)
                    opened.callback(sources.drop, feed)
                    feed.join_ring(plan_digest, source=source, buckets=buckets, transport=transport, memory=memory)
                    passed.append((feed, feed.borrow(version, keep=False, held=-1)))
        except (TransferError, LayoutError, TransportUnavailable) as error:
            if sources.stopped:
                raise
            log.info("version %d is not passed on by %s: %s", version, self.before, error)
        return passed

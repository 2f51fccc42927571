"""Subscribers that serve versions beside the publishers.

Directory    at a publisher: the holders of each version, and the rings that relay one
Partial      at a holder: the buckets that can be read, while a version arrives and after it
"""

from __future__ import annotations

import threading
from collections import Counter

from cosmos_rl_transfer.errors import Superseded
from cosmos_rl_transfer.planning.plan import Bucket, TransferPlan
from cosmos_rl_transfer.planning.relay import Relay
from cosmos_rl_transfer.wire.messages import Holder, Holders


class Directory:
    """The subscribers that hold a version, by their own reports. Any thread may call."""

    def __init__(self, relay: Relay = "off") -> None:
        """relay: whether subscribers that want the same buckets pass them on; "auto" where that can be faster."""
        self.num_hosts = 1
        """Hosts that publish."""
        self._relay = relay
        self._rings: dict[tuple[str, int], tuple[str, ...]] = {}
        """By plan and rank, of one version."""
        self._ring_version = -1
        self._guard = threading.Lock()
        self._known: dict[object, tuple[int, Holder]] = {}
        """Version and holder, by the session that reported them."""
        self._num_requests: Counter[Holder] = Counter()
        """Number of times that a holder was listed first for its rank."""

    def enter(self, owner: object, version: int, holder: Holder) -> None:
        """Record that `owner` serves a version, in place of its former one."""
        with self._guard:
            self._known[owner] = version, holder

    def leave(self, owner: object) -> None:
        """Forget `owner`."""
        with self._guard:
            _, holder = self._known.pop(owner, (-1, None))
            if holder is not None:
                del self._num_requests[holder]

    def find(self, after: int) -> Holders:
        """Return the newest served version, if it is newer than `after`, and its holders, least asked first."""
        with self._guard:
            version = max((version for version, _ in self._known.values()), default=-1)
            if version <= after:
                return Holders(-1, ())
            holders = [holder for served, holder in self._known.values() if served == version]
            holders.sort(key=lambda holder: self._num_requests[holder])
            first = {(holder.layout, holder.rank): holder for holder in reversed(holders)}
            self._num_requests.update(first.values())
            return Holders(version, tuple(holders))

    def ring(self, owner: object, version: int) -> tuple[str, ...]:
        """Return who passes a version on to one another, addresses in order; () if nobody does, or `owner` does not.

        It is the same for all members, whoever comes or goes while the version travels.
        """
        with self._guard:
            if self._relay == "off" or owner not in self._known:
                return ()
            if version != self._ring_version:
                self._rings, self._ring_version = {}, version
            own = self._known[owner][1]
            key = own.plan, own.rank
            if key not in self._rings:
                alike = (holder for _, holder in self._known.values() if (holder.plan, holder.rank) == key)
                self._rings[key] = self._worth(sorted(holder.address for holder in alike))
            ring = self._rings[key]
            return ring if own.address in ring else ()

    def _worth(self, addresses: list[str]) -> tuple[str, ...]:
        """Return a ring's addresses, () where it does not pay: where they have no more hosts than the publishers."""
        num_hosts = len({address.rpartition(":")[0] for address in addresses})
        pays = len(addresses) > 1 and (self._relay == "on" or num_hosts > self.num_hosts)
        return tuple(addresses) if pays else ()


PASS_ON_S = 0.5
"""Time that the next member of a ring waits for a bucket that has not arrived."""


class Partial:
    """The buckets of one version that can be read here. Any thread may ask; one pulls."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version = -1
        self._is_whole = False
        self._landed: set[tuple[int, int]] = set()
        self._plan: TransferPlan | None = None
        self._rank = 0

    @property
    def is_whole(self) -> bool:
        """Whether all buckets can be read."""
        return self._is_whole

    @property
    def plan_digest(self) -> str:
        """Of the plan by which publishers send to this rank, "" before there is one."""
        return "" if self._plan is None else self._plan.digest

    def set_plan(self, plan: TransferPlan, rank: int) -> None:
        """Set the plan by which the publishers send to this rank."""
        with self._changed:
            self._plan, self._rank = plan, rank

    def stream(self, plan_digest: str, source: int) -> tuple[Bucket, ...] | None:
        """Return the buckets that come from a source rank; None if they come by another plan."""
        with self._changed:
            if self._plan is None or self._plan.digest != plan_digest:
                return None
            return self._plan.stream(source, self._rank)

    def begin(self, version: int) -> None:
        """Serve each bucket of a version from its arrival on."""
        with self._changed:
            self._version, self._is_whole = version, False
            self._landed.clear()
            self._changed.notify_all()

    def landed(self, bucket: Bucket) -> None:
        """Record a verified and landed bucket."""
        with self._changed:
            self._landed.add((bucket.source, bucket.index))
            self._changed.notify_all()

    def complete(self, version: int) -> bool:
        """Record that all buckets have landed; returns whether the version had begun before."""
        with self._changed:
            begun = self._version == version
            self._version, self._is_whole = version, True
            self._changed.notify_all()
            return begun

    def end(self) -> None:
        """Serve no bucket from now on."""
        self.begin(-1)

    def wait(self, version: int, bucket: Bucket, *, timeout_s: float) -> None:
        """Wait for a bucket of a version that has begun. Raises Superseded if it does not come in time, or at all."""
        key = bucket.source, bucket.index

        def here() -> bool:
            return self._version == version and (self._is_whole or key in self._landed)

        with self._changed:
            self._changed.wait_for(lambda: here() or self._version != version, timeout_s)
            if not here():
                raise Superseded(f"bucket {bucket.index} of version {version} has not arrived here")

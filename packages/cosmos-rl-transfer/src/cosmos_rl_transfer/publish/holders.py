"""Subscribers that serve versions beside the publishers."""

from __future__ import annotations

import threading
from collections import Counter

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
        """By who said it: version and holder."""
        self._asked: Counter[Holder] = Counter()
        """Times that a holder was the first to be named for its rank."""

    def enter(self, owner: object, version: int, holder: Holder) -> None:
        """Note that `owner` serves a version; what it served before is gone."""
        with self._guard:
            self._known[owner] = version, holder

    def leave(self, owner: object) -> None:
        """Forget `owner`."""
        with self._guard:
            _, holder = self._known.pop(owner, (-1, None))
            if holder is not None:
                del self._asked[holder]

    def find(self, after: int) -> Holders:
        """Return the newest version that anybody serves, if it is newer than `after`, and who, least asked first."""
        with self._guard:
            version = max((version for version, _ in self._known.values()), default=-1)
            if version <= after:
                return Holders(-1, ())
            found = [holder for held, holder in self._known.values() if held == version]
            found.sort(key=lambda holder: self._asked[holder])
            first = {(holder.layout, holder.rank): holder for holder in reversed(found)}
            self._asked.update(first.values())
            return Holders(version, tuple(found))

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

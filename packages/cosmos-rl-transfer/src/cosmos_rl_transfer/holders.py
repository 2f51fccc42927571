"""Who serves which version beside the publishers."""

from __future__ import annotations

import threading
from collections import Counter

from cosmos_rl_transfer.messages import Holder, Holders


class Directory:
    """What subscribers have said of themselves. Any thread may call."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._known: dict[object, tuple[int, Holder]] = {}
        """By who said it: version and holder."""
        self._asked: Counter[Holder] = Counter()
        """How often a holder was the first to be named for its rank."""

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

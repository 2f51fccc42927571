"""Two slots, the versions in them, and who is reading: the rules of the double buffer, without a socket.

writer   slot = begin(deadline)      the older slot; waits for its leases, then revokes those that are left
         ... packs ...
         commit(slot, version)       newest from now on; wakes all who wait
reader   wait_newer(after)           newest version
         lend(version) -> lease      only on the newest
         valid(lease)                False once revoked: what was read since may be torn
         give_back(lease)
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from itertools import count

from cosmos_rl_transfer.stream import StreamDigest
from cosmos_rl_transfer.transports.base import Segment


@dataclass(slots=True)
class Slot:
    """One snapshot."""

    index: int
    segment: Segment
    version: int = -1
    """-1 while it holds nothing or is being written."""
    tensor_sums: dict[str, int] = field(default_factory=dict)
    """Additive hash of this rank's part of each tensor, taken while packing."""
    stream_digests: dict[tuple[str, int], StreamDigest] = field(default_factory=dict)
    """By (plan digest, target rank): hashes of the streams that were asked for."""
    leases: set[int] = field(default_factory=set)


class Snapshots:
    """The double buffer. All methods may be called from any thread."""

    def __init__(self, segments: list[Segment]) -> None:
        self.slots = [Slot(i, segment) for i, segment in enumerate(segments)]
        self.newest = -1
        """Newest version that can be read; -1 before the first."""
        self._changed = threading.Condition()
        self._lease_numbers = count(1)
        self._closed = False

    def begin(self, *, patience_s: float) -> Slot:
        """Take the slot that does not hold the newest version, revoking its leases after `patience_s`."""
        deadline = time.monotonic() + patience_s
        with self._changed:
            slot = next(s for s in self.slots if s.version != self.newest or s.version < 0)
            self._changed.wait_for(lambda: not slot.leases, max(0.0, deadline - time.monotonic()))
            slot.leases.clear()
            slot.stream_digests.clear()
            slot.version = -1
        return slot

    def commit(self, slot: Slot, version: int) -> None:
        """Make the slot's content the newest version."""
        with self._changed:
            slot.version = self.newest = version
            self._changed.notify_all()

    def wait_newer(self, after: int, *, timeout_s: float) -> int | None:
        """Return the newest version once it is larger than `after`; None after `timeout_s` or when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.newest > after, timeout_s)
            return self.newest if self.newest > after else None

    def lend(self, version: int) -> tuple[int, Slot] | None:
        """Lease the slot that holds `version`, if it is still the newest."""
        with self._changed:
            if version != self.newest:
                return None
            slot = next(s for s in self.slots if s.version == version)
            lease = next(self._lease_numbers)
            slot.leases.add(lease)
            return lease, slot

    def valid(self, lease: int) -> bool:
        """Say whether the lease holds, that is, whether its slot has not been touched since it was lent."""
        with self._changed:
            return any(lease in slot.leases for slot in self.slots)

    def keep_digest(self, lease: int, key: tuple[str, int], digest: StreamDigest) -> bool:
        """Keep hashes taken under a lease for other readers; returns whether the lease held until now."""
        with self._changed:
            held = [slot for slot in self.slots if lease in slot.leases]
            for slot in held:
                slot.stream_digests[key] = digest
            return bool(held)

    def give_back(self, lease: int) -> bool:
        """End a lease; returns whether it held until now."""
        with self._changed:
            held = [slot for slot in self.slots if lease in slot.leases]
            for slot in held:
                slot.leases.remove(lease)
            self._changed.notify_all()
            return bool(held)

    def close(self) -> None:
        """Wake everybody who waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

"""Volatile state of connections: times of the last messages, waiting requests.

It is not journaled. After a restart the replicas reconnect and repeat their requests, and all timers start again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Session:
    """One replica's connection. Times are the `now` of the event that set them, in seconds."""

    last_message: float
    """Time of the replica's last message."""
    progress: int = -1
    """Highest reported progress counter."""
    suspect_since: float | None = None
    is_closed: bool = False
    """The connection was closed: only a new Join ends the suspicion."""


class Sessions:
    """All connections."""

    def __init__(self) -> None:
        self.by_name: dict[str, Session] = {}
        self.batch_requests: dict[str, None] = {}
        """Policy replicas waiting for the next batch, in order of arrival."""
        self.lease_requests: dict[tuple[int, int], dict[str, int]] = {}
        """(lineage, version) of the weights -> requested capacity of each waiting rollout replica, in order."""
        self._weights: dict[str, tuple[int, int]] = {}  # replica -> its key in lease_requests
        self._renewed: dict[int, float] = {}  # lease's sample -> last renewal, oldest first

    def open(self, replica: str, now: float) -> None:
        self.close(replica)
        self.by_name[replica] = Session(now)

    def close(self, replica: str) -> None:
        """Delete a replica's session and its requests."""
        self.by_name.pop(replica, None)
        self.withdraw(replica)

    def withdraw(self, replica: str) -> None:
        """Delete a replica's requests."""
        self.batch_requests.pop(replica, None)
        key = self._weights.pop(replica, None)
        if key is not None:
            del self.lease_requests[key][replica]
            if not self.lease_requests[key]:
                del self.lease_requests[key]

    def ask_leases(self, replica: str, *, lineage: int, version: int, capacity: int) -> None:
        """Queue a request for leases; it replaces an earlier one."""
        self.withdraw(replica)
        self._weights[replica] = (lineage, version)
        self.lease_requests.setdefault((lineage, version), {})[replica] = capacity

    def waiting_rollouts(self) -> list[str]:
        return list(self._weights)

    def renew(self, sample: int, now: float) -> None:
        """Reset a lease's time to live."""
        self._renewed.pop(sample, None)
        self._renewed[sample] = now

    def end_lease(self, sample: int) -> None:
        self._renewed.pop(sample, None)

    def expired(self, before: float) -> Iterator[int]:
        """Yield and delete the leases that were not renewed since `before`."""
        while self._renewed:
            sample, renewed = next(iter(self._renewed.items()))
            if renewed > before:
                return
            del self._renewed[sample]
            yield sample

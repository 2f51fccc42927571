"""The members of a run: replicas with their incarnations, the mesh of policy replicas that train together, sessions.

    (join) -> JOINING -> READY <-> SUSPECT -> GONE
                 \\---------------^     a suspect that returns within the grace keeps its incarnation

An incarnation is one process of a replica. A new process raises it; messages of an older one are rejected (fenced).

`Sessions` is the volatile part: times of the last messages, waiting requests. It is not journaled; after a restart the
replicas reconnect and repeat their requests, and all timers start again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from cosmos_rl_core.control.protocol import Role


class MemberState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    GONE = "gone"


class Member(msgspec.Struct, array_like=True):
    """One replica."""

    role: Role
    incarnation: int = 0
    state: MemberState = MemberState.JOINING
    was_ready: bool = False
    """Whether this incarnation was ever READY: the state to which a suspect returns."""

    @property
    def is_live(self) -> bool:
        return self.state is not MemberState.GONE


class MemberTable(msgspec.Struct, array_like=True):
    """All members as one value, for snapshots and comparisons."""

    by_name: dict[str, Member]
    epoch: int
    mesh: tuple[str, ...]


class Members:
    """All replicas of the run, past ones included. Changed only by `apply`."""

    def __init__(self) -> None:
        self.by_name: dict[str, Member] = {}
        self.epoch = 0
        """Rises with every new mesh and every rollback; messages of earlier epochs are void."""
        self.mesh: tuple[str, ...] = ()
        """Policy replicas that train together, sorted; empty before the first mesh and when all were lost."""
        self.num_ready_rollouts = 0

    def is_current(self, replica: str, incarnation: int) -> bool:
        """Return whether this is the replica's newest process and was not removed."""
        member = self.by_name.get(replica)
        return member is not None and member.incarnation == incarnation and member.is_live

    def live(self) -> list[str]:
        return [name for name, member in self.by_name.items() if member.is_live]

    def ready_policies(self) -> tuple[str, ...]:
        """Return the policy replicas that can train, sorted; suspects in the mesh are included, as they may return."""
        return tuple(
            sorted(
                name
                for name, member in self.by_name.items()
                if member.role == "policy"
                and (member.state is MemberState.READY or (member.is_live and name in self.mesh))
            )
        )

    def dump(self) -> MemberTable:
        """Return the complete state in canonical order."""
        return MemberTable(dict(sorted(self.by_name.items())), self.epoch, self.mesh)

    @classmethod
    def load(cls, table: MemberTable) -> Members:
        """Return the members of a dump."""
        members = cls()
        members.by_name, members.epoch, members.mesh = table.by_name, table.epoch, table.mesh
        members.num_ready_rollouts = sum(
            member.role == "rollout" and member.state is MemberState.READY for member in table.by_name.values()
        )
        return members

    def join(self, replica: str, role: Role, incarnation: int) -> None:
        if replica in self.by_name:
            self.move(replica, MemberState.GONE)
        self.by_name[replica] = Member(role, incarnation)

    def move(self, replica: str, state: MemberState) -> None:
        member = self.by_name[replica]
        member.was_ready |= state is MemberState.READY
        if member.role == "rollout":
            self.num_ready_rollouts += (state is MemberState.READY) - (member.state is MemberState.READY)
        member.state = state


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

    def queue_lease_request(self, replica: str, *, lineage: int, version: int, capacity: int) -> None:
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

"""The members of a run: replicas with their incarnations, the mesh of policy replicas that train together, sessions.

    (join) -> JOINING -> READY <-> SUSPECT -> GONE
                 \\---------------^     a suspect that returns within the grace keeps its incarnation

An incarnation is one process of a replica. A new process raises it; messages of an older one are rejected (fenced).

`Sessions` is the volatile part: times of the last messages, waiting requests. It is not journaled; after a restart the
replicas reconnect and repeat their requests, and all timers start again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from cosmos_rl_core.control import protocol as p
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
    has_weights: bool = False
    """Policy: whether it certainly has the current weights: it was in the first mesh, or in the mesh at a commit."""

    @property
    def has_worked(self) -> bool:
        """Whether it was ready, a policy with the weights of the others: what it raises later may happen to others."""
        return self.has_weights if self.role == "policy" else self.was_ready

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
        self.policies: dict[str, Member] = {}
        """The policy replicas of `by_name`: few, where rollout replicas may be thousands."""
        self.epoch = 0
        """Rises with every new mesh and every rollback; messages of earlier epochs are void."""
        self.mesh: tuple[str, ...] = ()
        """Policy replicas that train together, the oldest first; empty before the first mesh and when all were lost."""
        self.num_ready_rollouts = 0

    def is_current(self, replica: str, incarnation: int) -> bool:
        """Return whether this is the replica's newest process and was not removed."""
        member = self.by_name.get(replica)
        return member is not None and member.incarnation == incarnation and member.is_live

    def has_rollouts(self) -> bool:
        """Return whether a rollout replica is left."""
        return any(member.is_live and member.role == "rollout" for member in self.by_name.values())

    def live(self) -> list[str]:
        return [name for name, member in self.by_name.items() if member.is_live]

    def ready_policies(self) -> tuple[str, ...]:
        """Return the policy replicas that can train, sorted; suspects in the mesh are included, as they may return."""
        return tuple(
            sorted(
                name
                for name, member in self.policies.items()
                if member.state is MemberState.READY or (member.is_live and name in self.mesh)
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
        members.policies = {name: member for name, member in table.by_name.items() if member.role == "policy"}
        members.num_ready_rollouts = sum(
            member.role == "rollout" and member.state is MemberState.READY for member in table.by_name.values()
        )
        return members

    def join(self, replica: str, role: Role, incarnation: int) -> None:
        if replica in self.by_name:
            self.move(replica, MemberState.GONE)
            self.policies.pop(replica, None)
        member = self.by_name[replica] = Member(role, incarnation)
        if role == "policy":
            self.policies[replica] = member

    def have_weights(self) -> None:
        """All members of the mesh have the current weights."""
        for name in self.mesh:
            self.by_name[name].has_weights = True

    def move(self, replica: str, state: MemberState) -> None:
        member = self.by_name[replica]
        member.was_ready |= state is MemberState.READY
        if member.role == "rollout":
            self.num_ready_rollouts += (state is MemberState.READY) - (member.state is MemberState.READY)
        member.state = state


@dataclass(slots=True)
class MemberSession:
    """One replica's connection. Times are the `now` of the event that set them, in seconds."""

    last_message: float
    """Time of the replica's last message."""
    progress: int = -1
    """Highest reported progress counter."""
    progressed_at: float = 0.0
    """Time of the last progress."""
    waits_for_peers: bool = False
    """Policy: whether it waits for other policies of its mesh, as of the last heartbeat."""
    joined_epoch: int = 0
    """Policy: the newest epoch in which it has asked for a batch: it is connected to its mesh."""
    rows_since: float | None = None
    """Rollout: since when it has had rows of an evaluation in work."""
    stuck_since: float | None = None
    """Rollout: when it had made no progress for a lease's time to live; None again after progress."""
    deferred: p.RequestLeases | None = None
    """Its request for leases while it is stuck."""
    suspect_since: float | None = None
    grace_s: float | None = None
    """Time to return after a restart of the controller; None: that of any suspect."""
    is_closed: bool = False
    """The connection was closed: only a new Join ends the suspicion."""


@dataclass(slots=True)
class Accusations:
    """The members of the mesh that others of it cannot reach."""

    epoch: int
    since: float
    by: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Accuser -> the accused."""


class Sessions:
    """All connections."""

    def __init__(self) -> None:
        self.by_name: dict[str, MemberSession] = {}
        self.batch_requests: dict[str, None] = {}
        """Policy replicas waiting for the next batch, in order of arrival."""
        self.lease_requests: dict[tuple[int, int], dict[str, int]] = {}
        """(lineage, version) of the weights -> requested capacity of each queued rollout replica, in order."""
        self.waiting: dict[str, tuple[int, int]] = {}
        """(lineage, version) of the weights of each rollout replica that waits for leases."""
        self.at_share: dict[str, int] = {}
        """Waiting rollout replicas that are not queued, with capacity: they hold their share of the window."""
        self.share = 0
        """Maximum number of leases per replica."""
        self.leaving: dict[str, float] = {}
        """Policies that want to leave others, and wait for the answer -> when they asked."""
        self.accusations: Accusations | None = None
        self.reconnections = 0
        """Times that the mesh connected anew since the last commit."""
        self.progress_before: dict[str, int] = {}
        """Progress of each member of the mesh when it connected anew for the first time since the last commit."""
        self._renewed: dict[int, float] = {}  # lease's sample -> last renewal, oldest first

    def open(self, replica: str, now: float) -> None:
        self.close(replica)
        self.by_name[replica] = MemberSession(now, progressed_at=now)

    def close(self, replica: str) -> None:
        """Delete a replica's session and its requests."""
        self.by_name.pop(replica, None)
        self.leaving.pop(replica, None)
        self.withdraw(replica)

    def starts_anew(self, replica: str, now: float) -> None:
        """Restart the time without progress."""
        if (session := self.by_name.get(replica)) is not None:
            session.progressed_at, session.waits_for_peers = now, False

    def withdraw(self, replica: str) -> None:
        """Delete a replica's requests."""
        self.batch_requests.pop(replica, None)
        key = self.waiting.pop(replica, None)
        if key is not None and self.at_share.pop(replica, None) is None:
            self._unqueue(replica, key)

    def queue_lease_request(self, replica: str, *, lineage: int, version: int, capacity: int) -> None:
        """Queue a request for leases; it replaces an earlier one."""
        self.withdraw(replica)
        self.waiting[replica] = (lineage, version)
        self.lease_requests.setdefault((lineage, version), {})[replica] = capacity

    def defer_if_stuck(self, replica: str, now: float, limit_s: float) -> None:
        """Grant nothing to a rollout replica without progress for `limit_s`; its request is kept for later."""
        session = self.by_name[replica]
        if session.stuck_since is not None or now - session.progressed_at < limit_s:
            return
        session.stuck_since = now
        if (key := self.waiting.get(replica)) is not None:
            lineage, version = key
            capacity = self.at_share.get(replica) or self.lease_requests[key][replica]
            session.deferred = p.RequestLeases(version, capacity, lineage)
            self.withdraw(replica)

    def set_aside(self, replica: str) -> None:
        """Remove the request of a replica that holds its share from the queue, until it loses a lease."""
        self.at_share[replica] = self._unqueue(replica, self.waiting[replica])

    def use_share(self, share: int) -> None:
        """Set the share; a larger one puts all requests back into the queue."""
        if share > self.share:
            for replica in list(self.at_share):
                self._requeue(replica)
        self.share = share

    def _unqueue(self, replica: str, key: tuple[int, int]) -> int:
        queue = self.lease_requests[key]
        capacity = queue.pop(replica)
        if not queue:
            del self.lease_requests[key]
        return capacity

    def _requeue(self, replica: str) -> None:
        capacity = self.at_share.pop(replica, None)
        if capacity is not None:
            self.lease_requests.setdefault(self.waiting[replica], {})[replica] = capacity

    def renew(self, samples: Sequence[int], now: float) -> None:
        """Reset the time to live of leases."""
        renewed = self._renewed
        for sample in samples:
            renewed.pop(sample, None)
        renewed.update(dict.fromkeys(samples, now))

    def end_lease(self, sample: int, replica: str) -> None:
        """Stop the lease's time; its replica may get another."""
        self._renewed.pop(sample, None)
        self._requeue(replica)

    def expired(self, before: float) -> Iterator[int]:
        """Yield the leases that were not renewed since `before`, until they are ended."""
        while self._renewed:
            sample, renewed = next(iter(self._renewed.items()))
            if renewed > before:
                return
            yield sample

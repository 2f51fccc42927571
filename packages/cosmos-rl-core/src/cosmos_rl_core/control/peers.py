"""The connected workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger import events
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.observe.startup import WEIGHTS, Phases
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed

IN_USE_S = 5.0
"""Seconds without a heartbeat after which another process may take a connected worker's name."""
STARTING_S = 600.0
"""The same from the connection to the first heartbeat: meanwhile a worker imports torch and waits for other machines of
its replica. The connection to a machine that is gone ends before."""

AT_ONCE = 32
"""Messages sent in one batch. Between two batches the event loop reads messages."""


@dataclass(slots=True, kw_only=True)
class WorkerPeer:
    """A connected worker, as of its last heartbeat."""

    name: str
    role: p.Role
    connection: Connection
    incarnation: int = -1
    """Assigned by the ledger when it joined."""
    address: str = ""
    """Policy: address of its weights. Rollout: address of its spool."""
    gpu: str = ""
    """Identity of its GPU, which no other worker should use; empty if none is known."""
    epoch: int = 0
    """Policy: epoch of its mesh; 0 before the first."""
    mesh: tuple[str, ...] = ()
    """Policy: the members of that mesh."""
    wants_batch: int | None = None
    """Policy: the step whose batch it waits for."""
    deferred: p.RequestLeases | None = None
    """Rollout: a request for leases that waits for the end of an evaluation."""
    progress: int = 0
    idle_fraction: float | None = None
    """Fraction of the time without work, over the last step with a heartbeat; None before."""
    version: int = -1
    """Version of its weights; -1: none yet."""
    heartbeat_at: float = 0.0
    """Clock of its last heartbeat."""
    has_beaten: bool = False
    """Whether it has sent a heartbeat, on this connection or an earlier one."""
    since: float = field(init=False)
    """Clock when it connected, or became ready."""
    is_ready: bool = False
    """Whether it is built and can work."""
    phases: Phases = field(default_factory=Phases)
    """Phases of its start; none for a process that has returned."""
    leaving: bool = False
    """It sent a Goodbye or a Fatal."""
    draining: bool = False
    """It was asked to leave."""
    is_fenced: bool = False
    """A Reject was sent to it: it is removed, or another process has its place."""
    has_ended: bool = False
    """Its process does not exist any more."""
    _waiting: list[p.ToWorker] = field(default_factory=list)
    """Messages posted before its Welcome."""
    _later: list[p.ToWorker] = field(default_factory=list)
    """Queued messages, which go before the next one."""
    _waited: tuple[float, float] | None = None
    """`waited_s` and `running_s` of its last heartbeat,"""
    _measured: tuple[float, float] | None = None
    """and of that up to which `idle_fraction` was computed; at first of the first one since it was ready."""

    def __post_init__(self) -> None:
        self.since = self.heartbeat_at

    @property
    def is_welcome(self) -> bool:
        """Whether its Welcome was sent; it must be the first message to a worker."""
        return self.incarnation >= 0

    def event(self, message: p.ToLedger) -> events.From:
        """Return the ledger's event of a message of this process."""
        return events.From(self.name, self.incarnation, message)

    def beat(self, message: p.Heartbeat, *, now: float) -> None:
        """Record a heartbeat."""
        self.progress, self.heartbeat_at = message.progress, now
        self._waited = message.waited_s, message.running_s
        self._measured = self._measured or self._waited
        self.has_beaten = True
        self.version = message.version
        if self.phases.current == WEIGHTS and message.version >= 0:
            self.phases.enter("", now=now)

    def ready(self, message: p.Ready, *, now: float) -> None:
        """Record that it is built and can work."""
        self.address, self.is_ready, self.since, self.gpu = message.address, True, now, message.gpu
        self._measured = None  # its start does not count
        if self.phases.current:
            self.phases.enter(WEIGHTS if self.role == "rollout" else "", now=now)

    def measure_idleness(self) -> None:
        """Compute `idle_fraction` since the last call."""
        if self._waited is None or self._measured is None:
            return
        waited_s, running_s = (now - before for now, before in zip(self._waited, self._measured, strict=True))
        if running_s > 0:
            self.idle_fraction = min(1.0, waited_s / running_s)
            self._measured = self._waited

    def post(self, message: p.ToWorker) -> None:
        """Send a message; no-op on a closed connection, for which the ledger gets a Disconnected.

        All other messages wait for the Welcome.
        """
        if not self.is_welcome and not isinstance(message, p.Welcome):
            self._waiting.append(message)
        else:
            self._send(message)

    def drain(self) -> None:
        """Ask the worker to leave in good order."""
        self.draining = True
        self.post(p.Drain())

    def dismiss(self, reason: str) -> None:
        """Send a Stop at once. A worker without a Welcome leaves without having built anything."""
        self._send(p.Stop(reason=reason))

    def welcome(self, message: p.Welcome) -> None:
        self.incarnation = message.incarnation
        self.post(message)
        while self._waiting:
            self.post(self._waiting.pop(0))

    def post_later(self, message: p.ToWorker) -> None:
        """Queue a message. `send_later` sends it, or the next `post`, before its own message."""
        self._later.append(message)

    def send_later(self) -> None:
        """Send the queued messages."""
        later, self._later = self._later, []
        for message in later:
            self.post(message)

    def _send(self, message: p.ToWorker) -> None:
        if self._later:
            self.send_later()
        with contextlib.suppress(ConnectionClosed):
            self.connection.post(message)


@dataclass(slots=True)
class Peers:
    """The connected workers by name; a worker that reconnects replaces its earlier connection."""

    sync_interval: int = 1
    """[sync] interval."""
    by_name: dict[str, WorkerPeer] = field(default_factory=dict)
    _of_role: dict[str, dict[str, WorkerPeer]] = field(default_factory=lambda: {"policy": {}, "rollout": {}})
    rows_scored: bool = False
    """Whether the real rows for the monitor are scored."""
    _scorer: str = ""
    _needed: int = 0
    """Newest version that rollout replicas need between those of the interval."""
    _announced: p.SyncFrom | None = None
    """The last one sent to all rollout replicas."""
    _with_later: deque[WorkerPeer] = field(default_factory=deque)
    """Workers with queued messages, in the order in which they get them."""

    def add(self, peer: WorkerPeer) -> None:
        self.remove(peer.name)
        self.by_name[peer.name] = self._of_role[peer.role][peer.name] = peer

    def remove(self, name: str) -> None:
        peer = self.by_name.pop(name, None)
        if peer is not None:
            del self._of_role[peer.role][name]

    def of_role(self, role: p.Role) -> list[WorkerPeer]:
        return list(self._of_role[role].values())

    def num_of_role(self, role: p.Role) -> int:
        return len(self._of_role[role])

    def is_in_use(self, name: str, *, now: float) -> bool:
        """Return whether a live worker has this name: it has sent a heartbeat recently, or is starting."""
        peer = self.by_name.get(name)
        if peer is None or peer.has_ended:
            return False
        return now - peer.heartbeat_at < (IN_USE_S if peer.has_beaten else STARTING_S)

    def _publisher(self, mesh: Sequence[str]) -> str:
        """Return the address of the weights to pull: of the mesh's first member, before the first mesh of any policy.

        Empty if no policy has one.
        """
        policies = {peer.name: peer for peer in self.of_role("policy")}
        names = (*mesh, *sorted(policies))
        return next((policies[name].address for name in names if name in policies and policies[name].address), "")

    def scores_rows(self, peer: WorkerPeer) -> bool:
        """Return whether a new worker scores the real rows: the oldest rollout replica, and after its loss the next."""
        if peer.role == "policy" or self.rows_scored:
            return False
        if self._scorer not in self.by_name:
            self._scorer = peer.name
        return self._scorer == peer.name

    def has_publisher(self, mesh: Sequence[str]) -> bool:
        """Return whether a policy publishes weights."""
        return bool(self._publisher(mesh))

    def post_each(self, messages: Mapping[str, p.ToWorker]) -> None:
        """Send one message to each worker named, AT_ONCE at a time. Unknown names are skipped."""
        known = [(self.by_name[name], message) for name, message in messages.items() if name in self.by_name]
        for peer, message in known[:AT_ONCE]:
            peer.post(message)
        for peer, message in known[AT_ONCE:]:
            peer.post_later(message)
            self._with_later.append(peer)
        if len(known) > AT_ONCE:
            asyncio.get_running_loop().call_soon(self._send_some)

    def _send_some(self) -> None:
        for _ in range(min(AT_ONCE, len(self._with_later))):
            self._with_later.popleft().send_later()
        if self._with_later:
            asyncio.get_running_loop().call_soon(self._send_some)

    def need(self, version: int, ledger: Ledger) -> None:
        """Let rollout replicas load a version that is evaluated, also one between those of the interval."""
        if version % self.sync_interval:
            self._needed = version
            self.announce(ledger)

    def announce(self, ledger: Ledger, *, ready: WorkerPeer | None = None) -> None:
        """Send all rollout replicas the source of weights if it has changed, else `ready` alone."""
        address = self._publisher(ledger.members.mesh)
        source = p.SyncFrom(address=address, lineage=ledger.lineage, version=self._needed)
        if not source.address:
            return
        if source != self._announced:
            self._announced = source
            for rollout in self.of_role("rollout"):
                rollout.post(source)
        elif ready is not None and ready.role == "rollout":
            ready.post(source)
        elif ready is not None:  # a policy on a new connection: rollout replicas may have become ready meanwhile
            for rollout in self.of_role("rollout"):
                rollout.post(source)

    def metrics(self) -> dict[str, float]:
        """Number of members, and the idle fraction of each role since the last call."""
        for peer in self.by_name.values():
            peer.measure_idleness()
        idle = {
            role: [peer.idle_fraction for peer in peers.values() if peer.idle_fraction is not None]
            for role, peers in self._of_role.items()
        }
        fractions = {f"{role}_idle_fraction": fmean(values) for role, values in idle.items() if values}
        return {"members": float(sum(peer.is_ready for peer in self.by_name.values())), **fractions}

"""Connections of workers: new ones, those of a process that returns, and those that are lost.

new process                 -> Join(incarnation 0)  -> Welcome with a new incarnation
the same process again      -> Rejoin -> Join(incarnation, holding) -> Welcome, Release of what is not needed
... after it was removed    -> Refused: others have its work
another process of a name   -> Refused while the first one is alive
the connection closes       -> Disconnected: suspect until it returns, or until its launcher reports its end
one of its ranks has died   -> Gone, by its agent's report: the other ranks may not notice before the next collective
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.evaluation import Evaluator
from cosmos_rl_core.control.ledger import events
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.membership import MemberState
from cosmos_rl_core.control.ledger.records import Record
from cosmos_rl_core.control.outcome import RunOutcome
from cosmos_rl_core.control.peers import Peers, WorkerPeer
from cosmos_rl_core.control.recovery import Recovery
from cosmos_rl_core.errors import WorkerLost
from cosmos_rl_core.observe.startup import IMPORTING, describe
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed

LAST_WORDS_S = 1.0
"""Maximum seconds for reading the last messages of a process that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Adds workers to the connected ones and to the ledger's members, and removes them."""

    ledger: Ledger
    feed: Callable[[events.Event], list[Record]]
    """Passes an event to the ledger."""
    peers: Peers
    evaluator: Evaluator
    recovery: Recovery
    returned: Callable[[str, Collection[int]], None]
    """Called with a worker that has joined, and the samples whose results or leases it holds."""
    outcome: RunOutcome
    note: Callable[[str], None]
    clock: Callable[[], float]

    async def admit(self, connection: Connection) -> WorkerPeer | None:
        """Return the worker of a new connection, or None if it was refused. Raises ConnectionClosed."""
        name, incarnation = connection.peer.name, connection.peer.incarnation
        role: p.Role = "policy" if connection.peer.role == "policy" else "rollout"
        rejoin = await connection.receive() if incarnation else p.Rejoin()
        if not isinstance(rejoin, p.Rejoin):
            raise ValueError(f"{name} sent {type(rejoin).__name__} in place of Rejoin")
        if refusal := self._refusal(name, role, incarnation):
            self.note(f"{name} was refused: {refusal}")
            connection.post(p.Refused(refusal))
            return None
        if role == "policy" and not incarnation:
            if (earlier := self.peers.by_name.get(name)) is not None:
                self.lose(earlier)
            self.ended(name)
            await self.recovery.rolled_back()
            self.recovery.joined()
        peer = WorkerPeer(
            name=name, role=role, connection=connection, heartbeat_at=self.clock(), has_beaten=incarnation > 0
        )
        if not incarnation:
            peer.phases.enter(IMPORTING, now=self.clock())
        earlier = self.peers.by_name.get(name)
        self.peers.add(peer)
        if earlier is not None:
            earlier.connection.close()
        self.feed(events.Join(name, role, incarnation, rejoin.holding))
        self.returned(name, rejoin.holding)
        if incarnation:
            self.evaluator.lose(name, self.peers, but=rejoin.rows)
        return peer

    def leaves(self, peer: WorkerPeer) -> None:
        """A policy leaves the others, which go on."""
        peer.leaving = True
        self.note(f"{peer.name} has left")

    def rejected(self, peer: WorkerPeer, message: p.Reject) -> None:
        """The ledger has rejected a message. A process that hung and goes on now ends, and may be started again."""
        if peer.is_fenced:  # the messages of a process that was cut off arrive together
            return
        self.note(f"{peer.name}: {message.reason}")
        if message.fenced:
            peer.is_fenced = True
            peer.post(message)
            peer.connection.close()

    def dismiss(self, connection: Connection) -> None:
        """Send Stop to a worker that comes when the run is over."""
        if connection.peer.role in ("policy", "rollout") and not self.outcome.is_taken_over:
            connection.post(p.Stop(reason="the run is over"))

    def dismiss_all(self, reason: str) -> None:
        """Send Stop to all workers; those that belong to another controller now only lose the connection."""
        for peer in list(self.peers.by_name.values()):
            if self.outcome.is_taken_over:
                peer.connection.close()
            else:
                peer.dismiss(reason)

    def starts(self, peer: WorkerPeer, message: p.Phase | p.Ready) -> None:
        """A worker begins a phase of its start; or it is built, also reported again on a new connection."""
        if isinstance(message, p.Phase):
            peer.phases.enter(message.name, now=self.clock())
            return
        if self.ledger.members.by_name[peer.name].state is MemberState.JOINING:
            start = describe(peer.phases.so_far(self.clock()))
            self.note(f"{peer.name} is ready after {start}" if start else f"{peer.name} is ready")
            self._note_shared_gpu(peer, message.gpu)
        self.feed(events.From(peer.name, peer.incarnation, message))
        peer.ready(message, now=self.clock())
        self.peers.announce(self.ledger, ready=peer)

    def _note_shared_gpu(self, peer: WorkerPeer, gpu: str) -> None:
        """Workers that are started by hand on one machine all take its first GPU."""
        others = [other.name for other in self.peers.by_name.values() if other is not peer and gpu and other.gpu == gpu]
        if others:
            self.note(
                f"{peer.name} is on the GPU of {', '.join(others)} ({gpu}): give each worker its own by "
                "CUDA_VISIBLE_DEVICES, or set [run] share_gpus = true"
            )

    def lose(self, peer: WorkerPeer) -> None:
        """Remove a worker whose connection has closed."""
        if self.peers.by_name.get(peer.name) is peer:
            self.peers.remove(peer.name)
            if not peer.leaving:
                self._disconnect(peer.name, has_ended=peer.has_ended)

    def ended(self, name: str) -> None:
        """Remove a worker whose process has ended, once its last messages are read. Called by its launcher."""
        if (peer := self.peers.by_name.get(name)) is not None:
            peer.has_ended = True
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self.lose, peer)  # a child may hold the socket open
        elif name in self.ledger.members.by_name:
            self._disconnect(name, has_ended=True)

    def failed(self, name: str, error: Exception) -> None:
        """Handle the failure of a rank, which the agent of its machine reports.

        A worker that has lost a rank is removed: its process is refused when it connects again.
        """
        self.outcome.worker_failed(name, error)
        if isinstance(error, WorkerLost) and (peer := self.peers.by_name.get(name)) is not None:
            peer.has_ended = True
            self.lose(peer)
            peer.connection.close()

    def _disconnect(self, name: str, *, has_ended: bool) -> None:
        lost = events.Gone if has_ended else events.Disconnected
        incarnation = self.ledger.members.by_name[name].incarnation  # it may not be welcome yet
        self.feed(lost(replica=name, incarnation=incarnation))

    def _refusal(self, name: str, role: p.Role, incarnation: int) -> str:
        """Return why a connection is refused; empty if it is not."""
        if incarnation and not self.ledger.members.is_current(name, incarnation):
            return f"{name} was away for too long: others have its work"
        if role == "rollout" and not self.ledger.config.rollouts:
            return "a supervised run has no rollout workers"
        if not incarnation and self.peers.is_in_use(name, now=self.clock()):
            return f"a live worker has the name {name}: give this one another by --name, or stop that one first"
        return ""


async def consume(
    peer: WorkerPeer,
    handle: Callable[[WorkerPeer, p.ToController], None],
    *,
    peers: Peers,
    fail: Callable[[Exception], None],
) -> None:
    """Pass a worker's messages to `handle`, until its connection closes or is replaced. Raises ConnectionClosed.

    `fail` gets errors of `handle`, such as a full disk of the observer's files. The connection stays, for a Stop.
    """

    def handle_one(message: p.ToController) -> None:
        if peers.by_name.get(peer.name) is not peer:
            raise ConnectionClosed(f"{peer.name} has another connection")
        try:
            handle(peer, message)
        except Exception as error:
            fail(error)

    await peer.connection.consume(handle_one)

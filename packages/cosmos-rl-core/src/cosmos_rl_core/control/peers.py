"""The workers that are connected now."""

from __future__ import annotations

from dataclasses import dataclass, field

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.wire import Connection


@dataclass(slots=True, kw_only=True)
class Peer:
    """A connected worker, as the controller last heard of it."""

    name: str
    role: str
    connection: Connection
    incarnation: int = -1
    """Given by the ledger when it joined."""
    epoch: int = 0
    """Policy: the mesh it takes part in; 0 before the first."""
    wants_batch: int | None = None
    """Policy: the step whose batch it waits for."""
    held: p.RequestLeases | None = None
    """Rollout: a request that waits for the end of an evaluation."""
    progress: int = 0
    busy_s: float = 0.0
    heard_at: float = 0.0
    """Clock of its last heartbeat."""
    leaving: bool = False
    """It said goodbye, or what went wrong."""

    def post(self, message: p.ToWorker) -> None:
        """Send, unless the connection has ended: then the ledger hears of it anyway."""
        if not self.connection.closed.is_set():
            self.connection.post(message)


@dataclass(slots=True)
class Peers:
    """By name; a worker that comes back under its name replaces the one before."""

    by_name: dict[str, Peer] = field(default_factory=dict)

    def of_role(self, role: str) -> list[Peer]:
        return [peer for peer in self.by_name.values() if peer.role == role]

"""The ledger's inputs and outputs: messages with their sender or receiver, and events of the server.

An output is sent only after all earlier records are durable. Outputs may be lost or repeated: a replica that misses
one repeats its request and gets an equal reply.
"""

from __future__ import annotations

import msgspec

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger.records import Position


class From(msgspec.Struct, frozen=True):
    """A message of a replica; the incarnation identifies messages of a replaced process."""

    replica: str
    incarnation: int
    message: p.ToLedger


class Join(msgspec.Struct, frozen=True):
    """A replica connected. Sent by the server once per connection, in the order of the connections."""

    replica: str
    role: p.Role
    incarnation: int = 0
    """0: a new process. Otherwise the incarnation of its Welcome: the same process on a new connection."""
    holding: tuple[int, ...] = ()
    """Samples in work at a reconnecting replica; its other leases are returned at once."""


class Disconnected(msgspec.Struct, frozen=True):
    """A replica's connection closed without a Goodbye."""

    replica: str
    incarnation: int


class Gone(msgspec.Struct, frozen=True):
    """A replica's process has ended: it will not reconnect."""

    replica: str
    incarnation: int


class Rollback(msgspec.Struct, frozen=True):
    """Training goes back to the position of a checkpoint, not before the last one that the ledger knows."""

    position: Position


class Restart(msgspec.Struct, frozen=True):
    """The controller replayed its journal: earlier connections and times are invalid."""

    generation: int = 0
    """Of the controller; 0: the one after the journal's last."""


class GroupsUnheld(msgspec.Struct, frozen=True):
    """Nobody has the groups of these samples, after a restart of the controller."""

    samples: tuple[int, ...]


class Tick(msgspec.Struct, frozen=True):
    """Time passed."""


Event = From | Join | Disconnected | Gone | Rollback | Restart | GroupsUnheld | Tick


class To(msgspec.Struct, frozen=True):
    """A message to a replica. `Grant`, `Batch` and `Welcome` lack rows, payloads and recipe: the server adds them."""

    replica: str
    message: p.FromLedger


class PoliciesLost(msgspec.Struct, frozen=True):
    """No policy replica is left. The server feeds the event Rollback(version) and starts new ones."""

    version: int
    """Version of the last durable checkpoint; 0 is the initial model."""


class Removed(msgspec.Struct, frozen=True):
    """A replica is no longer a member: it left, or was lost."""

    replica: str
    is_silent: bool = False
    """Whether it was lost since it did not answer, so that its process may still run."""


class Halt(msgspec.Struct, frozen=True):
    """The run cannot continue; the message gives the cause and the remedy."""

    message: str


Output = To | Removed | PoliciesLost | Halt

"""The ledger's inputs and outputs: messages with the replica that sent or receives them, and the server's own events.

Outputs leave only after all records decided up to them are durable. All are safe to lose and to repeat: a replica that
misses one asks again and gets an equal answer.
"""

from __future__ import annotations

import msgspec

from cosmos_rl_core.control import protocol as p


class From(msgspec.Struct, frozen=True):
    """A message of a replica, with its incarnation, so that messages of a replaced process are recognised."""

    replica: str
    incarnation: int
    message: p.ToLedger


class Join(msgspec.Struct, frozen=True):
    """A replica connected. Sent once a connection, by the server, in the order of the connections."""

    replica: str
    role: p.Role
    incarnation: int = 0
    """0: a new process. Otherwise the number it was welcomed with: the same process on a new connection."""
    holding: tuple[int, ...] = ()
    """Samples a reconnecting replica still works on; its other leases return at once."""


class Disconnected(msgspec.Struct, frozen=True):
    """A replica's connection closed without a Goodbye."""

    replica: str
    incarnation: int


class Rollback(msgspec.Struct, frozen=True):
    """Training goes back to `version`, the last checkpoint or a later version some policy still has."""

    version: int
    payloads_kept: bool = True
    """Whether the groups of the undone steps are still stored; if not, they are generated again."""


class Restart(msgspec.Struct, frozen=True):
    """The controller replayed its journal: no connection and no clock of before is valid."""


class Tick(msgspec.Struct, frozen=True):
    """Time passed."""


Event = From | Join | Disconnected | Rollback | Restart | Tick


class To(msgspec.Struct, frozen=True):
    """A message to a replica. `Grant`, `Batch` and `Welcome` lack rows, payloads and recipe: the server adds them."""

    replica: str
    message: p.FromLedger


class PoliciesLost(msgspec.Struct, frozen=True):
    """No policy replica is left. The server answers with the event Rollback(version) and starts new ones."""

    version: int
    """Of the last durable checkpoint; 0 is the untrained model."""


class Halt(msgspec.Struct, frozen=True):
    """The run cannot go on; the message gives the cause and the remedy."""

    message: str


Output = To | PoliciesLost | Halt

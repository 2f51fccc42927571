"""What the ledger is told. Most events are messages of a replica; the others come from the server itself.

Every message of a replica carries its incarnation, so that words of a replaced process are recognised. New
fields go at the end and have defaults: an event is encoded as an array.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["policy", "rollout"]


class Event(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all events."""


class Join(Event, frozen=True, tag=True, array_like=True):
    """A replica connected. Sent once a connection, by the server, in the order of the connections."""

    replica: str
    role: Role
    incarnation: int = 0
    """0: a new process. Otherwise the number it was welcomed with: the same process on a new connection."""
    holding: tuple[int, ...] = ()
    """Samples a reconnecting replica still works on; its other leases return at once."""


class Ready(Event, frozen=True, tag=True, array_like=True):
    """A joined replica has loaded its weights and can work."""

    replica: str
    incarnation: int


class Heartbeat(Event, frozen=True, tag=True, array_like=True):
    """Sign of life from a replica's main loop."""

    replica: str
    incarnation: int
    progress: int = 0
    """Counter of work done; leases are renewed only when it has risen."""
    holding: tuple[int, ...] = ()
    """Samples the replica works on or has yet to deliver. A lease is renewed by being named here."""


class Disconnected(Event, frozen=True, tag=True, array_like=True):
    """A replica's connection closed without a word."""

    replica: str
    incarnation: int


class Leave(Event, frozen=True, tag=True, array_like=True):
    """A replica ends in good order."""

    replica: str
    incarnation: int


class RequestLeases(Event, frozen=True, tag=True, array_like=True):
    """A rollout replica can start `capacity` more groups. Replaces a request that still waits."""

    replica: str
    incarnation: int
    version: int
    """Oldest weights the replica can still draw a term of the new groups from."""
    capacity: int
    lineage: int = 0
    """Lineage of those weights."""


class Deliver(Event, frozen=True, tag=True, array_like=True):
    """A group is complete and its payload stored. Repeated until answered with Ack or Reject."""

    replica: str
    incarnation: int
    sample: int
    attempt: int
    min_version: int
    max_version: int
    num_terms: int


class Fail(Event, frozen=True, tag=True, array_like=True):
    """A group could not be completed."""

    replica: str
    incarnation: int
    sample: int
    attempt: int
    reason: str
    """Starting with "filtered:" for a group left out on purpose, such as "filtered:zero_variance"."""
    final: bool = False
    """True: trying again cannot help."""


class RequestBatch(Event, frozen=True, tag=True, array_like=True):
    """A policy replica wants the batch of a step. Asking again before the commit gives the same batch."""

    replica: str
    incarnation: int
    step: int
    epoch: int


class Vote(Event, frozen=True, tag=True, array_like=True):
    """A policy replica has the gradients of a step and can apply them."""

    replica: str
    incarnation: int
    step: int
    epoch: int


class PayloadsLost(Event, frozen=True, tag=True, array_like=True):
    """A policy replica cannot read groups of the batch it was given: their files are gone or damaged."""

    replica: str
    incarnation: int
    step: int
    epoch: int
    samples: tuple[int, ...]
    reason: str


class Checkpointed(Event, frozen=True, tag=True, array_like=True):
    """Weights of `version` are on disk for good; they contain steps 0 .. version - 1."""

    version: int
    lineage: int = 0


class Rollback(Event, frozen=True, tag=True, array_like=True):
    """Training goes back to `version`, the last checkpoint or a later version some policy still has."""

    version: int
    payloads_kept: bool = True
    """Whether the groups of the undone steps are still stored; if not, they are generated again."""


class Restart(Event, frozen=True, tag=True, array_like=True):
    """The controller replayed its journal: no connection and no clock of before is valid."""


class Tick(Event, frozen=True, tag=True, array_like=True):
    """Time passed."""

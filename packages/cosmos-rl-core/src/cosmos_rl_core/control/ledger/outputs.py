"""What the ledger wants said. An effect leaves only after all records decided up to it are durable.

All are safe to lose and to repeat: a replica that misses one asks again and gets an equal answer.
"""

from __future__ import annotations

import msgspec


class Effect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all effects."""


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """One group to generate."""

    sample: int
    attempt: int
    deadline: int
    """Last step that may train on it."""


class Welcome(Effect, frozen=True, tag=True, array_like=True):
    """Answer to Join."""

    replica: str
    incarnation: int
    lineage: int
    version: int
    term: int = 0
    """How often a controller took over from the journal; a replica ignores controllers of lower terms."""


class Grant(Effect, frozen=True, tag=True, array_like=True):
    """Answer to RequestLeases: at least one lease, at most the capacity that was asked for."""

    replica: str
    leases: tuple[Lease, ...]


class NoMore(Effect, frozen=True, tag=True, array_like=True):
    """Answer to RequestLeases or RequestBatch: the run needs nothing more from this replica."""

    replica: str
    reason: str


class Ack(Effect, frozen=True, tag=True, array_like=True):
    """A Deliver or Fail is settled for good; the replica may forget the group."""

    replica: str
    sample: int


class Cancel(Effect, frozen=True, tag=True, array_like=True):
    """The replica no longer holds this lease and may stop working on it."""

    replica: str
    sample: int


class Reject(Effect, frozen=True, tag=True, array_like=True):
    """A message changed nothing. Repeating it does not help."""

    replica: str
    incarnation: int
    """Of the message that is refused."""
    reason: str
    sample: int = -1
    """The sample of a refused Deliver, which the replica is to forget."""
    fenced: bool = False
    """True: a newer process took this replica's place, or it was given up; it has to join anew or exit."""


class Remesh(Effect, frozen=True, tag=True, array_like=True):
    """Who trains together changed: leave the old groups, form new ones, ask for the step again."""

    replica: str
    epoch: int
    members: tuple[str, ...]
    version: int
    lineage: int


class AssignBatch(Effect, frozen=True, tag=True, array_like=True):
    """Answer to RequestBatch."""

    replica: str
    step: int
    epoch: int
    samples: tuple[int, ...]
    """Ascending."""


class Committed(Effect, frozen=True, tag=True, array_like=True):
    """All members voted: apply the gradients of `step`. Version `step + 1` exists."""

    replica: str
    step: int


class PoliciesLost(Effect, frozen=True, tag=True, array_like=True):
    """No policy replica is left. The server answers with the event Rollback(version) and starts new ones."""

    version: int
    """Of the last durable checkpoint; 0 is the untrained model."""


class RolledBack(Effect, frozen=True, tag=True, array_like=True):
    """Training goes on from `version` on a new lineage; weights of other lineages are void."""

    replica: str
    lineage: int
    version: int


class Halt(Effect, frozen=True, tag=True, array_like=True):
    """The run cannot go on; the message says why and what to do."""

    message: str


ToReplica = Welcome | Grant | NoMore | Ack | Cancel | Reject | Remesh | AssignBatch | Committed | RolledBack
"""Effects that are said to one replica."""

"""What the journal keeps: facts, in the order they were decided. Applying them in order rebuilds the ledger.

New fields go at the end and have defaults: a record is encoded as an array, and old journals must stay
readable.
"""

from __future__ import annotations

import msgspec

from cosmos_rl_core.control.ledger.membership import MemberState
from cosmos_rl_core.control.protocol import Role


class Record(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all records."""


class Position(msgspec.Struct, frozen=True):
    """Where a run stands in its prompt stream at a checkpoint; belongs into the checkpoint's manifest."""

    version: int
    """Steps in the checkpoint's weights."""
    next_sample: int
    """First sample id that was never issued."""
    unfinished: tuple[int, ...] = ()
    """Issued sample ids whose groups are neither in the weights nor dropped, ascending."""


class Resumed(Record, frozen=True, tag=True, array_like=True):
    """The run starts from a checkpoint. Only ever the first record."""

    position: Position


class Joined(Record, frozen=True, tag=True, array_like=True):
    replica: str
    role: Role
    incarnation: int


class Moved(Record, frozen=True, tag=True, array_like=True):
    """A member is in another state."""

    replica: str
    state: MemberState


class Meshed(Record, frozen=True, tag=True, array_like=True):
    """These policy replicas train together from now on; votes of earlier epochs are void."""

    epoch: int
    members: tuple[str, ...]


class Leased(Record, frozen=True, tag=True, array_like=True):
    """A sample, issued now if its id is the next of the stream, is given to a replica."""

    sample: int
    replica: str
    attempt: int
    deadline: int


class Returned(Record, frozen=True, tag=True, array_like=True):
    """A lease ended without a result; the sample is pending again."""

    sample: int
    reason: str
    failed: bool = False
    """Whether this counts against the sample's attempts."""


class Delivered(Record, frozen=True, tag=True, array_like=True):
    sample: int
    replica: str
    deadline: int
    min_version: int
    max_version: int
    num_terms: int


class Dropped(Record, frozen=True, tag=True, array_like=True):
    sample: int
    reason: str


class Supplied(Record, frozen=True, tag=True, array_like=True):
    """Samples, issued now where they continue the stream, are ready without a lease (supervised)."""

    samples: tuple[int, ...]


class Assigned(Record, frozen=True, tag=True, array_like=True):
    step: int
    epoch: int
    samples: tuple[int, ...]


class PayloadsLost(Record, frozen=True, tag=True, array_like=True):
    """Groups of the batch in work cannot be read and are pending again, the others of the batch are ready again.

    A new epoch of the same mesh begins: gradients of that batch are void.
    """

    step: int
    samples: tuple[int, ...]
    reason: str


class Voted(Record, frozen=True, tag=True, array_like=True):
    replica: str
    step: int
    epoch: int


class Commit(Record, frozen=True, tag=True, array_like=True):
    step: int
    epoch: int
    lineage: int
    voters: tuple[str, ...]


class Covered(Record, frozen=True, tag=True, array_like=True):
    """A durable checkpoint holds all steps below `version`."""

    version: int


class RolledBack(Record, frozen=True, tag=True, array_like=True):
    """Steps from `version` on are undone; a new lineage begins, and with it a new epoch of the same mesh."""

    version: int
    lineage: int
    payloads_kept: bool = True


class Restarted(Record, frozen=True, tag=True, array_like=True):
    """A controller took over from the journal."""

    generation: int


class Halted(Record, frozen=True, tag=True, array_like=True):
    message: str


AnyRecord = (
    Resumed
    | Joined
    | Moved
    | Meshed
    | Leased
    | Returned
    | Delivered
    | Dropped
    | Supplied
    | Assigned
    | PayloadsLost
    | Voted
    | Commit
    | Covered
    | RolledBack
    | Restarted
    | Halted
)

"""The journal's records: changes of the ledger's state. Applying them in order rebuilds the ledger.

New fields are appended, with defaults: records are encoded as arrays, and old journals must stay readable.
"""

from __future__ import annotations

import msgspec

from cosmos_rl_core.control.ledger.membership import MemberState
from cosmos_rl_core.control.protocol import Role


class Record(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all records."""


class Position(msgspec.Struct, frozen=True):
    """Position in the prompt stream at a checkpoint; stored in the checkpoint's manifest."""

    version: int
    """Number of steps in the checkpoint's weights."""
    next_sample: int
    """First sample id that was not issued."""
    unfinished: tuple[int, ...] = ()
    """Issued sample ids that were neither trained on nor dropped, ascending."""
    successes: bytes = b""
    """The curriculum's memory; empty without one."""


class Resumed(Record, frozen=True):
    """The run starts from a checkpoint. Only ever the first record."""

    position: Position


class Joined(Record, frozen=True):
    replica: str
    role: Role
    incarnation: int


class Moved(Record, frozen=True):
    """A member changed its state."""

    replica: str
    state: MemberState


class Meshed(Record, frozen=True):
    """A new mesh of policy replicas that train together; votes of earlier epochs are void."""

    epoch: int
    members: tuple[str, ...]


class Leased(Record, frozen=True):
    """A sample was leased to a replica; it is issued now if its id is the stream's next."""

    sample: int
    replica: str
    attempt: int
    deadline: int


class Returned(Record, frozen=True):
    """A lease ended without a result; the sample is pending again."""

    sample: int
    reason: str
    failed: bool = False
    """Whether this counts as an attempt of the sample."""


class Delivered(Record, frozen=True):
    sample: int
    replica: str
    deadline: int
    min_version: int
    max_version: int
    num_terms: int
    mean_reward: float | None = None


class Dropped(Record, frozen=True):
    sample: int
    reason: str
    mean_reward: float | None = None
    """None for a group without rewards: it has failed."""


class Skipped(Record, frozen=True):
    """The stream's next sample is issued and dropped at once: the curriculum has not selected its row."""

    sample: int


class Supplied(Record, frozen=True):
    """Samples are ready without a lease (supervised); they are issued now if they continue the stream."""

    samples: tuple[int, ...]


class Assigned(Record, frozen=True):
    step: int
    epoch: int
    samples: tuple[int, ...]


class PayloadsLost(Record, frozen=True):
    """Unreadable groups of the current batch are pending again, its other groups ready again.

    A new epoch of the same mesh begins: gradients of that batch are void.
    """

    step: int
    samples: tuple[int, ...]
    reason: str


class Unheld(Record, frozen=True):
    """Delivered groups that nobody has any more; their samples are pending again."""

    samples: tuple[int, ...]


class Voted(Record, frozen=True):
    replica: str
    step: int
    epoch: int


class Commit(Record, frozen=True):
    step: int
    epoch: int
    lineage: int
    voters: tuple[str, ...]


class Covered(Record, frozen=True):
    """A durable checkpoint contains all steps below `version`."""

    version: int


class RolledBack(Record, frozen=True):
    """Steps from `version` on are undone; a new lineage and a new epoch of the same mesh begin."""

    version: int
    lineage: int
    payloads_kept: bool = True
    """Not read: of earlier releases."""
    position: Position | None = None
    """The stream position of `version`."""


class Restarted(Record, frozen=True):
    """A controller took over from the journal."""

    generation: int


class Halted(Record, frozen=True):
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
    | Unheld
    | Voted
    | Commit
    | Covered
    | RolledBack
    | Restarted
    | Halted
    | Skipped
)

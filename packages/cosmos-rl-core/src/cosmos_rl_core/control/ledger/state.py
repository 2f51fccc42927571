"""The ledger's state and its changes by records, without any rules.

`LedgerState` is the base of `Ledger` (ledger.py); the rules in liveness.py, stepping.py and leasing.py use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import msgspec

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger import events, records
from cosmos_rl_core.control.ledger.membership import Members, MemberTable, Sessions
from cosmos_rl_core.control.ledger.samples import LEASED, PENDING, READY, Samples, SampleTable
from cosmos_rl_core.data.curriculum import Curriculum
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.rollout.staleness import StalenessWindow

UNBOUNDED = 2**62
FILTERED = "filtered:"
"""Prefix of the reason of a group that was left out on purpose."""
NO_DEADLINE = 2**62
"""Deadline of supervised samples, which do not become stale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig:
    """Parameters of the rules."""

    groups_per_step: int
    """Number of samples per step."""
    max_staleness: int = 0
    """Maximum versions between the weights a term was sampled from and the weights trained on it."""
    total_samples: int | None = None
    """Length of the prompt stream; None: endless."""
    max_steps: int | None = None
    """Steps of the run; None: until the stream ends."""
    rollouts: bool = True
    """False: supervised; samples become ready on a batch request, without leases."""
    policy_members: int = 1
    """Policy replicas that must be ready before the first step, and after the loss of all."""
    lease_ttl_s: float = 60.0
    """A lease expires this long after its last renewal."""
    silence_s: float = 120.0
    """A ready replica without a message for this long is suspect."""
    stall_s: float = 1800.0
    """A ready policy that makes no progress for this long is removed, unless it waits for others."""
    peer_s: float = 60.0
    """Time without progress of a mesh whose members all wait for one another, after which they connect anew."""
    suspect_grace_s: float = 2.0
    """A suspect replica that does not return within this time is gone."""
    restart_grace_s: float = 2.0
    """The same for all replicas after a restart of the controller."""
    max_attempts: int = 3
    """Errors after which a sample is dropped. Losses of replicas do not count."""
    max_failed: int = 16
    """Maximum samples dropped for errors in a row, without a completed group, before the run halts."""
    max_filtered: int = 1024
    """Maximum samples filtered in a row before the run halts."""
    max_losses: int = 8
    """Maximum batches in a row with unreadable groups before the run halts."""
    curriculum: Curriculum | None = None
    """Which samples of the stream are selected; None: all."""


class LedgerState:
    """Durable state, with `decide` and `send` for the rules. Attributes are read-only for callers."""

    def __init__(self, config: LedgerConfig) -> None:
        self.config = config
        self.window = StalenessWindow(config.max_staleness, config.groups_per_step)
        self.samples = Samples()
        self.members = Members()
        self.version = 0
        """Number of committed steps on the lineage."""
        self.lineage = 0
        self.checkpoint_version = 0
        """Version of the last durable checkpoint."""
        self.assignment: records.Assigned | None = None
        """The current batch, with its current epoch."""
        self.votes: tuple[str, ...] = ()
        self.is_orphaned = False
        """True after the loss of all policy replicas, until the rollback."""
        self.staleness: tuple[float, int] = (0.0, 0)
        """Mean and maximum, over the groups of the last assigned batch, of step - oldest version."""
        self.failed_in_a_row = 0
        self.filtered_in_a_row = 0
        self.num_lost = 0
        """Number of generated groups that the policy could not read."""
        self.losses_in_a_row = 0
        """Number of batches discarded for such groups since the last commit."""
        self.successes = config.curriculum.memory() if config.curriculum is not None else bytearray()
        """The memory of the curriculum, of visits up to the last commit: the time of a result must not matter."""
        self.visited: dict[int, float] = {}
        """Mean reward of the groups since then, by sample."""
        self.halted: str | None = None
        self.generation = 0
        self.sessions = Sessions()
        self.now = 0.0
        self._records: list[records.Record] = []
        self._outputs: list[events.Output] = []

    @classmethod
    def resume(cls, config: LedgerConfig, position: records.Position) -> tuple[Self, records.Resumed]:
        """Return a ledger at the position of a checkpoint, and the first record of its journal."""
        ledger, record = cls(config), records.Resumed(position)
        ledger.apply(record)
        return ledger, record

    def decide(self, record: records.Record) -> None:
        """Apply a record and add it to the result of `on`."""
        self.apply(record)
        self._records.append(record)

    def output(self, output: events.Output) -> None:
        self._outputs.append(output)

    def send(self, replica: str, message: p.FromLedger) -> None:
        self._outputs.append(events.To(replica, message))

    def reject(self, replica: str, reason: str, sample: int = -1) -> None:
        """Refuse a message of the replica's current process."""
        self.send(replica, p.Reject(self.members.by_name[replica].incarnation, reason, sample))

    def halt(self, message: str) -> None:
        """End the run with an error."""
        self.decide(records.Halted(message))
        self.output(events.Halt(message))

    @property
    def mesh_size(self) -> int:
        """Number of ready policy replicas that the next mesh waits for: with the first one, the number expected."""
        return self.config.policy_members if self.members.epoch == 0 else 1

    @property
    def next_step(self) -> int:
        """First step without a batch."""
        return self.version + (self.assignment is not None)

    def stream_left(self) -> int:
        """Return the number of samples that were not issued yet."""
        total = self.config.total_samples
        return UNBOUNDED if total is None else max(total - self.samples.next_sample, 0)

    def groups_needed(self) -> int:
        """Return the number of groups that the remaining steps need beyond the outstanding ones."""
        if self.config.max_steps is None:
            return UNBOUNDED
        steps = self.config.max_steps - self.next_step
        return steps * self.config.groups_per_step - self.samples.num_outstanding

    def why_finished(self) -> str | None:
        """Return the reason that there will be no further batch, or None while the run continues."""
        config, samples = self.config, self.samples
        if config.max_steps is not None and self.version >= config.max_steps:
            return f"all {config.max_steps} steps are done"
        if self.assignment is not None:
            return None
        left = samples.by_state[PENDING] + samples.by_state[LEASED] + self.stream_left()
        if samples.by_state[READY] + left < config.groups_per_step:
            return f"the stream of {config.total_samples} samples has ended"
        return None

    def counts(self) -> dict[str, int]:
        """Return the number of samples issued and in each state; `issued` is always the sum of the others."""
        return self.samples.counts()

    def position(self) -> records.Position:
        """Return the stream position for a checkpoint of the current version."""
        unfinished = tuple(sorted(self.samples.active))
        return records.Position(self.version, self.samples.next_sample, unfinished, bytes(self.successes))

    def visit(self, record: records.Delivered | records.Dropped) -> None:
        """Note the mean reward of a group for the curriculum."""
        if self.config.curriculum is not None and record.mean_reward is not None:
            self.visited[record.sample] = record.mean_reward

    def remember(self) -> None:
        """Add the visits since the last commit to the curriculum's memory."""
        for sample, mean_reward in sorted(self.visited.items()):
            assert self.config.curriculum is not None
            self.config.curriculum.remember(self.successes, sample, mean_reward)
        self.visited.clear()

    def recall(self, position: records.Position) -> None:
        """Return to the curriculum's memory at a checkpoint."""
        self.visited.clear()
        if self.config.curriculum is not None:
            self.successes = self.config.curriculum.memory(position.successes)

    def snapshot(self) -> bytes:
        """Return the durable state for `restore`; equal ledgers give equal bytes."""
        return msgspec.msgpack.encode(self._table())

    @classmethod
    def restore(cls, config: LedgerConfig, snapshot: bytes | None, journal: Iterable[records.Record] = ()) -> Self:
        """Return the ledger after a snapshot (or a new one) and the records since. The next event must be `Restart`."""
        ledger = cls(config)
        if snapshot is not None:
            state = msgspec.msgpack.decode(snapshot, type=LedgerTable)
            ledger.samples, ledger.members = Samples.load(state.samples), Members.load(state.members)
            for name in _SCALARS:
                setattr(ledger, name, getattr(state, name))
        for record in journal:
            ledger.apply(record)
        return ledger

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LedgerState) and self._table() == other._table()

    __hash__ = None  # type: ignore[assignment]

    def _table(self) -> LedgerTable:
        scalars = {name: getattr(self, name) for name in _SCALARS}
        return LedgerTable(samples=self.samples.dump(), members=self.members.dump(), **scalars)

    def apply(self, record: records.Record) -> None:
        """Change the durable state by one record; nothing else changes it."""
        APPLY[type(record)](self, record)


class LedgerTable(msgspec.Struct, array_like=True, kw_only=True):
    """The durable state as one value; fields are named like the attributes of `LedgerState`."""

    samples: SampleTable
    members: MemberTable
    version: int
    lineage: int
    checkpoint_version: int
    assignment: records.Assigned | None
    votes: tuple[str, ...]
    is_orphaned: bool
    staleness: tuple[float, int]
    failed_in_a_row: int
    filtered_in_a_row: int
    halted: str | None
    generation: int
    num_lost: int
    losses_in_a_row: int
    successes: bytearray = msgspec.field(default_factory=bytearray)
    visited: dict[int, float] = {}


_SCALARS = LedgerTable.__struct_fields__[2:]


def _resumed(ledger: LedgerState, record: records.Resumed) -> None:
    ledger.samples.resume(record.position)
    ledger.recall(record.position)
    ledger.version = ledger.checkpoint_version = record.position.version


def _meshed(ledger: LedgerState, record: records.Meshed) -> None:
    is_first = not ledger.members.mesh
    ledger.members.epoch, ledger.members.mesh = record.epoch, record.members
    if is_first:  # all have loaded the same checkpoint
        ledger.members.have_weights()
    ledger.is_orphaned = not record.members
    ledger.votes = ()
    if ledger.assignment is not None:
        ledger.assignment = msgspec.structs.replace(ledger.assignment, epoch=record.epoch)


def _delivered(ledger: LedgerState, record: records.Delivered) -> None:
    ledger.samples.deliver(record)
    ledger.visit(record)
    ledger.failed_in_a_row = ledger.filtered_in_a_row = 0


def _dropped(ledger: LedgerState, record: records.Dropped) -> None:
    ledger.samples.drop(record)
    ledger.visit(record)
    if record.reason.startswith(FILTERED):
        ledger.filtered_in_a_row += 1
    else:
        ledger.failed_in_a_row += 1


def _assigned(ledger: LedgerState, record: records.Assigned) -> None:
    ledger.samples.assign(record.samples)
    ledger.assignment = record
    ledger.votes = ()
    if ledger.config.rollouts:
        ages = [record.step - ledger.samples.active[s].min_version for s in record.samples]
        ledger.staleness = (sum(ages) / len(ages), max(ages))


def _payloads_lost(ledger: LedgerState, record: records.PayloadsLost) -> None:
    assert ledger.assignment is not None and ledger.assignment.step == record.step
    ledger.samples.unassign(ledger.assignment.samples, lost=record.samples)
    ledger.assignment, ledger.votes = None, ()
    ledger.members.epoch += 1  # gradients of the batch are void
    ledger.num_lost += len(record.samples)
    ledger.losses_in_a_row += 1


def _voted(ledger: LedgerState, record: records.Voted) -> None:
    ledger.votes = (*ledger.votes, record.replica)


def _commit(ledger: LedgerState, record: records.Commit) -> None:
    assert ledger.assignment is not None and ledger.assignment.step == record.step == ledger.version
    ledger.samples.commit(ledger.assignment.samples)
    ledger.remember()
    ledger.members.have_weights()
    ledger.version += 1
    ledger.assignment, ledger.votes = None, ()
    ledger.losses_in_a_row = 0


def _num_samples(ledger: LedgerState, num_steps: int) -> int:
    return num_steps * ledger.config.groups_per_step


def _covered(ledger: LedgerState, record: records.Covered) -> None:
    ledger.samples.cover(_num_samples(ledger, record.version - ledger.checkpoint_version))
    ledger.checkpoint_version = record.version


def _rolled_back(ledger: LedgerState, record: records.RolledBack) -> None:
    if record.version < ledger.version:
        if record.position is None:
            raise UserError("the journal is of an earlier release; continue its run from a checkpoint with --resume")
        ledger.recall(record.position)
        ledger.samples.reset(record.position, num_undone=_num_samples(ledger, ledger.version - record.version))
    elif ledger.assignment is not None:
        ledger.samples.unassign(ledger.assignment.samples, lost=())
    ledger.version, ledger.lineage = record.version, record.lineage
    ledger.members.epoch += 1  # gradients of the undone steps are void
    ledger.assignment, ledger.votes = None, ()
    ledger.is_orphaned = False


def _restarted(ledger: LedgerState, record: records.Restarted) -> None:
    ledger.generation = record.generation


def _halted(ledger: LedgerState, record: records.Halted) -> None:
    ledger.halted = record.message


APPLY: dict[type[records.Record], Callable[..., None]] = {
    records.Resumed: _resumed,
    records.Joined: lambda ledger, r: ledger.members.join(r.replica, r.role, r.incarnation),
    records.Moved: lambda ledger, r: ledger.members.move(r.replica, r.state),
    records.Meshed: _meshed,
    records.Leased: lambda ledger, r: ledger.samples.lease(r),
    records.Returned: lambda ledger, r: ledger.samples.return_lease(r),
    records.Delivered: _delivered,
    records.Dropped: _dropped,
    records.Supplied: lambda ledger, r: ledger.samples.supply(r.samples, NO_DEADLINE),
    records.Assigned: _assigned,
    records.PayloadsLost: _payloads_lost,
    records.Unheld: lambda ledger, r: ledger.samples.forget(r.samples),
    records.Voted: _voted,
    records.Commit: _commit,
    records.Covered: _covered,
    records.RolledBack: _rolled_back,
    records.Restarted: _restarted,
    records.Halted: _halted,
    records.Skipped: lambda ledger, r: ledger.samples.skip(r.sample),
}

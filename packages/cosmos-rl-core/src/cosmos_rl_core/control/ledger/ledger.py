"""The state of a run: the place of every sample, the members, the committed version.

    records, outputs = ledger.on(now, event)     # decides; the ledger has already changed
    journal.append(records); await journal.flush()
    send(outputs)                                # only now

A pure state machine: no clock, no randomness, no IO. Durable state changes only in `apply(record)`, so that
replaying the records gives an equal ledger. The rules live beside this file and read top to bottom:

    liveness   Join Ready Heartbeat Disconnected Goodbye Restart Tick  who takes part, which leases expired
    leasing    RequestLeases Deliver Failed              PENDING -> LEASED -> READY or DROPPED
    stepping   RequestBatch PayloadsLost Vote CheckpointDone Rollback  READY -> ASSIGNED -> COMMITTED -> CHECKPOINTED

`apply` changes the state by a record, `explain` lists who waits for what.

Exactly-once is defined on the weight lineage: a step is committed once all members of the mesh voted for it
in the same epoch, then everybody applies it. A member's death before that starts a new epoch with the same
samples; the death of all members starts a new lineage at the last checkpoint, and the samples of the undone
steps are READY again. A group of the batch that a member cannot read starts a new epoch too, and a new batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger import events, explain, leasing, liveness, records, stepping
from cosmos_rl_core.control.ledger.apply import APPLY
from cosmos_rl_core.control.ledger.membership import Members, MemberTable
from cosmos_rl_core.control.ledger.samples import Samples, SampleTable
from cosmos_rl_core.control.ledger.sessions import Sessions
from cosmos_rl_core.rollout.staleness import StalenessWindow

UNBOUNDED = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig:
    """The rules' numbers."""

    groups_per_step: int
    """Samples a step trains on."""
    max_staleness: int = 0
    """Most versions between the weights that drew a term and the weights trained on it."""
    total_samples: int | None = None
    """Length of the prompt stream; None: endless."""
    max_steps: int | None = None
    """Steps of the run; None: until the stream ends."""
    rollouts: bool = True
    """False: supervised; samples are ready when a batch is asked for, without leases."""
    policy_members: int = 1
    """Policy replicas that must be ready before the first step, and after all were lost."""
    lease_ttl_s: float = 60.0
    """A lease not renewed for so long returns."""
    silence_s: float = 120.0
    """A ready replica not heard of for so long is suspect."""
    suspect_grace_s: float = 2.0
    """A suspect replica that does not come back for so long is gone."""
    max_attempts: int = 3
    """Errors after which a sample is dropped. Deaths of replicas do not count."""
    max_failed: int = 16
    """Most samples dropped for errors in a row, with no group completed in between, before the run halts."""
    max_filtered: int = 1024
    """Most samples filtered in a row before the run halts."""
    max_losses: int = 8
    """Times in a row that groups of a batch may turn out to be unreadable before the run halts."""


class Ledger:
    """The state machine. See the module's text; the attributes are for reading."""

    rules: ClassVar[Mapping[type, Callable[..., None]]] = {**liveness.RULES, **leasing.RULES, **stepping.RULES}

    def __init__(self, config: LedgerConfig) -> None:
        self.config = config
        self.window = StalenessWindow(config.max_staleness, config.groups_per_step)
        self.samples = Samples()
        self.members = Members()
        self.version = 0
        """Committed steps on the lineage."""
        self.lineage = 0
        self.checkpoint_version = 0
        """Version of the last durable checkpoint."""
        self.assignment: records.Assigned | None = None
        """The batch in work, under its present epoch."""
        self.votes: tuple[str, ...] = ()
        self.is_orphaned = False
        """All policy replicas were lost and the server has not rolled back yet."""
        self.staleness: tuple[float, int] = (0.0, 0)
        """Mean and maximum, over the groups of the last assigned batch, of step - oldest version."""
        self.failed_in_a_row = 0
        self.filtered_in_a_row = 0
        self.num_lost = 0
        """Groups that were generated and could not be read by the policy."""
        self.losses_in_a_row = 0
        """Batches taken apart for such groups since the last commit."""
        self.halted: str | None = None
        self.generation = 0
        self.sessions = Sessions()
        self.now = 0.0
        self._records: list[records.Record] = []
        self._outputs: list[events.Output] = []

    @classmethod
    def resume(cls, config: LedgerConfig, position: records.Position) -> tuple[Ledger, records.Resumed]:
        """Return a ledger that stands at a checkpoint, and the record that must open its journal."""
        ledger, record = cls(config), records.Resumed(position)
        ledger.apply(record)
        return ledger, record

    @classmethod
    def replay(cls, config: LedgerConfig, journal: Iterable[records.Record]) -> Ledger:
        """Return the ledger a journal describes. Follow it with the event `Restart`."""
        return cls.restore(config, None, journal)

    def on(self, now: float, event: events.Event) -> tuple[list[records.Record], list[events.Output]]:
        """Take an event; return the records to journal and then the outputs to send.

        `now` is in seconds, of any origin, and never decreases until the event `Restart`.
        """
        self.now, self._records, self._outputs = now, [], []
        if not isinstance(event, events.From):
            self.rules[type(event)](self, event)
        elif liveness.is_current(self, event):
            self.rules[type(event.message)](self, event.replica, event.message)
        if self.halted is None:
            stepping.answer_batch_requests(self)
            leasing.answer_lease_requests(self)
        return self._records, self._outputs

    def decide(self, record: records.Record) -> None:
        """Apply a record and hand it to the caller of `on`."""
        self.apply(record)
        self._records.append(record)

    def output(self, output: events.Output) -> None:
        self._outputs.append(output)

    def send(self, replica: str, message: p.FromLedger) -> None:
        self.output(events.To(replica, message))

    def reject(self, replica: str, reason: str, sample: int = -1) -> None:
        """Answer a message of the replica's present process that changed nothing."""
        self.send(replica, p.Reject(self.members.by_name[replica].incarnation, reason, sample))

    def halt(self, message: str) -> None:
        """End the run with an error."""
        self.decide(records.Halted(message))
        self.output(events.Halt(message))

    @property
    def next_step(self) -> int:
        """First step without a batch."""
        return self.version + (self.assignment is not None)

    def stream_left(self) -> int:
        """Return how many samples were never issued."""
        total = self.config.total_samples
        return UNBOUNDED if total is None else max(total - self.samples.next_sample, 0)

    def places_left(self) -> int:
        """Return how many groups the remaining steps need beyond the outstanding ones."""
        if self.config.max_steps is None:
            return UNBOUNDED
        steps = self.config.max_steps - self.next_step
        return steps * self.config.groups_per_step - self.samples.num_outstanding

    def why_finished(self) -> str | None:
        """Return why there will never be another batch, or None while the run goes on."""
        return stepping.why_finished(self)

    def waits(self) -> list[str]:
        """Return who waits for what, one readable line each."""
        return explain.lines(self)

    def counts(self) -> dict[str, int]:
        """Return the samples issued and in each state; `issued` is the sum of the others at every instant."""
        return self.samples.counts()

    def position(self) -> records.Position:
        """Return where the stream stands for a checkpoint of the present version."""
        return self.samples.position(self.version)

    def snapshot(self) -> bytes:
        """Return the durable state, for `restore`; the same bytes for equal ledgers."""
        return msgspec.msgpack.encode(self._state())

    @classmethod
    def restore(cls, config: LedgerConfig, snapshot: bytes | None, journal: Iterable[records.Record] = ()) -> Ledger:
        """Return the ledger of a snapshot (or a new one) and the records since. `Restart` comes next."""
        ledger = cls(config)
        if snapshot is not None:
            state = msgspec.msgpack.decode(snapshot, type=LedgerState)
            ledger.samples, ledger.members = Samples.load(state.samples), Members.load(state.members)
            for name in _SCALARS:
                setattr(ledger, name, getattr(state, name))
        for record in journal:
            ledger.apply(record)
        return ledger

    def state_digest(self) -> str:
        """Return a digest of the durable state; equal ledgers have equal digests."""
        return hashlib.blake2b(self.snapshot(), digest_size=16).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._state() == other._state()

    __hash__ = None  # type: ignore[assignment]

    def _state(self) -> LedgerState:
        scalars = {name: getattr(self, name) for name in _SCALARS}
        return LedgerState(samples=self.samples.dump(), members=self.members.dump(), **scalars)

    def apply(self, record: records.Record) -> None:
        """Change the durable state by one fact. The only place that does."""
        APPLY[type(record)](self, record)


class LedgerState(msgspec.Struct, array_like=True, kw_only=True):
    """The durable state as one value; the fields are the ledger's attributes of the same names."""

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


_SCALARS = LedgerState.__struct_fields__[2:]

"""A ledger with a short method for every message. After each event the books must balance, and the journal replay."""

from __future__ import annotations

from cosmos_rl_core.control import protocol as m
from cosmos_rl_core.control.ledger import events, records
from cosmos_rl_core.control.ledger.events import To
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.state import LedgerConfig


class Play:
    """A ledger with a short method for every message."""

    def __init__(self, *, ledger: Ledger | None = None, **config) -> None:
        self.ledger = ledger or Ledger(LedgerConfig(**{"groups_per_step": 2} | config))
        self.now = 0.0
        self.journal: list[records.Record] = []
        self.base = self.ledger.snapshot()
        self.incarnations: dict[str, int] = {}
        self.removed: list[str] = []
        """Replicas in the order of their removal."""
        self.silent: list[str] = []
        """Those of them that did not answer."""
        self.positions = {self.ledger.version: self.ledger.position()}
        """Version -> its stream position, as a checkpoint has it."""

    def on(self, event: events.Event, *, after: float = 0.0) -> list[events.Output]:
        self.now += after
        decided, said = self.ledger.on(self.now, event)
        self.journal += decided
        if any(isinstance(record, records.Commit) for record in decided):
            self.positions[self.ledger.version] = self.ledger.position()
        counts = self.ledger.counts()
        assert counts.pop("issued") == sum(counts.values())
        assert Ledger.restore(self.ledger.config, self.base, self.journal) == self.ledger
        for output in said:
            if isinstance(output, To) and isinstance(output.message, m.Welcome):
                self.incarnations[output.replica] = output.message.incarnation
        removed = [output for output in said if isinstance(output, events.Removed)]
        self.removed += [output.replica for output in removed]
        self.silent += [output.replica for output in removed if output.is_silent]
        return [output for output in said if not isinstance(output, events.Removed)]

    def join(self, replica: str, *, ready: bool = True) -> list[events.Output]:
        said = self.on(events.Join(replica, "policy" if replica.startswith("policy") else "rollout"))
        return [*said, *(self.send(replica, m.Ready()) if ready else [])]

    def send(self, replica: str, message: m.ToLedger, *, incarnation: int | None = None, after: float = 0.0):
        number = self.incarnations[replica] if incarnation is None else incarnation
        return self.on(events.From(replica, number, message), after=after)

    def disconnect(self, replica: str):
        return self.on(events.Disconnected(replica, self.incarnations[replica]))

    def ask(self, replica: str, *, version: int = 0, capacity: int = 8, lineage: int = 0):
        return self.send(replica, m.RequestLeases(version, capacity, lineage))

    def deliver(
        self,
        replica: str,
        sample: int,
        *,
        attempt: int = 1,
        version: int = 0,
        newest: int | None = None,
        lineage: int = 0,
    ):
        newest = version if newest is None else newest
        return self.send(replica, m.Deliver(sample, attempt, version, newest, 10, lineage=lineage))

    def fail(self, replica: str, sample: int, *, attempt: int = 1, reason: str = "boom", final: bool = False):
        return self.send(replica, m.Failed(sample, attempt, reason, final))

    def batch(self, replica: str = "policy-0", *, step: int | None = None):
        step = self.ledger.version if step is None else step
        return self.send(replica, m.RequestBatch(step, self.ledger.members.epoch))

    def lose(self, *samples: int, replica: str = "policy-0", reason: str = "gone", epoch: int | None = None):
        epoch = self.ledger.members.epoch if epoch is None else epoch
        return self.send(replica, m.PayloadsUnreadable(self.ledger.version, epoch, samples, reason))

    def vote(self, replica: str = "policy-0", *, step: int | None = None):
        step = self.ledger.version if step is None else step
        return self.send(replica, m.Vote(step, self.ledger.members.epoch))

    def checkpoint(self, version: int, *, lineage: int = 0):
        return self.send("policy-0", m.CheckpointDone(version, lineage=lineage))

    def roll_back(self, version: int) -> list[events.Output]:
        return self.on(events.Rollback(self.positions[version]))

    def tick(self, *, after: float) -> list[events.Output]:
        return self.on(events.Tick(), after=after)

    def train(self, *, steps: int = 1) -> None:
        """Go through whole steps with one rollout and one policy replica."""
        for _ in range(steps):
            version = self.ledger.version
            for lease in granted(self.ask("rollout-0", version=version)):
                self.deliver("rollout-0", lease.sample, attempt=lease.attempt, version=version)
            self.batch()
            self.vote()


def granted(said) -> list[m.LeasedPrompt]:
    messages = [output.message for output in said if isinstance(output, To)]
    return [lease for message in messages if isinstance(message, m.Grant) for lease in message.prompts]

"""What must hold in every simulated run, checked from outside: from the records, the messages and the fake replicas.

The checkers keep their own books and never ask the ledger what it thinks is right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger import events, records
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.membership import MemberState
from cosmos_rl_core.control.ledger.state import LedgerConfig
from ledger_simulation.payloads import content_of


class History:
    """The run as its records tell it, with the rules that records alone must obey."""

    def __init__(self, config: LedgerConfig) -> None:
        self._config = config
        self.incarnations: dict[str, int] = {}
        self.gone: set[str] = set()
        self.leased: dict[int, str] = {}
        """Sample -> holder."""
        self.ready: set[int] = set()
        self.oldest: dict[int, int] = {}
        """Sample that was delivered -> oldest version of its terms."""
        self.newest: dict[int, int] = {}
        """The same for the newest version."""
        self.content: dict[int, str] = {}
        """Sample that was delivered -> the content of its group."""
        self.trained: set[int] = set()
        """Samples on the lineage."""
        self.dropped: set[int] = set()
        self.batches: list[tuple[int, ...]] = []
        """The lineage: samples of each committed step."""
        self.weights: list[str] = [""]
        """Digest of the weights of each version: of all samples trained, in order."""
        self.assigned: records.Assigned | None = None
        self.mesh: tuple[str, ...] = ()
        self.epoch = 0
        self.lineage = 0

    @classmethod
    def of(cls, config: LedgerConfig, journal: Iterable[records.Record]) -> History:
        history = cls(config)
        for record in journal:
            history.add(record)
        return history

    def add(self, record: records.Record) -> None:
        match record:
            case records.Leased():
                assert not self.is_held(record.sample), f"sample {record.sample} was leased twice"
                self.leased[record.sample] = record.replica
            case records.Returned():
                del self.leased[record.sample]
            case records.Delivered():
                self.leased.pop(record.sample, None)
                assert not self.is_settled(record.sample), f"sample {record.sample} was taken a second time"
                self.ready.add(record.sample)
                self.oldest[record.sample], self.newest[record.sample] = record.min_version, record.max_version
                self.content[record.sample] = content_of(record.replica, record)
            case records.Dropped():
                self.leased.pop(record.sample, None)
                self.dropped.add(record.sample)
            case records.Skipped():
                assert not self.is_held(record.sample), f"sample {record.sample} was skipped after a lease"
                self.dropped.add(record.sample)
            case records.Assigned():
                self._assign(record)
            case records.PayloadsLost():
                self._take_apart(record)
            case records.Unheld():
                assert set(record.samples) <= self.ready, f"{record.samples} are not all ready: {sorted(self.ready)}"
                self.ready.difference_update(record.samples)
            case records.Commit():
                self._commit(record)
            case records.RolledBack():
                self._roll_back(record)
            case _:
                self._add_member(record)

    def _add_member(self, record: records.Record) -> None:
        match record:
            case records.Joined():
                assert record.incarnation > self.incarnations.get(record.replica, 0)
                self.incarnations[record.replica] = record.incarnation
                self.gone.discard(record.replica)
            case records.Moved(state=MemberState.GONE):
                assert record.replica not in self.leased.values(), f"{record.replica} is gone with leases"
                self.gone.add(record.replica)
            case records.Meshed():
                assert record.epoch > self.epoch
                self.epoch, self.mesh = record.epoch, record.members

    def is_current(self, replica: str, incarnation: int) -> bool:
        return self.incarnations.get(replica) == incarnation and replica not in self.gone

    def is_settled(self, sample: int) -> bool:
        """Return whether a sample was delivered or dropped and needs no lease any more."""
        is_assigned = self.assigned is not None and sample in self.assigned.samples
        return sample in self.ready or sample in self.dropped or sample in self.trained or is_assigned

    def is_held(self, sample: int) -> bool:
        return sample in self.leased or self.is_settled(sample)

    def _assign(self, record: records.Assigned) -> None:
        assert self.assigned is None and record.step == len(self.batches), "a step was assigned out of turn"
        assert len(record.samples) == self._config.groups_per_step
        for sample in record.samples:
            self.ready.remove(sample)
            age = record.step - self.oldest[sample]
            assert age <= self._config.max_staleness, f"sample {sample} is {age} versions old at step {record.step}"
            newest = self.newest[sample]
            assert newest <= record.step, f"sample {sample} has terms of version {newest} at step {record.step}"
        self.assigned = record

    def _take_apart(self, record: records.PayloadsLost) -> None:
        assert self.assigned is not None and record.step == self.assigned.step
        assert record.samples and set(record.samples) <= set(self.assigned.samples)
        self.ready.update(set(self.assigned.samples).difference(record.samples))
        self.assigned, self.epoch = None, self.epoch + 1

    def _commit(self, record: records.Commit) -> None:
        assert self.assigned is not None and record.step == self.assigned.step
        assert record.epoch == self.epoch and record.lineage == self.lineage
        assert set(record.voters) >= set(self.mesh), f"step {record.step} lacks votes: {record.voters} of {self.mesh}"
        assert self.mesh, f"step {record.step} was committed by nobody"
        assert self.trained.isdisjoint(self.assigned.samples), f"trained twice: {self.assigned.samples}"
        self.trained.update(self.assigned.samples)
        self.batches.append(self.assigned.samples)
        self.weights.append(trained(self.weights[-1], self.assigned.samples))
        self.assigned = None

    def _roll_back(self, record: records.RolledBack) -> None:
        assert record.lineage == self.lineage + 1
        assert not self.leased, f"leases outlive the rollback: {self.leased}"
        if record.version == len(self.batches):
            self.ready.update(self.assigned.samples if self.assigned is not None else ())
        else:
            self._return_to(record)
        self.batches, self.weights = self.batches[: record.version], self.weights[: record.version + 1]
        self.assigned, self.lineage, self.epoch = None, record.lineage, self.epoch + 1

    def _return_to(self, record: records.RolledBack) -> None:
        """Everything is issued again but what was trained on, or dropped, before the checkpoint."""
        position = record.position
        assert position is not None and position.version == record.version
        finished = set(range(position.next_sample)).difference(position.unfinished)
        self.trained = {sample for batch in self.batches[: record.version] for sample in batch}
        assert self.trained <= finished, f"trained on before the checkpoint and issued again: {self.trained - finished}"
        lost = finished - self.trained - self.dropped
        assert not lost, f"neither trained on nor dropped before the checkpoint, but not issued again: {lost}"
        self.dropped = finished - self.trained
        self.ready.clear()


def trained(weights: str, samples: tuple[int, ...]) -> str:
    """Return the digest of weights after training on samples."""
    return hashlib.blake2b(f"{weights} {samples}".encode(), digest_size=8).hexdigest()


class Invariants:
    """Watches the ledger event by event."""

    def __init__(self, config: LedgerConfig) -> None:
        self._config = config
        self.history = History(config)
        self._votes: set[tuple[str, int, int]] = set()
        self._batches: dict[tuple[int, int], tuple[int, ...]] = {}
        self._acknowledged: set[int] = set()
        self._is_of_old_lineage = False
        """Whether the event is a group that was sampled before the rollback."""

    def before(self, event: events.Event) -> bool:
        """Return whether an event comes from a process that was replaced or given up, by our own books."""
        message = event.message if isinstance(event, events.From) else None
        self._is_of_old_lineage = isinstance(message, p.Deliver) and message.lineage != self.history.lineage
        if not isinstance(event, events.From | events.Disconnected | events.Gone):
            return False
        if isinstance(event, events.From) and isinstance(event.message, p.Vote):
            self._votes.add((event.replica, event.message.step, event.message.epoch))
        return not self.history.is_current(event.replica, event.incarnation)

    def after(self, ledger: Ledger, decided: list[records.Record], *, was_stale: bool) -> None:
        """Check what one event led to."""
        # the checkpoint of a policy that has left is whole
        effects = [record for record in decided if not isinstance(record, records.Covered)]
        assert not (was_stale and effects), f"words of a fenced process had effect: {effects}"
        counts = ledger.counts()
        issued = counts.pop("issued")
        assert issued == sum(counts.values()), f"books do not balance: {issued} issued, {counts}"
        for record in decided:
            self.history.add(record)
            match record:
                case records.Delivered():
                    assert not self._is_of_old_lineage, f"sample {record.sample} is of weights that were undone"
                case records.Leased():
                    assert record.sample not in self._acknowledged, f"acknowledged sample {record.sample} was lost"
                case records.Commit():
                    for voter in record.voters:
                        assert (voter, record.step, record.epoch) in self._votes, f"{voter} never voted"
                case records.PayloadsLost() | records.Unheld():
                    self._acknowledged.difference_update(record.samples)
                case records.RolledBack():
                    self._acknowledged = {sample for sample in self._acknowledged if self.history.is_settled(sample)}

    def sent(self, message: p.FromLedger) -> None:
        """Note a message to a replica."""
        match message:
            case p.Ack(sample):
                if self.history.is_settled(sample):  # not so after an error that is tried again
                    self._acknowledged.add(sample)
            case p.Batch(step, epoch, samples):
                before = self._batches.setdefault((epoch, step), samples)
                assert before == samples, f"two batches for step {step} in epoch {epoch}"

    def restarted(self, ledger: Ledger, journal: list[records.Record]) -> None:
        """Check the controller that came back with what was durable."""
        self.history = History.of(self._config, journal)
        for sample in self._acknowledged:
            entry = ledger.samples.active.get(sample)
            is_lost = entry is not None and entry.state in ("pending", "leased")
            assert 0 <= sample < ledger.samples.next_sample and not is_lost, (
                f"acknowledged sample {sample} was lost in the crash"
            )

    def applied(self, replica: str, version: int, weights: str) -> None:
        """Check a policy replica's weights against the lineage."""
        on_lineage = version < len(self.history.weights) and self.history.weights[version] == weights
        assert on_lineage, f"{replica} has weights of version {version} that are not on the lineage"

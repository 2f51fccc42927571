"""The samples of a run and their states.

    PENDING -> LEASED -> READY -> ASSIGNED(step) -> COMMITTED(step) -> CHECKPOINTED
       ^---------|         |  \\-> also directly from PENDING: a late result, or supervised data
                 \\-> DROPPED(reason)
    skipped by the curriculum: DROPPED as soon as it is issued
    rollback to the newest step: ASSIGNED -> READY
    rollback behind it: the states at the checkpoint's position, all that is unfinished there PENDING
    payloads lost: ASSIGNED -> PENDING, the others of the batch -> READY
    unheld after a restart of the controller: READY -> PENDING

Samples are issued lazily: ids 0 .. next_sample - 1 exist, and issued = sum of the counts over all states. Only the
counts of COMMITTED, CHECKPOINTED and DROPPED samples are kept, so that memory does not grow with the steps: a
checkpoint has the position in the stream, which says which samples to issue again after a rollback to it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable
from enum import StrEnum

import msgspec

from cosmos_rl_core.control.ledger import records
from cosmos_rl_core.control.ledger.records import Position


class SampleState(StrEnum):
    PENDING = "pending"
    LEASED = "leased"
    READY = "ready"
    ASSIGNED = "assigned"
    COMMITTED = "committed"
    CHECKPOINTED = "checkpointed"
    DROPPED = "dropped"


PENDING, LEASED, READY, ASSIGNED, COMMITTED, CHECKPOINTED, DROPPED = SampleState

SKIPPED = "filtered:curriculum"
"""Reason of a sample that the curriculum has not selected."""


class Sample(msgspec.Struct, array_like=True):
    """State of one prompt group."""

    state: SampleState = PENDING
    attempt: int = 0
    """Number of leases granted so far."""
    failures: int = 0
    """Number of leases that ended in an error of the sample; losses of replicas do not count."""
    replica: str = ""
    """The replica that holds the lease or delivered the group."""
    deadline: int = 0
    """Last step that may train on the group; set when LEASED."""
    min_version: int = 0
    max_version: int = 0
    num_terms: int = 0


class SampleTable(msgspec.Struct, array_like=True):
    """All samples as one value, for snapshots and comparisons."""

    next_sample: int
    active: dict[int, Sample]
    committed: int | dict[int, tuple[int, ...]]
    """Number of COMMITTED samples; snapshots of earlier releases have their ids by step."""
    drop_reasons: dict[str, int]
    num_checkpointed: int
    num_dropped: int | None = None
    """None: all of `drop_reasons`."""
    highest_attempt: int = 0
    attempts_before: int = 0


class Samples:
    """All active samples, with the indices that the ledger needs. Changed only by `apply`."""

    def __init__(self) -> None:
        self.next_sample = 0
        self.active: dict[int, Sample] = {}
        """Issued samples by id, without COMMITTED, CHECKPOINTED and DROPPED ones."""
        self.outstanding: dict[int, int] = {}
        """Number of LEASED + READY samples by deadline, no zeros."""
        self.ready: dict[int, set[int]] = {}
        """READY samples by deadline, no empty sets."""
        self.leased: dict[str, set[int]] = {}
        """LEASED samples by replica, no empty sets."""
        self.drop_reasons: Counter[str] = Counter()
        """Number of drops by reason, those on undone steps included."""
        self.attempts_before = 0
        """Highest attempt of any sample before the last reset; later attempts have higher numbers."""
        self._highest_attempt = 0
        self.by_state = dict.fromkeys(SampleState, 0)
        """Number of samples in each state."""
        self._pending: list[int] = []  # heap; may hold ids that are no longer PENDING

    def counts(self) -> dict[str, int]:
        """Return the number of samples issued and in each state."""
        return {"issued": self.next_sample} | {state.value: n for state, n in self.by_state.items()}

    def all_ready(self) -> set[int]:
        return {sample for samples in self.ready.values() for sample in samples}

    @property
    def num_outstanding(self) -> int:
        return self.by_state[LEASED] + self.by_state[READY]

    def first_pending(self) -> int | None:
        """Return the lowest PENDING id."""
        while self._pending:
            entry = self.active.get(self._pending[0])
            if entry is not None and entry.state is PENDING:
                return self._pending[0]
            heapq.heappop(self._pending)
        return None

    def lowest_pending(self, count: int) -> list[int]:
        """Return up to `count` PENDING ids, ascending."""
        ids: list[int] = []
        while len(ids) < count and (sample := self.first_pending()) is not None:
            ids.append(sample)
            while self._pending and self._pending[0] == sample:  # an id that was PENDING before may be there twice
                heapq.heappop(self._pending)
        for sample in ids:
            heapq.heappush(self._pending, sample)
        return ids

    def dump(self) -> SampleTable:
        """Return the complete state in canonical order."""
        return SampleTable(
            self.next_sample,
            dict(sorted(self.active.items())),
            self.by_state[COMMITTED],
            dict(sorted(self.drop_reasons.items())),
            self.by_state[CHECKPOINTED],
            self.by_state[DROPPED],
            self._highest_attempt,
            self.attempts_before,
        )

    @classmethod
    def load(cls, table: SampleTable) -> Samples:
        """Return the samples of a dump."""
        samples = cls()
        samples.next_sample, samples.drop_reasons = table.next_sample, Counter(table.drop_reasons)
        samples.attempts_before, samples._highest_attempt = table.attempts_before, table.highest_attempt
        num_dropped = samples.drop_reasons.total() if table.num_dropped is None else table.num_dropped
        samples.by_state |= {CHECKPOINTED: table.num_checkpointed, DROPPED: num_dropped}
        for sample, entry in table.active.items():
            samples._enter(sample, entry, entry.state)
        if isinstance(table.committed, int):  # else they were among the active ones
            samples.by_state[COMMITTED] = table.committed
        return samples

    def resume(self, position: Position) -> None:
        self.next_sample = position.next_sample
        self.by_state[CHECKPOINTED] = position.next_sample - len(position.unfinished)
        for sample in position.unfinished:
            self._add(sample)

    def lease(self, record: records.Leased) -> None:
        entry = self._issue_or_leave(record.sample)
        entry.replica, entry.attempt, entry.deadline = record.replica, record.attempt, record.deadline
        self._highest_attempt = max(self._highest_attempt, record.attempt)
        self._enter(record.sample, entry, LEASED)

    def return_lease(self, record: records.Returned) -> None:
        entry = self._leave(record.sample, LEASED)
        entry.failures += record.failed
        entry.replica = ""
        self._enter(record.sample, entry, PENDING)

    def deliver(self, record: records.Delivered) -> None:
        entry = self._leave(record.sample, PENDING, LEASED)
        entry.replica, entry.deadline, entry.num_terms = record.replica, record.deadline, record.num_terms
        entry.min_version, entry.max_version = record.min_version, record.max_version
        self._enter(record.sample, entry, READY)

    def supply(self, samples: Iterable[int], deadline: int) -> None:
        """Make samples READY without a lease."""
        for sample in samples:
            entry = self._issue_or_leave(sample)
            entry.deadline = deadline
            self._enter(sample, entry, READY)

    def drop(self, record: records.Dropped) -> None:
        self._enter(record.sample, self._leave(record.sample, PENDING, LEASED), DROPPED)
        self.drop_reasons[record.reason] += 1

    def skip(self, sample: int) -> None:
        """Drop the stream's next sample, which was not selected."""
        self._enter(sample, self._issue_or_leave(sample), DROPPED)
        self.drop_reasons[SKIPPED] += 1

    def assign(self, samples: Iterable[int]) -> None:
        for sample in samples:
            self._enter(sample, self._leave(sample, READY), ASSIGNED)

    def unassign(self, samples: Iterable[int], *, lost: Collection[int]) -> None:
        """Discard a batch; `lost` are the samples whose groups are unreadable."""
        for sample in samples:
            self._enter(sample, self._leave(sample, ASSIGNED), PENDING if sample in lost else READY)

    def forget(self, samples: Iterable[int]) -> None:
        """Make READY samples pending: their groups are gone."""
        for sample in samples:
            self._enter(sample, self._leave(sample, READY), PENDING)

    def commit(self, samples: Iterable[int]) -> None:
        for sample in samples:
            self._enter(sample, self._leave(sample, ASSIGNED), COMMITTED)

    def cover(self, num: int) -> None:
        """A checkpoint contains the first `num` COMMITTED samples."""
        self.by_state[COMMITTED] -= num
        self.by_state[CHECKPOINTED] += num

    def reset(self, position: Position, *, num_undone: int) -> None:
        """Return to a position: the last `num_undone` COMMITTED samples are undone, the unfinished ones PENDING.

        Samples that were dropped or issued after it are issued again. Attempts go on counting: a late message of an
        attempt from before must not be taken for one of an attempt from now.
        """
        num_trained = self.by_state[CHECKPOINTED] + self.by_state[COMMITTED] - num_undone
        num_dropped = position.next_sample - len(position.unfinished) - num_trained
        assert 0 <= num_dropped <= self.by_state[DROPPED], f"{num_dropped} dropped samples at {position}"
        counts = {CHECKPOINTED: self.by_state[CHECKPOINTED], COMMITTED: self.by_state[COMMITTED] - num_undone}
        self.by_state = dict.fromkeys(SampleState, 0) | counts | {DROPPED: num_dropped}
        for index in (self.active, self.outstanding, self.ready, self.leased, self._pending):
            index.clear()
        self.attempts_before, self.next_sample = self._highest_attempt, position.next_sample
        for sample in position.unfinished:
            self._add(sample)

    def _add(self, sample: int) -> None:
        self._enter(sample, Sample(attempt=self.attempts_before), PENDING)

    def _issue_or_leave(self, sample: int) -> Sample:
        """Issue the sample if it is the stream's next one; else take it out of the PENDING ones."""
        if sample != self.next_sample:
            return self._leave(sample, PENDING)
        self.next_sample += 1
        return Sample(attempt=self.attempts_before)

    # Each sample is in the count of its state and, by its state, in one index. `_leave` takes it out of both, `_enter`
    # puts it into those of the new state: whatever is between the two calls may change the entry's fields.

    def _enter(self, sample: int, entry: Sample, state: SampleState) -> None:
        """Add a sample to the counts and indices of a state."""
        entry.state = state
        self.by_state[state] += 1
        if state is COMMITTED or state is DROPPED:  # counted only, so that memory does not grow
            self.active.pop(sample, None)
            return
        self.active[sample] = entry
        if state is PENDING:
            heapq.heappush(self._pending, sample)
        elif state is LEASED:
            self.leased.setdefault(entry.replica, set()).add(sample)
        elif state is READY:
            self.ready.setdefault(entry.deadline, set()).add(sample)
        if state is LEASED or state is READY:
            self.outstanding[entry.deadline] = self.outstanding.get(entry.deadline, 0) + 1

    def _leave(self, sample: int, *expected: SampleState) -> Sample:
        """Remove a sample from the counts and indices of its state."""
        entry = self.active[sample]
        assert entry.state in expected, f"sample {sample} is {entry.state}, expected one of {expected}"
        self.by_state[entry.state] -= 1
        if entry.state is LEASED:
            self.leased[entry.replica].discard(sample)
            if not self.leased[entry.replica]:
                del self.leased[entry.replica]
        elif entry.state is READY:
            self.ready[entry.deadline].discard(sample)
            if not self.ready[entry.deadline]:
                del self.ready[entry.deadline]
        else:
            return entry
        self.outstanding[entry.deadline] -= 1
        if not self.outstanding[entry.deadline]:
            del self.outstanding[entry.deadline]
        return entry

"""How each record changes the ledger's durable state. No rule is decided here and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from cosmos_rl_core.control.ledger import records

if TYPE_CHECKING:
    from cosmos_rl_core.control.ledger.ledger import Ledger

FILTERED = "filtered:"
"""Beginning of the reasons of groups that were left out on purpose."""
NO_DEADLINE = 2**62
"""Deadline of supervised samples, which do not age."""


def _resumed(ledger: Ledger, record: records.Resumed) -> None:
    ledger.samples.resume(record.position)
    ledger.version = ledger.checkpoint_version = record.position.version


def _meshed(ledger: Ledger, record: records.Meshed) -> None:
    ledger.members.epoch, ledger.members.mesh = record.epoch, record.members
    ledger.is_orphaned = not record.members
    ledger.votes = ()
    if ledger.assignment is not None:
        ledger.assignment = msgspec.structs.replace(ledger.assignment, epoch=record.epoch)


def _leased(ledger: Ledger, record: records.Leased) -> None:
    ledger.samples.lease(record.sample, record.replica, record.attempt, record.deadline)


def _returned(ledger: Ledger, record: records.Returned) -> None:
    ledger.samples.return_lease(record.sample, record.failed)


def _delivered(ledger: Ledger, record: records.Delivered) -> None:
    ledger.samples.deliver(
        record.sample,
        record.replica,
        deadline=record.deadline,
        min_version=record.min_version,
        max_version=record.max_version,
        num_terms=record.num_terms,
    )
    ledger.failed_in_a_row = ledger.filtered_in_a_row = 0


def _dropped(ledger: Ledger, record: records.Dropped) -> None:
    ledger.samples.drop(record.sample, record.reason)
    if record.reason.startswith(FILTERED):
        ledger.filtered_in_a_row += 1
    else:
        ledger.failed_in_a_row += 1


def _supplied(ledger: Ledger, record: records.Supplied) -> None:
    ledger.samples.supply(record.samples, NO_DEADLINE)


def _assigned(ledger: Ledger, record: records.Assigned) -> None:
    ledger.samples.assign(record.samples)
    ledger.assignment = record
    ledger.votes = ()
    if ledger.config.rollouts:
        ages = [record.step - ledger.samples.active[s].min_version for s in record.samples]
        ledger.staleness = (sum(ages) / len(ages), max(ages))


def _payloads_lost(ledger: Ledger, record: records.PayloadsLost) -> None:
    assert ledger.assignment is not None and ledger.assignment.step == record.step
    ledger.samples.unassign(ledger.assignment.samples, lost=record.samples)
    ledger.assignment, ledger.votes = None, ()
    ledger.members.epoch += 1  # gradients of the batch are void
    ledger.num_lost += len(record.samples)
    ledger.losses_in_a_row += 1


def _voted(ledger: Ledger, record: records.Voted) -> None:
    ledger.votes = (*ledger.votes, record.replica)


def _commit(ledger: Ledger, record: records.Commit) -> None:
    assert ledger.assignment is not None and ledger.assignment.step == record.step == ledger.version
    ledger.samples.commit(record.step, ledger.assignment.samples)
    ledger.version += 1
    ledger.assignment, ledger.votes = None, ()
    ledger.losses_in_a_row = 0


def _covered(ledger: Ledger, record: records.Covered) -> None:
    ledger.samples.cover(record.version)
    ledger.checkpoint_version = record.version


def _rolled_back(ledger: Ledger, record: records.RolledBack) -> None:
    assigned = ledger.assignment.samples if ledger.assignment is not None else ()
    ledger.samples.undo(record.version, assigned, record.payloads_kept)
    ledger.version, ledger.lineage = record.version, record.lineage
    ledger.members.epoch += 1  # gradients of the undone steps are void
    ledger.assignment, ledger.votes = None, ()
    ledger.is_orphaned = False


def _restarted(ledger: Ledger, record: records.Restarted) -> None:
    ledger.generation = record.generation


def _halted(ledger: Ledger, record: records.Halted) -> None:
    ledger.halted = record.message


APPLY: dict[type[records.Record], Callable[..., None]] = {
    records.Resumed: _resumed,
    records.Joined: lambda ledger, r: ledger.members.join(r.replica, r.role, r.incarnation),
    records.Moved: lambda ledger, r: ledger.members.move(r.replica, r.state),
    records.Meshed: _meshed,
    records.Leased: _leased,
    records.Returned: _returned,
    records.Delivered: _delivered,
    records.Dropped: _dropped,
    records.Supplied: _supplied,
    records.Assigned: _assigned,
    records.PayloadsLost: _payloads_lost,
    records.Voted: _voted,
    records.Commit: _commit,
    records.Covered: _covered,
    records.RolledBack: _rolled_back,
    records.Restarted: _restarted,
    records.Halted: _halted,
}

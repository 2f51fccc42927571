"""Rules: how READY samples become part of the weights.

A step is committed when every member of the mesh voted for it in the same epoch. Asking and voting again is
harmless.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cosmos_rl_core.control.ledger import events, outputs, records
from cosmos_rl_core.control.ledger.liveness import form_mesh, heeds, tell_mesh
from cosmos_rl_core.control.ledger.samples import LEASED, PENDING, READY

if TYPE_CHECKING:
    from cosmos_rl_core.control.ledger.ledger import Ledger


def request_batch(ledger: Ledger, event: events.RequestBatch) -> None:
    """Let the request wait; `answer_batch_requests` follows right after."""
    if _is_of_mesh(ledger, event):
        if event.step == ledger.version:
            ledger.sessions.batch_requests[event.replica] = None
        else:
            _answer_other_step(ledger, event)


def answer_batch_requests(ledger: Ledger) -> None:
    """Assign the next batch if it can be made up, and tell all members that wait."""
    waiting = ledger.sessions.batch_requests
    if not waiting:
        return
    if ledger.assignment is None:
        finished = ledger.why_finished()
        samples = pick(ledger) if finished is None else None
        if samples is not None:
            ledger.decide(records.Assigned(ledger.version, ledger.members.epoch, samples))
        elif finished is not None:
            for name in waiting:
                ledger.say(outputs.NoMore(name, finished))
            waiting.clear()
    if ledger.assignment is not None:
        batch = ledger.assignment
        for name in waiting:
            ledger.say(outputs.AssignBatch(name, batch.step, batch.epoch, batch.samples))
        waiting.clear()


def pick(ledger: Ledger) -> tuple[int, ...] | None:
    """Choose the samples of the next step, or None while it must wait."""
    samples = ledger.samples
    if not ledger.config.rollouts:
        _supply(ledger)
    if samples.count(READY) < ledger.config.groups_per_step:
        return None
    return ledger.window.select(samples.ready, samples.outstanding, next_step=ledger.next_step)


def _supply(ledger: Ledger) -> None:
    """Make up a supervised batch: pending samples first, then the stream."""
    samples, missing = ledger.samples, ledger.config.groups_per_step - ledger.samples.count(READY)
    if missing <= 0:
        return
    pending = samples.lowest_pending(missing)
    fresh = range(samples.next_sample, samples.next_sample + missing - len(pending))
    ledger.decide(records.Supplied((*pending, *fresh)))


def why_finished(ledger: Ledger) -> str | None:
    """Return why there will never be another batch, or None."""
    config, samples = ledger.config, ledger.samples
    if config.max_steps is not None and ledger.version >= config.max_steps:
        return f"all {config.max_steps} steps are done"
    if ledger.assignment is not None:
        return None
    left = samples.count(PENDING) + samples.count(LEASED) + ledger.stream_left()
    if samples.count(READY) + left < config.groups_per_step:
        return f"the stream of {config.total_samples} samples has ended"
    return None


def payloads_lost(ledger: Ledger, event: events.PayloadsLost) -> None:
    """Take the batch in work apart: what cannot be read is generated again, the rest waits for the next batch."""
    if not _is_of_mesh(ledger, event):
        return
    batch = ledger.assignment
    if batch is None or event.step != batch.step:
        return _answer_other_step(ledger, event)
    lost = tuple(sample for sample in batch.samples if sample in event.samples)
    if not lost:
        reason = f"samples {list(event.samples)} are not in the batch of step {batch.step}"
        return ledger.say(outputs.Reject(event.replica, event.incarnation, reason))
    ledger.decide(records.PayloadsLost(batch.step, lost, event.reason))
    ledger.sessions.batch_requests.clear()
    for name in ledger.members.mesh:
        tell_mesh(ledger, name)
    form_mesh(ledger)
    _check_losses(ledger, event.reason)


def _check_losses(ledger: Ledger, reason: str) -> None:
    """Halt when no batch can be read: generating more of the kind would not help."""
    if ledger.losses_in_a_row > ledger.config.max_losses:
        told = (
            f"groups of {ledger.losses_in_a_row} batches in a row could not be read by the policy, the last because: "
            f"{reason}; max_losses = {ledger.config.max_losses} are allowed"
        )
        ledger.decide(records.Halted(told))
        ledger.say(outputs.Halt(told))


def vote(ledger: Ledger, event: events.Vote) -> None:
    """Count a vote, and commit with the last one."""
    if not _is_of_mesh(ledger, event):
        return
    batch = ledger.assignment
    if batch is None or event.step != batch.step:
        return _answer_other_step(ledger, event)
    if event.replica not in ledger.votes:
        ledger.decide(records.Voted(event.replica, event.step, event.epoch))
    if is_unanimous(ledger):
        commit(ledger, batch)


def is_unanimous(ledger: Ledger) -> bool:
    return set(ledger.members.mesh) <= set(ledger.votes)


def commit(ledger: Ledger, batch: records.Assigned) -> None:
    ledger.decide(records.Commit(batch.step, batch.epoch, ledger.lineage, tuple(sorted(ledger.votes))))
    for name in ledger.members.mesh:
        ledger.say(outputs.Committed(name, batch.step))
    form_mesh(ledger)


def checkpointed(ledger: Ledger, event: events.Checkpointed) -> None:
    """Forget what the checkpoint holds; one of an abandoned lineage holds something else."""
    if event.lineage == ledger.lineage and ledger.checkpoint_version < event.version <= ledger.version:
        ledger.decide(records.Covered(event.version))


def rollback(ledger: Ledger, event: events.Rollback) -> None:
    """Begin a new lineage at `version`; raises ValueError for a version that is not to be had."""
    if not ledger.checkpoint_version <= event.version <= ledger.version:
        raise ValueError(
            f"cannot roll back to version {event.version}: only {ledger.checkpoint_version} (the last "
            f"checkpoint) to {ledger.version} are left; resume a new run from an older checkpoint instead"
        )
    ledger.decide(records.RolledBack(event.version, ledger.lineage + 1, event.payloads_kept))
    ledger.sessions.batch_requests.clear()
    for name in ledger.members.live():
        ledger.say(outputs.RolledBack(name, ledger.lineage, ledger.version))
    for name in ledger.members.mesh:
        tell_mesh(ledger, name)
    form_mesh(ledger)


def _is_of_mesh(ledger: Ledger, event: events.RequestBatch | events.PayloadsLost | events.Vote) -> bool:
    """Return whether a message comes from the present mesh; tell a member that is behind."""
    if not heeds(ledger, event):
        return False
    members = ledger.members
    if event.replica in members.mesh:
        if event.epoch == members.epoch:
            return True
        tell_mesh(ledger, event.replica)
    reason = f"epoch {event.epoch} is over, or {event.replica} is not in the mesh of epoch {members.epoch}"
    ledger.say(outputs.Reject(event.replica, event.incarnation, reason))
    return False


def _answer_other_step(ledger: Ledger, event: events.RequestBatch | events.PayloadsLost | events.Vote) -> None:
    if event.step < ledger.version:
        ledger.say(outputs.Committed(event.replica, event.step))
    else:
        reason = f"step {event.step} is not the one in work, which is {ledger.version}"
        ledger.say(outputs.Reject(event.replica, event.incarnation, reason))


RULES: dict[type[events.Event], Callable[..., None]] = {
    events.RequestBatch: request_batch,
    events.PayloadsLost: payloads_lost,
    events.Vote: vote,
    events.Checkpointed: checkpointed,
    events.Rollback: rollback,
}

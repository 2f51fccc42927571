"""Rules of steps: from READY to COMMITTED and CHECKPOINTED.

A step is committed when every member of the mesh voted for it in the same epoch. Requests and votes may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger import events, records
from cosmos_rl_core.control.ledger.liveness import form_mesh, is_of_mesh, return_leases, send_mesh
from cosmos_rl_core.control.ledger.samples import READY
from cosmos_rl_core.control.ledger.state import LedgerState


def request_batch(ledger: LedgerState, replica: str, message: p.RequestBatch) -> None:
    """Queue the request; `answer_batch_requests` runs directly afterwards."""
    if is_of_mesh(ledger, replica, message.epoch):
        ledger.sessions.by_name[replica].joined_epoch = message.epoch
        if message.step == ledger.version:
            ledger.sessions.batch_requests[replica] = None
        else:
            _answer_other_step(ledger, replica, message.step)


def answer_batch_requests(ledger: LedgerState) -> None:
    """Assign the next batch if it is complete, and send it to all waiting members."""
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
                ledger.send(name, p.NoMore(finished))
            waiting.clear()
    if ledger.assignment is not None:
        batch = ledger.assignment
        for name in waiting:
            ledger.send(name, p.Batch(batch.step, batch.epoch, batch.samples))
        waiting.clear()


def pick(ledger: LedgerState) -> tuple[int, ...] | None:
    """Return the samples of the next step, or None while it must wait."""
    samples = ledger.samples
    if not ledger.config.rollouts:
        _supply(ledger)
    if samples.by_state[READY] < ledger.config.groups_per_step:
        return None
    return ledger.window.select(samples.ready, samples.outstanding, next_step=ledger.next_step)


def _supply(ledger: LedgerState) -> None:
    """Make the samples of a supervised batch ready: pending samples first, then the stream."""
    samples, missing = ledger.samples, ledger.config.groups_per_step - ledger.samples.by_state[READY]
    if missing <= 0:
        return
    pending = samples.lowest_pending(missing)
    fresh = range(samples.next_sample, samples.next_sample + missing - len(pending))
    ledger.decide(records.Supplied((*pending, *fresh)))


def payloads_lost(ledger: LedgerState, replica: str, message: p.PayloadsUnreadable) -> None:
    """Discard the current batch: unreadable groups are generated again, the others wait for the next batch."""
    if not is_of_mesh(ledger, replica, message.epoch):
        return
    batch = ledger.assignment
    if batch is None or message.step != batch.step:
        return _answer_other_step(ledger, replica, message.step)
    lost = tuple(sample for sample in batch.samples if sample in message.samples)
    if not lost:
        return ledger.reject(replica, f"samples {list(message.samples)} are not in the batch of step {batch.step}")
    _discard(ledger, batch, lost, message.reason)
    _check_losses(ledger, message.reason)


def unheld(ledger: LedgerState, event: events.GroupsUnheld) -> None:
    """Generate groups again that nobody has after a restart, those of the current batch included."""
    entries = ledger.samples.active
    if ready := tuple(s for s in event.samples if s in entries and entries[s].state is READY):
        ledger.decide(records.Unheld(ready))
    batch = ledger.assignment
    if batch is not None and (lost := tuple(s for s in batch.samples if s in event.samples)):
        _discard(ledger, batch, lost, "nobody has them after the controller's restart")


def _discard(ledger: LedgerState, batch: records.Assigned, lost: tuple[int, ...], reason: str) -> None:
    """Discard a batch with lost groups; its other groups wait for the next one."""
    ledger.decide(records.PayloadsLost(batch.step, lost, reason))
    ledger.sessions.batch_requests.clear()
    for name in ledger.members.mesh:
        send_mesh(ledger, name)
    form_mesh(ledger)


def _check_losses(ledger: LedgerState, reason: str) -> None:
    """Halt after too many unreadable batches in a row: regeneration does not help."""
    if ledger.losses_in_a_row > ledger.config.max_losses:
        ledger.halt(
            f"groups of {ledger.losses_in_a_row} batches in a row could not be read by the policy, the last because: "
            f"{reason}; max_losses = {ledger.config.max_losses} are allowed"
        )


def vote(ledger: LedgerState, replica: str, message: p.Vote) -> None:
    """Count a vote; the last one commits the step. The vote of a committed step is a repeated one, of any epoch."""
    if replica in ledger.members.mesh and message.step < ledger.version:
        return _send_committed(ledger, [replica], message.step)
    if not is_of_mesh(ledger, replica, message.epoch):
        return
    batch = ledger.assignment
    if batch is None or message.step != batch.step:
        return _answer_other_step(ledger, replica, message.step)
    if replica not in ledger.votes:
        ledger.decide(records.Voted(replica, message.step, message.epoch))
    if set(ledger.members.mesh) <= set(ledger.votes):
        commit(ledger, batch)


def commit(ledger: LedgerState, batch: records.Assigned) -> None:
    ledger.decide(records.Commit(batch.step, batch.epoch, ledger.lineage, tuple(sorted(ledger.votes))))
    ledger.sessions.reconnections = 0
    _send_committed(ledger, ledger.members.mesh, batch.step)
    form_mesh(ledger)


def _send_committed(ledger: LedgerState, replicas: Iterable[str], step: int) -> None:
    position = ledger.position()
    message = p.Committed(step, position.next_sample, position.unfinished, successes=position.successes)
    for replica in replicas:
        ledger.send(replica, message)


def checkpointed(ledger: LedgerState, replica: str, message: p.CheckpointDone) -> None:
    """Delete the samples contained in a checkpoint of the current lineage."""
    if message.lineage == ledger.lineage and ledger.checkpoint_version < message.step <= ledger.version:
        ledger.decide(records.Covered(message.step))


def rollback(ledger: LedgerState, event: events.Rollback) -> None:
    """Begin a new lineage at a checkpoint. Raises ValueError for a version that no checkpoint or policy has.

    All leases return: groups in work are sampled from weights of the old lineage. If steps are undone, ready groups are
    generated again too: most of them are sampled from weights that are undone.
    """
    version = event.position.version
    if not ledger.checkpoint_version <= version <= ledger.version:
        raise ValueError(
            f"cannot roll back to version {version}: only {ledger.checkpoint_version} (the last "
            f"checkpoint) to {ledger.version} are left; resume a new run from an older checkpoint instead"
        )
    for name in list(ledger.samples.leased):
        return_leases(ledger, name, reason=f"rolled back to version {version}")
    ledger.decide(records.RolledBack(version, ledger.lineage + 1, position=event.position))
    ledger.sessions.batch_requests.clear()
    for name in ledger.members.live():
        ledger.send(name, p.LineageRolledBack(ledger.lineage, ledger.version))
    for name in ledger.members.mesh:
        send_mesh(ledger, name)
    form_mesh(ledger)


def _answer_other_step(ledger: LedgerState, replica: str, step: int) -> None:
    if step < ledger.version:
        _send_committed(ledger, [replica], step)
    else:
        ledger.reject(replica, f"step {step} is not the current step {ledger.version}")


RULES: Mapping[type, Callable[..., None]] = {
    events.Rollback: rollback,
    events.GroupsUnheld: unheld,
    p.RequestBatch: request_batch,
    p.PayloadsUnreadable: payloads_lost,
    p.Vote: vote,
    p.CheckpointDone: checkpointed,
}

"""The state of a run: the state of every sample, the members, the committed version.

    records, outputs = ledger.on(now, event)     # the ledger's state has changed
    journal.append(records); await journal.flush()
    send(outputs)                                # only after the flush

A pure state machine: no clock, no randomness, no I/O. Durable state changes only in `apply(record)`, so that
replaying the records gives an equal ledger. The rules are in the modules of this folder:

    liveness   Join Ready Heartbeat Disconnected Gone PeersLost Leaving Goodbye Restart Tick    membership, the mesh
    leasing    RequestLeases Deliver Failed Return                     PENDING -> LEASED -> READY or DROPPED
    stepping   RequestBatch PayloadsLost Vote CheckpointDone Rollback  READY -> ASSIGNED -> COMMITTED -> CHECKPOINTED

`state` contains the state and applies records to it.

Exactly-once holds per weight lineage: a step is committed once all members of the mesh voted for it in the same
epoch; then all members apply it. The loss of a member before that starts a new epoch with the same samples; the loss
of all members starts a new lineage at the last checkpoint, and the samples of the undone steps are READY again. A
group of the batch that a member cannot read also starts a new epoch, with a new batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger import events, leasing, liveness, records, stepping
from cosmos_rl_core.control.ledger.leasing import is_generated
from cosmos_rl_core.control.ledger.membership import MemberState
from cosmos_rl_core.control.ledger.samples import PENDING, READY
from cosmos_rl_core.control.ledger.state import LedgerState


class Ledger(LedgerState):
    """The state machine, described in the module's docstring."""

    rules: ClassVar[Mapping[type, Callable[..., None]]] = {**liveness.RULES, **leasing.RULES, **stepping.RULES}

    def on(self, now: float, event: events.Event) -> tuple[list[records.Record], list[events.Output]]:
        """Process an event; return the records to journal and the outputs to send after them.

        `now` is in seconds with any origin, and must not decrease until the event `Restart`.
        """
        self.now, self._records, self._outputs = now, [], []
        if not isinstance(event, events.From):
            self.rules[type(event)](self, event)
        elif liveness.is_current(self, event):
            self.rules[type(event.message)](self, event.replica, event.message)
        if self.halted is None and (self._records or _is_request(event)):
            self._answer_requests()
            if self._records and isinstance(self._records[-1], records.Skipped):
                self._answer_requests()  # the rest of the stream was skipped: those that wait get its end
        return self._records, self._outputs

    def _answer_requests(self) -> None:
        stepping.answer_batch_requests(self)
        leasing.answer_lease_requests(self)

    def waits(self) -> list[str]:
        """Return one line per wait: "policy-0 waits for batch 7: 3 of 8 groups ready, 5 leased to rollout-0"."""
        halted = [f"the run has halted: {self.halted}"] if self.halted is not None else []
        return [*halted, *_mesh(self), *_batches(self), *_votes(self), *_leases(self), *_stuck(self), *_suspects(self)]


def _is_request(event: events.Event) -> bool:
    """Return whether an event can be answered though it changes no durable state. Most messages are heartbeats."""
    return isinstance(event, events.From) and isinstance(event.message, p.RequestLeases | p.RequestBatch)


def _mesh(ledger: LedgerState) -> list[str]:
    members = ledger.members
    if ledger.is_orphaned:
        version = ledger.checkpoint_version
        return [f"the run waits for a rollback to version {version}: all policy replicas were lost"]
    if members.mesh:
        return []
    size, ready = ledger.mesh_size, members.ready_policies()
    return [f"the run waits for policy replicas: {len(ready)} of {size} ready"]


def _batches(ledger: LedgerState) -> list[str]:
    samples = ledger.samples
    why = f"{samples.by_state[READY]} of {ledger.config.groups_per_step} groups ready"
    for name, leased in sorted(samples.leased.items()):
        why += f", {len(leased)} leased to {name}"
    if ledger.config.rollouts and not ledger.members.has_rollouts():
        why += ", no rollout worker is connected"
    if samples.by_state[PENDING]:
        why += f", {samples.by_state[PENDING]} to be leased again"
    return [f"{name} waits for batch {ledger.version}: {why}" for name in ledger.sessions.batch_requests]


def _votes(ledger: LedgerState) -> list[str]:
    missing = [name for name in ledger.members.mesh if name not in ledger.votes]
    if ledger.assignment is None or not ledger.votes or not missing:
        return []
    return [f"{name} waits for the votes of {', '.join(missing)} on step {ledger.version}" for name in ledger.votes]


def _leases(ledger: LedgerState) -> list[str]:
    lines = []
    for name, (lineage, version) in ledger.sessions.waiting.items():
        if lineage != ledger.lineage:
            why = f"it holds weights of lineage {lineage}, the run is on {ledger.lineage}"
        elif ledger.window.deadline(version) < ledger.next_step:
            why = f"its weights, version {version}, are too old for step {ledger.next_step}"
        elif is_generated(ledger):
            why = "every group the run needs is generated"
        elif name in ledger.sessions.at_share:
            why = f"it holds its share of the window, {ledger.sessions.share} groups"
        else:
            in_flight = f"{ledger.samples.num_outstanding} of {ledger.window.capacity} groups are in flight"
            why = f"the staleness window has no room for its weights, version {version}: {in_flight}"
        lines.append(f"{name} waits for leases: {why}")
    return lines


def _stuck(ledger: LedgerState) -> list[str]:
    return [
        f"{name} gets no leases: it has made no progress for {ledger.now - session.progressed_at:.0f} s"
        for name, session in ledger.sessions.by_name.items()
        if session.stuck_since is not None
    ]


def _suspects(ledger: LedgerState) -> list[str]:
    return [
        f"the run waits for {name} to reconnect: {'connection closed' if session.is_closed else 'silent'}"
        for name, session in ledger.sessions.by_name.items()
        if ledger.members.by_name[name].state is MemberState.SUSPECT
    ]

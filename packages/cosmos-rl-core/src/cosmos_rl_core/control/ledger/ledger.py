"""The state of a run: the state of every sample, the members, the committed version.

    records, outputs = ledger.on(now, event)     # the ledger's state has changed
    journal.append(records); await journal.flush()
    send(outputs)                                # only after the flush

A pure state machine: no clock, no randomness, no I/O. Durable state changes only in `apply(record)`, so that
replaying the records gives an equal ledger. The rules are in the modules of this folder:

    liveness   Join Ready Heartbeat Disconnected Goodbye Restart Tick  membership, expired leases
    leasing    RequestLeases Deliver Failed              PENDING -> LEASED -> READY or DROPPED
    stepping   RequestBatch PayloadsLost Vote CheckpointDone Rollback  READY -> ASSIGNED -> COMMITTED -> CHECKPOINTED

`state` contains the state and applies records to it, `explain` lists the current waits and their reasons.

Exactly-once holds per weight lineage: a step is committed once all members of the mesh voted for it in the same
epoch; then all members apply it. The loss of a member before that starts a new epoch with the same samples; the loss
of all members starts a new lineage at the last checkpoint, and the samples of the undone steps are READY again. A
group of the batch that a member cannot read also starts a new epoch, with a new batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from cosmos_rl_core.control.ledger import events, explain, leasing, liveness, records, stepping
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
        if self.halted is None:
            stepping.answer_batch_requests(self)
            leasing.answer_lease_requests(self)
        return self._records, self._outputs

    def waits(self) -> list[str]:
        """Return one readable line per wait: the waiting component and the reason."""
        return explain.lines(self)

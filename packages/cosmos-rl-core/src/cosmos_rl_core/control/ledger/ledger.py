"""The state of a run: the place of every sample, the members, the committed version.

    records, outputs = ledger.on(now, event)     # decides; the ledger has already changed
    journal.append(records); await journal.flush()
    send(outputs)                                # only now

A pure state machine: no clock, no randomness, no IO. Durable state changes only in `apply(record)`, so that
replaying the records gives an equal ledger. The rules live beside this file and read top to bottom:

    liveness   Join Ready Heartbeat Disconnected Goodbye Restart Tick  who takes part, which leases expired
    leasing    RequestLeases Deliver Failed              PENDING -> LEASED -> READY or DROPPED
    stepping   RequestBatch PayloadsLost Vote CheckpointDone Rollback  READY -> ASSIGNED -> COMMITTED -> CHECKPOINTED

`state` holds the state and changes it by records, `explain` lists who waits for what.

Exactly-once is defined on the weight lineage: a step is committed once all members of the mesh voted for it
in the same epoch, then everybody applies it. A member's death before that starts a new epoch with the same
samples; the death of all members starts a new lineage at the last checkpoint, and the samples of the undone
steps are READY again. A group of the batch that a member cannot read starts a new epoch too, and a new batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from cosmos_rl_core.control.ledger import events, explain, leasing, liveness, records, stepping
from cosmos_rl_core.control.ledger.state import LedgerState


class Ledger(LedgerState):
    """The state machine. See the module's text."""

    rules: ClassVar[Mapping[type, Callable[..., None]]] = {**liveness.RULES, **leasing.RULES, **stepping.RULES}

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

    def waits(self) -> list[str]:
        """Return who waits for what, one readable line each."""
        return explain.lines(self)

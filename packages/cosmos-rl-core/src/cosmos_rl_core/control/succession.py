"""A controller that continues the run of one that died.

journal replayed, Restart -> workers return, repeat their groups and requests -> all groups there: batches go on
                             one returns without its group, or not within the grace -> it is generated again
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Set
from dataclasses import dataclass

from cosmos_rl_core.control.ledger import events
from cosmos_rl_core.control.recovery import Recovery
from cosmos_rl_core.control.turns import Turns
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire.channel import Hello

SECOND = "second"
"""Role of a controller that asks whether another one is alive."""


def describe_second(peer: Hello) -> str:
    """Return a line on a controller that has asked."""
    host, _, process = peer.name.rpartition(".")
    return f"another controller was started for this run and refused: process {process} on {host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Predecessor:
    """The state of a dead controller that its journal lacks, from its other files."""

    generation: int
    """Of the controller that continues."""
    step: int
    """Newest step with a line in metrics.jsonl; -1 without any."""
    evaluated: int
    """Newest version whose evaluation is complete; -1 without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Succession:
    """Completes the parts of a controller whose ledger was replayed."""

    recovery: Recovery
    """With the parts, the ledger and the outcome."""
    turns: Turns

    def begin(self, earlier: Predecessor) -> None:
        """Continue. Called in the event loop, before any worker is served."""
        batches, reports, evaluator, observer, _ = self.recovery.parts
        ledger, outcome = self.recovery.ledger, self.recovery.outcome
        reports.resume(step=earlier.step, version=earlier.evaluated)
        evaluator.resume(earlier.evaluated)
        self.recovery.feed(events.Restart(earlier.generation))
        if ledger.halted is not None:
            return outcome.fail(UserError(ledger.halted))
        if ledger.why_finished() is not None and not ledger.members.ready_policies():
            return outcome.finish()
        self.recovery.lost()
        assigned = ledger.assignment.samples if ledger.assignment is not None else ()
        batches.restarted(ledger.samples.all_ready(), step=ledger.version, assigned=assigned)
        asyncio.get_running_loop().call_later(
            ledger.config.restart_grace_s, lambda: self._give_up(set(batches.awaited))
        )
        observer.note(
            f"the controller has restarted (generation {ledger.generation}) at step {ledger.version}; "
            f"{len(ledger.members.live())} workers and {len(batches.awaited)} groups are expected to return"
        )

    def returned(self, replica: str, holding: Collection[int]) -> None:
        """A replica has returned, or another process of it, and holds these samples; its other groups are lost."""
        active = self.recovery.ledger.samples.active
        delivered = {s for s in self.recovery.parts.batches.awaited if s in active and active[s].replica == replica}
        self._give_up(delivered.difference(holding))

    def _give_up(self, lost: Set[int]) -> None:
        """Generate groups again that do not return; those of the batch in work only if it is requested."""
        batches, _, _, observer, _ = self.recovery.parts
        if not lost:
            return
        batches.awaited.difference_update(lost)
        if missing := tuple(sorted(lost & self.recovery.ledger.samples.all_ready())):
            self.recovery.feed(events.GroupsUnheld(missing))
            observer.note(f"groups lost with their workers and generated again: {len(missing)}")
        if not batches.awaited:
            self.turns.request_batches()

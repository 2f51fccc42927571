"""Recovery from the loss of all policy replicas.

    policies lost -> newest whole checkpoint -> rollback to its version on a new lineage -> a new policy joins
                                                                          |
                                                                          +-> none within the wait: the run fails

The new policy gets the checkpoint with its Welcome, so it is welcomed after the rollback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from cosmos_rl_core.control.evaluation import Evaluator
from cosmos_rl_core.control.inflight import Batches
from cosmos_rl_core.control.ledger import events
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.records import Position, Record
from cosmos_rl_core.control.outcome import RunOutcome
from cosmos_rl_core.control.peers import Peers
from cosmos_rl_core.control.reports import PolicyReports, ProgressObserver
from cosmos_rl_core.errors import UserError, WorkerFailed

POLICIES_LOST = "the last policy replica is gone"


class RunParts(NamedTuple):
    """The parts of the controller that hold results of steps."""

    batches: Batches
    reports: PolicyReports
    evaluator: Evaluator
    observer: ProgressObserver
    peers: Peers


@dataclass(slots=True, kw_only=True)
class Recovery:
    """Rolls the run back and waits for a policy."""

    ledger: Ledger
    feed: Callable[[events.Event], list[Record]]
    """Passes an event to the ledger."""
    parts: RunParts
    newest_checkpoint: Callable[[], tuple[Position, str]]
    """Returns stream position and location of the newest whole checkpoint; the location "" is the initial model. Called
    in a thread."""
    outcome: RunOutcome
    policy_wait_s: float
    """Maximum wait for another policy; 0: the run fails at once."""
    resume_from: str
    """Checkpoint that a new policy loads; empty: the initial model."""
    checkpoint: str = ""
    """Newest checkpoint of this run."""
    _rolled_back: asyncio.Event = field(default_factory=asyncio.Event)
    _joined: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    @property
    def newcomer_from(self) -> str:
        """Checkpoint that a policy loads if it joins now; empty, too, if a member of the mesh will send its state.

        `resume_from` may have been removed by then, as newer checkpoints replace it.
        """
        return "" if self.ledger.members.mesh else self.resume_from

    def begin(self) -> None:
        """All policy replicas are lost."""
        self.parts.reports.flush()
        if self.policy_wait_s == 0.0:
            self.outcome.policy_lost(WorkerFailed(POLICIES_LOST))
            return
        self._stop_waiting()
        self._task = asyncio.create_task(self._run())

    async def rolled_back(self) -> None:
        """Wait for the rollback, if one is due. A policy joins after it."""
        while self.ledger.is_orphaned:
            self._rolled_back.clear()
            await self._rolled_back.wait()

    def joined(self) -> None:
        """A policy has connected: end the wait."""
        self._joined.set()
        self.outcome.interrupted = False

    def lost(self, replica: str = "") -> None:
        """A worker was removed: after a rollback wait anew for a policy if none is left."""
        members = self.ledger.members
        if replica and self.ledger.why_finished() is None:
            self.outcome.removed(replica)
        is_waiting = self._task is not None and not self._task.done()
        if not self.ledger.lineage or self.ledger.is_orphaned or members.mesh or is_waiting:
            return
        if not any(member.is_live for member in members.policies.values()) and not self.outcome.is_decided:
            self._task = asyncio.create_task(self._wait())

    def close(self) -> None:
        """Stop waiting, and record reports kept for a dead policy, unless another controller continues the run."""
        self._stop_waiting()
        if not self.outcome.is_taken_over:
            self.parts.reports.flush()

    def _stop_waiting(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            position, path = await asyncio.to_thread(self.newest_checkpoint)
            self._roll_back(position, path)
            self._rolled_back.set()
            await self._wait()
        except ValueError as error:
            self.outcome.fail(UserError(str(error)))
        except Exception as error:  # it would be lost with this task
            self.outcome.fail(error)

    async def _wait(self) -> None:
        """Wait until a policy connects."""
        self._joined.clear()
        try:
            await asyncio.wait_for(self._joined.wait(), self.policy_wait_s)
        except TimeoutError:
            text = f"{POLICIES_LOST}, and no other one has come within {self.policy_wait_s:g} s"
            self.outcome.policy_lost(WorkerFailed(text))

    def _roll_back(self, position: Position, checkpoint: str) -> None:
        """Continue from a checkpoint on a new lineage. Raises ValueError for a version that is not available.

        If steps are undone, all groups are generated again. A policy that had connected before the loss has
        a checkpoint or weights of the old lineage: it ends with its connection, and may be started again.
        """
        batches, reports, evaluator, observer, peers = self.parts
        for name, member in self.ledger.members.policies.items():
            if member.is_live:
                self.feed(events.Gone(name, member.incarnation))
                if (peer := peers.by_name.get(name)) is not None:
                    peer.connection.close()
        version, undone = position.version, self.ledger.version - position.version
        self.feed(events.Rollback(position))
        self.resume_from = self.checkpoint = checkpoint
        batches.roll_back(version, ready=self.ledger.samples.all_ready())
        reports.roll_back(version)
        evaluator.roll_back(version, lineage=self.ledger.lineage)
        observer.rolled_back(version)
        source = checkpoint or "the initial model"
        observer.note(f"all policy replicas were lost: training continues from {source}; {undone} steps are done again")

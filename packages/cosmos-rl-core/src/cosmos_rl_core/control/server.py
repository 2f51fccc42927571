"""The controller: one asyncio process, no GPU work, no torch.

    workers' messages -> ledger (journal first) -> messages to workers

The ledger alone decides about leases, batches and commits. The controller passes messages, stores the payloads of
groups in flight and runs the evaluations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cosmos_rl_core.clock import RunningClock
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.admission import Admission, consume
from cosmos_rl_core.control.evaluation import Evaluator, with_row
from cosmos_rl_core.control.inflight import Batches
from cosmos_rl_core.control.journal.journal import DurableLedger, Journal
from cosmos_rl_core.control.ledger import events
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.records import Position, Record
from cosmos_rl_core.control.outcome import RunOutcome, worker_error
from cosmos_rl_core.control.peers import Peers, WorkerPeer
from cosmos_rl_core.control.recovery import Recovery, RunParts
from cosmos_rl_core.control.rendezvous import STORE, Rendezvous
from cosmos_rl_core.control.reports import PolicyReports, ProgressObserver
from cosmos_rl_core.control.succession import SECOND, Predecessor, Succession, describe_second
from cosmos_rl_core.control.turns import Turns
from cosmos_rl_core.data.source import PromptSource
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.observe.slices import Slices
from cosmos_rl_core.wire.channel import Connection

TICK_S = 0.5
OfAnEpoch = p.RequestBatch | p.PayloadsUnreadable | p.PeersLost | p.Vote
"""Messages of a policy that are void in a later epoch of its mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """The parts of a recipe that the controller uses."""

    config_toml: str
    run_dir: Path
    resume_from: str
    supervised: bool
    """True: rows are sent directly to the policy; there are no rollout replicas."""
    max_steps: int | None
    eval_every_steps: int
    eval_by: tuple[str, ...]
    """Columns of the held-out rows to group rewards by."""
    group_size: int
    sync_interval: int = 1
    newest_checkpoint: Callable[[], tuple[Position, str]] = lambda: (Position(0, 0), "")
    """Returns version and location of the newest whole checkpoint; (0, "") is the initial model."""
    policy_wait_s: float = 0.0
    """Maximum wait for another policy after the loss of all; 0: the run fails at once."""
    external: bool = False
    """Whether workers are started by others."""

    def ends_at(self, version: int) -> bool:
        """Return whether this is the version at which the run ends."""
        return self.max_steps is not None and version >= self.max_steps

    def welcome(self, message: p.Welcome, *, kept: list[str], resume_from: str) -> p.Welcome:
        """Return the ledger's welcome completed with the recipe. `kept`: files of the replica's spool still needed."""
        return msgspec.structs.replace(
            message,
            config=self.config_toml,
            run_dir=str(self.run_dir),
            resume_from=resume_from,
            last_step=self.max_steps or 0,
            kept=kept,
        )


class Controller:
    """Serves workers until the run is over.

    server = await serve(address, token=token, decode=ToController, on_connect=controller.on_connect)
    await controller.run()
    """

    def __init__(
        self,
        job: ControllerSettings,
        *,
        source: PromptSource,
        eval_source: PromptSource | None,
        ledger: Ledger,
        journal: Journal,
        clock: Callable[[], float],
        observer: ProgressObserver,
    ) -> None:
        self.ledger, self.clock = ledger, RunningClock(clock, longest_s=2 * TICK_S)
        self.peers, self._job, self._source, self._observer = Peers(job.sync_interval), job, source, observer
        self.outcome = RunOutcome(ledger.members, external=job.external, note=observer.note)
        self._ledger = DurableLedger(
            ledger, journal=journal, clock=self.clock, dispatch=self._dispatch, fail=self.outcome.fail
        )
        self.check_owner = self._ledger.check_owner
        self.end_silent: Callable[[str], None] = lambda name: None  # a launcher that can kills it and starts another
        self._batches = Batches(source=source, supervised=job.supervised, peers=self.peers)
        self._reports = PolicyReports(observer=observer, peers=self.peers)
        self._evaluator = Evaluator(
            source=eval_source,
            every_steps=job.eval_every_steps,
            max_steps=job.max_steps,
            by=job.eval_by,
            rows_per_group=job.group_size,
            on_finished=lambda finished: self.turns.evaluated(finished),
        )
        self.turns = Turns(
            ledger=ledger,
            feed=self._feed,
            observer=observer,
            peers=self.peers,
            evaluator=self._evaluator,
            ends_at=job.ends_at,
            awaited=self._batches.awaited,
        )
        self._recovery = Recovery(
            ledger=ledger,
            feed=self._ledger.feed,
            parts=RunParts(self._batches, self._reports, self._evaluator, observer, self.peers),
            newest_checkpoint=job.newest_checkpoint,
            outcome=self.outcome,
            policy_wait_s=job.policy_wait_s,
            resume_from=job.resume_from,
        )
        self._succession, self._rendezvous = Succession(recovery=self._recovery, turns=self.turns), Rendezvous()
        self.admission = Admission(
            ledger=ledger,
            feed=self._ledger.feed,
            peers=self.peers,
            evaluator=self._evaluator,
            recovery=self._recovery,
            returned=self._succession.returned,
            outcome=self.outcome,
            note=observer.note,
            clock=self.clock,
        )

    @property
    def checkpoint(self) -> str:
        """Path of the newest checkpoint reported by a policy replica; empty if there is none."""
        return self._recovery.checkpoint

    def succeed(self, earlier: Predecessor) -> None:
        """Continue the run of a dead controller, whose journal the ledger has replayed. Called before serving."""
        self._succession.begin(earlier)

    async def run(self) -> None:
        """Serve until the policy leaves after the last step. Raises the error that ended the run early."""
        self.turns.evaluate_if_due(self.ledger.version)
        tasks = [asyncio.create_task(self._ledger.run()), asyncio.create_task(self._ledger.tick(TICK_S))]
        try:
            await asyncio.wait([*tasks, self.outcome.decided], return_when=asyncio.FIRST_COMPLETED)
            for task in (*filter(asyncio.Task.done, tasks), self.outcome.decided):
                task.result()
        finally:
            self.outcome.decided.cancel()
            self._recovery.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self, reason: str) -> None:
        """End the run cleanly: the policy finishes its step, or its start, and saves."""
        self.turns.stop_reason = reason
        for peer in self.peers.of_role("policy"):
            peer.post(p.Stop(reason=reason))
        if self._job.external and not self.peers.of_role("policy"):
            self.outcome.finish()  # none may ever come

    def dismiss(self) -> None:
        """Send Stop to every worker: the run is over."""
        self.admission.dismiss_all(self.turns.stop_reason or "the run is over")

    def waits(self) -> Slices[list[str]]:
        """Return one line per wait, for the status."""
        return self.turns.waits()

    # -- connections and messages of workers

    async def on_connect(self, connection: Connection) -> None:
        if connection.peer.role == SECOND:
            return self._observer.note(describe_second(connection.peer))
        if self.outcome.is_decided:
            return self.admission.dismiss(connection)
        if connection.peer.role == STORE:
            return await self._rendezvous.serve(connection)
        if (peer := await self.admission.admit(connection)) is None:
            return
        try:
            await consume(peer, self._handle, peers=self.peers, fail=self.outcome.fail)
        except Exception:
            self.admission.lose(peer)
            raise

    def _handle(self, peer: WorkerPeer, message: p.ToController) -> None:
        self.check_owner()
        if _is_void(peer, message, version=self.ledger.version):
            return  # a Remesh is on its way to the replica, which then repeats its request
        match message:
            case p.Heartbeat():
                peer.beat(message, now=self.clock())
                self._feed(peer, message)
            case p.RequestLeases():
                self.turns.request_leases(peer, message)
            case p.Deliver() | p.Failed():
                self._finish(peer, message)
            case p.RequestBatch():
                peer.wants_batch = message.step
                self.turns.request_batch(peer)
            case p.PayloadsUnreadable():
                if lost := self._batches.lose(self._feed(peer, message)):
                    self._observer.note(f"groups lost and generated again: {len(lost)} ({peer.name}: {message.reason})")
            case p.Return() | p.Vote() | p.PeersLost() | p.Leaving():
                self._feed(peer, message)
            case p.Phase() | p.Ready():
                self.admission.starts(peer, message)
            case _:
                self._handle_report(peer, message)

    def _finish(self, peer: WorkerPeer, message: p.Deliver | p.Failed) -> None:
        key = (message.sample, message.attempt)
        self._reports.note_failure(peer.name, message)
        if message.evaluation:
            peer.post(p.Release([], rows=(key,)))
            self._evaluator.finish(message)
        elif isinstance(message, p.Failed):
            self._feed(peer, message)
            peer.post(p.Release([], groups=(key,)))
        else:
            decided, entry = self._feed(peer, message), self.ledger.samples.active.get(message.sample)
            if self._batches.deliver(message, replica=peer.name, decided=decided, entry=entry):
                self.turns.request_batches()

    def _handle_report(self, peer: WorkerPeer, message: p.ToController) -> None:
        match message:
            case p.Validated() if peer.role == "rollout":
                self.peers.rows_scored = True
                self._observer.evaluated(message.version, message.metrics, [])
            case p.StepDone() | p.Validated() | p.Alarm():
                self._reports.add(peer.name, message, mesh=self.ledger.members.mesh)
            case p.CheckpointDone():
                if message.lineage == self.ledger.lineage:
                    self._recovery.checkpoint = message.path
                self._feed(peer, message)
            case p.Goodbye() if not peer.leaving:
                peer.leaving = True
                over = self.turns.is_over  # before the ledger returns the policy's batch
                self._feed(peer, message)
                if not over:
                    self._observer.note(f"{peer.name} has left")
                if peer.role == "policy" and not self.turns.has_policy():
                    self.outcome.last_policy_left(over=over)
            case p.Fatal():
                self.outcome.worker_failed(peer.name, worker_error(peer.name, peer.role, message))
                peer.leaving, peer.has_ended = self.outcome.is_decided, True

    def _feed(self, peer: WorkerPeer, message: p.ToLedger) -> list[Record]:
        return self._ledger.feed(events.From(peer.name, peer.incarnation, message))

    # -- outputs of the ledger

    def _dispatch(self, output: events.Output) -> None:
        match output:
            case events.Halt():
                self.outcome.fail(UserError(output.message))
            case events.PoliciesLost():
                if not self.outcome.is_decided:
                    self._recovery.begin()
            case events.Removed():
                self._evaluator.lose(output.replica, self.peers)
                self._succession.returned(output.replica, ())
                self._recovery.lost(output.replica)
                is_policy = self.ledger.members.by_name[output.replica].role == "policy"
                if output.is_silent and not (is_policy and self.turns.is_over):  # it may be saving the last checkpoint
                    self.end_silent(output.replica)
                if (peer := self.peers.by_name.get(output.replica)) is not None and peer.leaving:
                    peer.dismiss("it has left")
            case events.To() if (peer := self.peers.by_name.get(output.replica)) is not None:
                self._send(peer, output.message)

    def _send_batch(self, peer: WorkerPeer, message: p.Batch) -> None:
        if missing := self._batches.missing(message.samples):  # they have not returned after a restart
            self._ledger.feed(events.GroupsUnheld(missing))
        else:
            peer.wants_batch = None
            peer.post(self._batches.with_payloads(message, peer))

    def _send(self, peer: WorkerPeer, message: p.FromLedger) -> None:
        """Send a message of the ledger, completed with the recipe, rows or payloads."""
        match message:
            case p.Welcome():
                kept, resume_from = self._batches.kept(peer.name), self._recovery.newcomer_from
                message = msgspec.structs.replace(message, scores_rows=self.peers.scores_rows(peer))
                peer.welcome(self._job.welcome(message, kept=kept, resume_from=resume_from))
            case p.Grant():
                prompts = tuple(with_row(prompt, self._source) for prompt in message.prompts)
                peer.post(p.Grant(prompts, rollouts=self.turns.num_rollouts))
            case p.Batch():
                self._send_batch(peer, message)
            case p.Cancel() | p.Leave():
                if message == p.Leave(save=False):
                    self.admission.leaves(peer)
                peer.post(message)
            case p.LineageRolledBack():
                peer.post(msgspec.structs.replace(message, resume_from=self._recovery.resume_from))
            case p.Committed():
                awaits_no_more = self._batches.committed(message.step)
                peer.post(message)
                self.turns.committed(message.step, requests_batches=awaits_no_more)
            case p.Reject():
                self.admission.rejected(peer, message)
            case p.NoMore() if peer.role == "policy":
                self.turns.end_batches(peer)
            case p.Remesh():
                peer.epoch, peer.mesh, peer.wants_batch = message.epoch, message.members, None
                self._reports.remesh(message.members)
                self._rendezvous.begin(message.epoch)
                self.peers.announce(self.ledger)
                peer.post(message)


def _is_void(peer: WorkerPeer, message: p.ToController, *, version: int) -> bool:
    """Return whether a message belongs to an earlier mesh, and is not the repeated vote of a committed step."""
    if not isinstance(message, OfAnEpoch) or message.epoch in (0, peer.epoch):
        return False
    return not (isinstance(message, p.Vote) and message.step < version)

"""The controller: one asyncio process, no GPU work, no torch.

    workers' messages -> ledger (journal first) -> messages to workers

The ledger alone decides about leases, batches and commits. The controller passes messages, stores the payloads of
groups in flight and runs the evaluations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.durable import DurableLedger
from cosmos_rl_core.control.evaluation import Evaluator, with_row
from cosmos_rl_core.control.inflight import Batches
from cosmos_rl_core.control.journal import Journal
from cosmos_rl_core.control.ledger import events
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.lifecycle import Lifecycle, Recovery, RunOutcome
from cosmos_rl_core.control.peers import Peers, WorkerPeer
from cosmos_rl_core.control.rendezvous import STORE, Rendezvous
from cosmos_rl_core.control.reports import PolicyReports, ProgressObserver
from cosmos_rl_core.control.scheduler import Scheduler
from cosmos_rl_core.control.settings import ControllerSettings
from cosmos_rl_core.data.source import PromptSource
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed
from cosmos_rl_core.wire.clock import RunningClock

TICK_S = 0.5
SECOND = "second"
"""Role of a controller that asks whether another one is alive."""
OfAnEpoch = p.RequestBatch | p.PayloadsUnreadable | p.PeersLost | p.Vote
"""Messages of a policy that are void in a later epoch of its mesh."""


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
        self._job, self._source, self._observer = job, source, observer
        self.ledger = ledger
        self.clock = RunningClock(clock, longest_s=2 * TICK_S)
        self.durable = DurableLedger(ledger, journal=journal, clock=self.clock)
        self.peers = Peers(job.sync_interval)
        self.outcome = RunOutcome(ledger.members, external=job.external, observer=observer)
        self._batches = Batches(source=source, supervised=job.supervised, peers=self.peers)
        self._reports = PolicyReports(observer=observer, peers=self.peers)
        self._evaluator = Evaluator(source=eval_source, job=job)
        self.scheduler = Scheduler(
            job=job,
            durable=self.durable,
            observer=observer,
            peers=self.peers,
            evaluator=self._evaluator,
            batches=self._batches,
        )
        self.recovery = Recovery(
            job=job,
            durable=self.durable,
            peers=self.peers,
            batches=self._batches,
            reports=self._reports,
            scheduler=self.scheduler,
            outcome=self.outcome,
        )
        self.lifecycle = Lifecycle(
            durable=self.durable,
            peers=self.peers,
            scheduler=self.scheduler,
            recovery=self.recovery,
            outcome=self.outcome,
            observer=observer,
        )
        self._rendezvous = Rendezvous()

    async def run(self) -> None:
        """Serve until the policy leaves after the last step. Raises the error that ended the run early."""
        self.scheduler.evaluate_if_due(self.ledger.version)
        tasks = [asyncio.create_task(self._send_outputs()), asyncio.create_task(self.durable.tick(TICK_S))]
        try:
            await asyncio.wait([*tasks, self.outcome.decided], return_when=asyncio.FIRST_COMPLETED)
            for task in (*filter(asyncio.Task.done, tasks), self.outcome.decided):
                task.result()
        finally:
            self.outcome.decided.cancel()
            self.recovery.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self, reason: str) -> None:
        """End the run cleanly: the policy finishes its step, or its start, and saves."""
        self.scheduler.stop_reason = reason
        for peer in self.peers.of_role("policy"):
            peer.post(p.Stop(reason=reason))
        if self._job.external and not self.peers.of_role("policy"):
            self.outcome.finish()  # none may ever come

    def dismiss(self) -> None:
        """Send Stop to every worker: the run is over. Those of another controller only lose the connection."""
        for peer in list(self.peers.by_name.values()):
            if self.outcome.is_taken_over:
                peer.connection.close()
            else:
                peer.dismiss(self.scheduler.stop_reason or "the run is over")

    # -- connections and messages of workers

    async def on_connect(self, connection: Connection) -> None:
        role = connection.peer.role
        if role == SECOND:
            host, _, process = connection.peer.name.rpartition(".")
            text = f"another controller was started for this run and refused: process {process} on {host}"
            return self._observer.note(text)
        if self.outcome.is_decided:
            if role in ("policy", "rollout") and not self.outcome.is_taken_over:
                connection.post(p.Stop(reason="the run is over"))
            return
        if role == STORE:
            return await self._rendezvous.serve(connection)
        if (peer := await self.lifecycle.admit(connection)) is None:
            return
        try:
            await connection.consume(partial(self._receive, peer))
        except Exception:
            self.lifecycle.lose(peer)
            raise

    def _receive(self, peer: WorkerPeer, message: p.ToController) -> None:
        """Handle a message of a worker. Raises ConnectionClosed once the worker has another connection.

        An error, such as a full disk of the observer's files, ends the run. The connection stays, for a Stop.
        """
        if self.peers.by_name.get(peer.name) is not peer:
            raise ConnectionClosed(f"{peer.name} has another connection")
        try:
            self.durable.check_owner()
            if not _is_void(peer, message, version=self.ledger.version):
                self._handle(peer, message)
        except Exception as error:
            self.outcome.fail(error)

    def _handle(self, peer: WorkerPeer, message: p.ToController) -> None:
        match message:
            case p.Heartbeat():
                peer.beat(message, now=self.clock())
                self.durable.feed(peer.event(message))
            case p.RequestLeases():
                self.scheduler.request_leases(peer, message)
            case p.Deliver() | p.Failed():
                self._finish(peer, message)
            case p.RequestBatch():
                peer.wants_batch = message.step
                self.scheduler.request_batch(peer)
            case p.PayloadsUnreadable():
                if lost := self._batches.lose(self.durable.feed(peer.event(message))):
                    self._observer.note(f"groups lost and generated again: {len(lost)} ({peer.name}: {message.reason})")
            case p.Return() | p.Vote() | p.PeersLost() | p.Leaving():
                self.durable.feed(peer.event(message))
            case p.Phase() | p.Ready():
                self.lifecycle.starts(peer, message)
            case p.Goodbye() if not peer.leaving:
                self.lifecycle.left(peer, message)
            case p.Fatal():
                self.lifecycle.fatal(peer, message)
            case _:
                self._handle_report(peer, message)

    def _handle_report(self, peer: WorkerPeer, message: p.ToController) -> None:
        match message:
            case p.Validated() if peer.role == "rollout":
                self.peers.rows_scored = True
                self._observer.evaluated(message.version, message.metrics, [])
            case p.StepDone() | p.Validated() | p.Alarm():
                self._reports.add(peer.name, message, mesh=self.ledger.members.mesh)
            case p.CheckpointDone():
                if message.lineage == self.ledger.lineage:
                    self.recovery.checkpoint = message.path
                self.durable.feed(peer.event(message))

    def _finish(self, peer: WorkerPeer, message: p.Deliver | p.Failed) -> None:
        key = (message.sample, message.attempt)
        self._reports.note_failure(peer.name, message)
        if message.evaluation:
            peer.post(p.Release([], rows=(key,)))
            if (finished := self._evaluator.finish(message)) is not None:
                self.scheduler.evaluated(finished)
        elif isinstance(message, p.Failed):
            self.durable.feed(peer.event(message))
            peer.post(p.Release([], groups=(key,)))
        else:
            decided, entry = self.durable.feed(peer.event(message)), self.ledger.samples.active.get(message.sample)
            if self._batches.deliver(message, replica=peer.name, decided=decided, entry=entry):
                self.scheduler.request_batches()

    # -- outputs of the ledger

    async def _send_outputs(self) -> None:
        """Send the outputs of the ledger until cancelled. An error ends the run."""
        try:
            while True:
                for output in await self.durable.outputs():
                    self._dispatch(output)
        except Exception as error:
            self.durable.end(error)
            self.outcome.fail(error)

    def _dispatch(self, output: events.Output) -> None:
        match output:
            case events.Halt():
                self.outcome.fail(UserError(output.message))
            case events.PoliciesLost():
                if not self.outcome.is_decided:
                    self.recovery.begin()
            case events.Removed():
                self.lifecycle.removed(output.replica, is_silent=output.is_silent)
            case events.To() if (peer := self.peers.by_name.get(output.replica)) is not None:
                self._send(peer, output.message)

    def _send_batch(self, peer: WorkerPeer, message: p.Batch) -> None:
        if missing := self._batches.missing(message.samples):  # they have not returned after a restart
            self.durable.feed(events.GroupsUnheld(missing))
        else:
            peer.wants_batch = None
            peer.post(self._batches.with_payloads(message, peer))

    def _send(self, peer: WorkerPeer, message: p.FromLedger) -> None:
        """Send a message of the ledger, completed with the recipe, rows or payloads."""
        match message:
            case p.Welcome():
                welcome = msgspec.structs.replace(
                    message,
                    config=self._job.config_toml,
                    run_dir=str(self._job.run_dir),
                    resume_from=self.recovery.newcomer_from,
                    last_step=self._job.max_steps or 0,
                    kept=self._batches.kept(peer.name),
                    scores_rows=self.peers.scores_rows(peer),
                )
                peer.welcome(welcome)
            case p.Grant():
                prompts = tuple(with_row(prompt, self._source) for prompt in message.prompts)
                peer.post(p.Grant(prompts, rollouts=self.scheduler.num_rollouts))
            case p.Batch():
                self._send_batch(peer, message)
            case p.Cancel() | p.Leave():
                if message == p.Leave(save=False):
                    self.lifecycle.leaves(peer)
                peer.post(message)
            case p.LineageRolledBack():
                peer.post(msgspec.structs.replace(message, resume_from=self.recovery.resume_from))
            case p.Committed():
                awaits_no_more = self._batches.committed(message.step)
                peer.post(message)
                self.scheduler.committed(message.step, requests_batches=awaits_no_more)
            case p.Reject():
                self.lifecycle.rejected(peer, message)
            case p.NoMore() if peer.role == "policy":
                self.scheduler.end_batches(peer)
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

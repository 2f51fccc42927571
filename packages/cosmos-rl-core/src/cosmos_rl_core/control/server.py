"""The controller: one asyncio process, no GPU work, no torch.

    workers' messages -> ledger (journal first) -> messages to workers

The ledger alone decides about leases, batches and commits. The controller passes messages, stores the payloads of
groups in flight and runs the evaluations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.evaluation import Evaluation, Evaluator, with_row
from cosmos_rl_core.control.inflight import Batches
from cosmos_rl_core.control.journal.journal import DurableLedger, Journal
from cosmos_rl_core.control.ledger import events
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.records import Record
from cosmos_rl_core.control.peers import Peer, Peers
from cosmos_rl_core.control.rendezvous import STORE, Rendezvous
from cosmos_rl_core.control.reports import PolicyReports
from cosmos_rl_core.data.source import PromptSource
from cosmos_rl_core.errors import OutOfMemory, UserError, WorkerFailed
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed

TICK_S = 0.5
OfAnEpoch = p.RequestBatch | p.PayloadsLost | p.PeersLost | p.Vote
"""Messages of a policy that are void in a later epoch of its mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
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

    def ends_at(self, version: int) -> bool:
        """Return whether this is the version at which the run ends."""
        return self.max_steps is not None and version >= self.max_steps

    def welcome(self, message: p.Welcome, *, kept: list[str]) -> p.Welcome:
        """Return the ledger's welcome completed with the recipe. `kept`: files of the replica's spool still needed."""
        return msgspec.structs.replace(
            message,
            config=self.config_toml,
            run_dir=str(self.run_dir),
            resume_from=self.resume_from,
            last_step=self.max_steps or 0,
            kept=kept,
        )


class Observer(Protocol):
    """Receiver of a run's progress and metrics. Called from the controller's event loop: it must return quickly."""

    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluated(self, version: int, metrics: Mapping[str, float], groups: list[RolloutGroup]) -> None: ...


class Controller:
    """Serves workers until the run is over.

    server = await serve(address, token=token, decode=ToController, on_connect=controller.on_connect)
    await controller.run()
    """

    def __init__(
        self,
        job: Job,
        *,
        source: PromptSource,
        eval_source: PromptSource | None,
        ledger: Ledger,
        journal: Journal,
        clock: Callable[[], float],
        observer: Observer,
    ) -> None:
        self.ledger = ledger
        self.clock = clock
        self.peers = Peers()
        self.checkpoint = ""
        """Path of the newest checkpoint reported by a policy replica."""
        self._job = job
        self._source = source
        self._observer = observer
        self._ledger = DurableLedger(ledger, journal=journal, clock=clock, dispatch=self._dispatch)
        self._batches = Batches(source=source, supervised=job.supervised, peers=self.peers)
        self._reports = PolicyReports(
            on_step=lambda done: observer.step(done.step, {**done.metrics, **self.peers.metrics()}),
            on_validated=lambda done: observer.evaluated(done.version, done.metrics, []),
        )
        self._evaluator = Evaluator(
            source=eval_source,
            every_steps=job.eval_every_steps,
            max_steps=job.max_steps,
            by=job.eval_by,
            rows_per_group=job.group_size,
            on_finished=self._evaluated,
        )
        self._rendezvous = Rendezvous()
        self._stop_reason = ""
        self._outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # -- the run

    async def run(self) -> None:
        """Serve until the policy leaves after the last step. Raises the error that ended the run early."""
        self._evaluate_if_due(self.ledger.version)
        tasks = [asyncio.create_task(self._ledger.run()), asyncio.create_task(self._ledger.tick(TICK_S))]
        try:
            await asyncio.wait([*tasks, self._outcome], return_when=asyncio.FIRST_COMPLETED)
            for task in filter(asyncio.Task.done, tasks):
                task.result()
            self._outcome.result()
        finally:
            self._outcome.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self, reason: str) -> None:
        """End the run cleanly: the policy finishes its step, or its start, and saves."""
        self._stop_reason = reason
        for peer in self.peers.of_role("policy"):
            peer.post(p.Stop(reason=reason))

    def fail(self, error: BaseException) -> None:
        """End the run with this error."""
        if not self._outcome.done():
            self._outcome.set_exception(error)

    def dismiss(self) -> None:
        """Send Stop to every worker: the run is over."""
        for peer in self.peers.by_name.values():
            peer.dismiss(self._stop_reason or "the run is over")

    def waits(self) -> list[str]:
        """Return the running evaluation's progress, as lines for the status."""
        return self._evaluator.waits()

    # -- connections and messages of workers

    async def on_connect(self, connection: Connection) -> None:
        if self._outcome.done():
            return  # the run is over
        if connection.peer.role == STORE:
            return await self._rendezvous.serve(connection)
        role = "policy" if connection.peer.role == "policy" else "rollout"
        peer = Peer(name=connection.peer.name, role=role, connection=connection, heartbeat_at=self.clock())
        self.peers.add(peer)
        self._ledger.feed(events.Join(replica=peer.name, role=peer.role))
        try:
            while True:
                message = await connection.receive()
                try:
                    self._handle(peer, message)
                except OSError as error:  # the observer could not write a file
                    self.fail(error)
        except ConnectionClosed:
            self._lose(peer)
            raise

    def _lose(self, peer: Peer) -> None:
        if self.peers.by_name.get(peer.name) is peer:
            self.peers.remove(peer.name)
            self._evaluator.lose(peer, self.peers)
            if not peer.leaving:  # a policy ends with its connection; a rollout may be started again
                lost = events.Gone if peer.role == "policy" else events.Disconnected
                self._ledger.feed(lost(replica=peer.name, incarnation=peer.incarnation))

    def _handle(self, peer: Peer, message: p.ToController) -> None:
        if isinstance(message, OfAnEpoch) and message.epoch not in (0, peer.epoch):
            return  # a Remesh is on its way to the replica, which then repeats its request
        match message:
            case p.Heartbeat():
                peer.beat(message, now=self.clock())
                self._feed(peer, message)
            case p.RequestLeases():
                self._request_leases(peer, message)
            case p.Deliver() if message.evaluation:
                self._evaluator.deliver(message)
            case p.Deliver():
                self._batches.deliver(message, replica=peer.name, decided=self._feed(peer, message))
            case p.Failed() if message.evaluation:
                self._evaluator.fail(message)
            case p.RequestBatch():
                peer.wants_batch = message.step
                self._request_batch(peer)
            case p.PayloadsLost():
                if lost := self._batches.lose(self._feed(peer, message)):
                    self._observer.note(f"groups lost and generated again: {len(lost)} ({peer.name}: {message.reason})")
            case p.Failed() | p.Vote() | p.PeersLost():
                self._feed(peer, message)
            case p.Ready():
                self._feed(peer, message)
                self._observer.note(f"{peer.name} is ready")
                peer.address = message.address
                self.peers.send_weights_address(peer)
            case _:
                self._handle_report(peer, message)

    def _handle_report(self, peer: Peer, message: p.ToController) -> None:
        match message:
            case p.Validated() if peer.role == "rollout":
                self._observer.evaluated(message.version, message.metrics, [])
            case p.StepDone() | p.Validated():
                self._reports.add(peer.name, message, mesh=self.ledger.members.mesh)
            case p.Alarm():
                self._observer.note(f"{peer.name}: {message.message}")
            case p.CheckpointDone():
                self.checkpoint = message.path
                self._feed(peer, message)
            case p.Goodbye():
                peer.leaving = True
                self._feed(peer, message)
                if not (self._outcome.done() or self.peers.has_policy()) and peer.role == "policy":
                    self._outcome.set_result(None)  # the last policy has left in good order
            case p.Fatal():
                peer.leaving = True
                self.fail(_failure(peer, message))

    def _feed(self, peer: Peer, message: p.ToLedger) -> list[Record]:
        return self._ledger.feed(events.From(peer.name, peer.incarnation, message))

    def _request_leases(self, peer: Peer, message: p.RequestLeases) -> None:
        if self._evaluator.current is not None:
            return self._evaluator.request(peer, message)
        peer.held = None
        self._feed(peer, message)

    # -- batches and evaluations

    def _request_batch(self, peer: Peer) -> None:
        """Request the batch for a waiting policy from the ledger, once it is in the mesh and no evaluation runs."""
        step = peer.wants_batch
        if step is None or peer.epoch == 0 or self._evaluator.current is not None:
            return
        if self._stop_reason or self._job.ends_at(step):
            self._end_of_batches(peer)
        else:
            self._feed(peer, p.RequestBatch(step, peer.epoch))

    def _end_of_batches(self, peer: Peer) -> None:
        """After the last step: evaluate it, then send the policy an empty batch, which ends it."""
        step = self.ledger.version
        if self._stop_reason or not self._evaluate_if_due(step, last=True):
            peer.wants_batch = None
            peer.post(p.Batch(step=step, epoch=peer.epoch, samples=()))

    def _evaluate_if_due(self, version: int, *, last: bool = False) -> bool:
        due = self._evaluator.begin_if_due(version, last=last)
        if due:
            self._observer.phase(f"evaluating version {version}")
            self._resume_requests()
        return due

    def _evaluated(self, finished: Evaluation) -> None:
        groups = [finished.groups[row] for row in sorted(finished.groups)]
        self._observer.evaluated(finished.version, finished.metrics(), groups)
        for reason in finished.first_reasons():
            self._observer.note(f"failed in the evaluation: {reason}")
        self._observer.phase("saving" if self._job.ends_at(finished.version) else "training")
        self._resume_requests()
        for policy in self.peers.of_role("policy"):
            self._request_batch(policy)

    def _resume_requests(self) -> None:
        for rollout in self.peers.of_role("rollout"):
            if rollout.held is not None:
                self._request_leases(rollout, rollout.held)

    # -- outputs of the ledger

    def _dispatch(self, output: events.Output) -> None:
        match output:
            case events.Halt():
                self.fail(UserError(output.message))
            case events.PoliciesLost():
                self.fail(WorkerFailed("the last policy replica is gone"))
            case events.To() if (peer := self.peers.by_name.get(output.replica)) is not None:
                self._send(peer, output.message)

    def _send(self, peer: Peer, message: p.FromLedger) -> None:
        """Send a message of the ledger, completed with the recipe, rows or payloads."""
        match message:
            case p.Welcome():
                peer.welcome(self._job.welcome(message, kept=self._batches.kept(peer.name)))
            case p.Grant():
                peer.post(p.Grant(tuple(with_row(prompt, self._source) for prompt in message.prompts)))
            case p.Batch():
                peer.wants_batch = None
                peer.post(self._batches.with_payloads(message))
            case p.Cancel():
                peer.post(message)
            case p.Committed():
                self._batches.committed(message.step)
                self._evaluate_if_due(message.step + 1)
                peer.post(message)
            case p.Reject():
                self._observer.note(f"{peer.name}: {message.reason}")
            case p.NoMore() if peer.role == "policy":
                self._end_of_batches(peer)
            case p.Remesh():
                peer.epoch, peer.wants_batch = message.epoch, None
                self._reports.remesh(message.members)
                self._rendezvous.begin(message.epoch)
                peer.post(message)
            case p.NoMore() | p.Ack() | p.RolledBack():
                pass  # not sent: a worker ends with its connection


def _failure(peer: Peer, fatal: p.Fatal) -> Exception:
    if fatal.out_of_memory:
        return OutOfMemory(f"{peer.name}: {fatal.message}", role=peer.role)
    return UserError(fatal.message) if fatal.user else WorkerFailed(f"{peer.name}: {fatal.message}")

"""The controller: one asyncio process, no GPU work, no torch.

    workers' messages -> events -> ledger (journal first) -> effects -> workers' messages

It owns the prompt stream, the payloads of groups on their way, evaluations, and the figures of the run. What may be
leased, batched and committed is the ledger's decision alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cosmos_rl_core.control import effects, events
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.durable import DurableLedger
from cosmos_rl_core.control.evaluation import Evaluation
from cosmos_rl_core.control.journal import Journal
from cosmos_rl_core.control.ledger import Ledger
from cosmos_rl_core.control.payload import decode_group
from cosmos_rl_core.control.wire import Connection, ConnectionClosed
from cosmos_rl_core.interfaces import UserError
from cosmos_rl_core.rollout.source import PromptSource
from cosmos_rl_core.types import RolloutGroup

TICK_S = 0.5


class Observer(Protocol):
    """Who is told what happens: console, files, dashboards."""

    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluated(self, version: int, metrics: Mapping[str, float], groups: list[RolloutGroup]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the controller has to get done."""

    config_toml: str
    run_dir: Path
    resume_from: str
    supervised: bool
    """True: rows go straight to the policy; there are no rollout replicas."""
    max_steps: int | None
    eval_every_steps: int
    group_size: int


@dataclass(slots=True, kw_only=True)
class Member:
    """A connected worker."""

    name: str
    role: str
    connection: Connection
    incarnation: int = -1
    epoch: int = 0
    progress: int = 0
    busy_s: float = 0.0
    beat_at: float = 0.0
    asked: p.RequestLeases | None = None
    """A request held back while an evaluation runs."""
    leaving: bool = False


@dataclass(slots=True)
class Controller:
    """Serves workers until the run is over. Made by `launch.run`.

    server = await serve(address, token=token, decode=ToController, on_connect=controller.on_connect)
    version = await controller.run()
    """

    plan: Plan
    source: PromptSource
    eval_source: PromptSource | None
    ledger: Ledger
    journal: Journal
    clock: Callable[[], float]
    observer: Observer
    members: dict[str, Member] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    checkpoint: str = ""
    """The newest checkpoint a policy replica reported."""
    stop_reason: str = ""
    _accounts: DurableLedger = field(init=False)
    _payloads: dict[int, bytes] = field(default_factory=dict)
    _in_work: tuple[int, ...] = ()
    """Samples of the batch that was sent last."""
    _sync_address: str = ""
    _evaluated: set[int] = field(default_factory=set)
    _waiting_batch: tuple[Member, int] | None = None
    _outcome: asyncio.Future[None] = field(init=False)

    def __post_init__(self) -> None:
        self._accounts = DurableLedger(
            self.ledger, journal=self.journal, clock=self.clock, dispatch=self._dispatch
        )
        self._outcome = asyncio.get_running_loop().create_future()

    # --- the run -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the policy has left after the last step. Raises what ended the run early."""
        self._evaluate_if_due(self.ledger.version)
        tasks = [asyncio.create_task(self._accounts.run()), asyncio.create_task(self._tick())]
        try:
            await asyncio.wait([*tasks, self._outcome], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            self._outcome.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self, reason: str) -> None:
        """End cleanly: the policy finishes its step and saves."""
        self.stop_reason = reason
        for member in self._of_role("policy"):
            self._post(member, p.Stop(reason=reason))

    def fail(self, error: Exception) -> None:
        """End the run with this error."""
        if not self._outcome.done():
            self._outcome.set_exception(error)

    def dismiss(self) -> None:
        """Tell every worker that the run is over."""
        for member in self.members.values():
            self._post(member, p.Stop(reason=self.stop_reason or "the run is over"))

    def waits(self) -> list[str]:
        """What the controller itself holds back, in words."""
        return [self.evaluation.progress] if self.evaluation is not None else []

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._accounts.feed(events.Tick())

    # --- workers come, talk and go --------------------------------------------------------------------------------

    async def on_connect(self, connection: Connection) -> None:
        member = Member(name=connection.peer.name, role=connection.peer.role, connection=connection)
        self.members[member.name] = member
        self._accounts.feed(events.Join(replica=member.name, role=member.role))
        try:
            while True:
                self._hear(member, await connection.receive())
        except ConnectionClosed:
            self._lost(member)
            raise

    def _lost(self, member: Member) -> None:
        if self.members.get(member.name) is not member:
            return
        del self.members[member.name]
        if self.evaluation is not None:
            self.evaluation.release(member.name)
            self._resume_requests()
        if not member.leaving:
            self._accounts.feed(events.Disconnected(replica=member.name, incarnation=member.incarnation))

    def _hear(self, member: Member, message: p.ToController) -> None:
        match message:
            case p.Heartbeat():
                self._heartbeat(member, message)
            case p.RequestLeases():
                self._request_leases(member, message)
            case p.Deliver():
                self._deliver(member, message)
            case p.Failed():
                self._failed(member, message)
            case p.RequestBatch():
                self._waiting_batch = (member, message.step)
                self._answer_batch()
            case p.Vote():
                self._accounts.feed(
                    events.Vote(
                        replica=member.name,
                        incarnation=member.incarnation,
                        step=message.step,
                        epoch=message.epoch,
                    )
                )
            case _:
                self._hear_news(member, message)

    def _hear_news(self, member: Member, message: p.ToController) -> None:
        match message:
            case p.Ready():
                self._ready(member, message)
            case p.StepDone():
                self.observer.step(message.step, message.metrics)
            case p.CheckpointDone():
                self.checkpoint = message.path
                self._accounts.feed(events.Checkpointed(version=message.step))
            case p.Goodbye():
                member.leaving = True
                self._accounts.feed(events.Leave(replica=member.name, incarnation=member.incarnation))
                if member.role == "policy" and not self._outcome.done():
                    self._outcome.set_result(None)
            case p.Fatal():
                member.leaving = True
                error = (
                    UserError(message.message) if message.user else WorkerFailed(member.name, message.message)
                )
                self.fail(error)

    def _ready(self, member: Member, message: p.Ready) -> None:
        self._accounts.feed(events.Ready(replica=member.name, incarnation=member.incarnation))
        self.observer.note(f"{member.name} is ready")
        if member.role == "policy":
            self._sync_address = message.address
        for rollout in self._of_role("rollout") if member.role == "policy" else [member]:
            if self._sync_address:
                self._post(rollout, p.SyncFrom(address=self._sync_address))

    def _heartbeat(self, member: Member, message: p.Heartbeat) -> None:
        member.progress, member.busy_s, member.beat_at = message.progress, message.busy_s, self.clock()
        self._accounts.feed(
            events.Heartbeat(
                replica=member.name,
                incarnation=member.incarnation,
                progress=message.progress,
                holding=tuple(message.holding),
            )
        )

    # --- leases and groups -------------------------------------------------------------------------------------------

    def _request_leases(self, member: Member, message: p.RequestLeases) -> None:
        if self.evaluation is None:
            self._accounts.feed(
                events.RequestLeases(
                    replica=member.name,
                    incarnation=member.incarnation,
                    version=message.version,
                    capacity=message.capacity,
                )
            )
            return
        member.asked = message
        if message.version >= self.evaluation.version:
            assert self.eval_source is not None
            ids = self.evaluation.lease(member.name, capacity=message.capacity * self.plan.group_size)
            prompts = [self._leased(self.eval_source, i, attempt=0, evaluation=True) for i in ids]
            if prompts:
                member.asked = None
                self._post(member, p.Grant(prompts=prompts))

    def _leased(self, source: PromptSource, sample: int, *, attempt: int, evaluation: bool) -> p.LeasedPrompt:
        prompt = source[sample]
        row = json.dumps(dict(prompt.row)).encode()
        return p.LeasedPrompt(
            sample=sample, attempt=attempt, row=row, origin=prompt.origin, evaluation=evaluation
        )

    def _deliver(self, member: Member, message: p.Deliver) -> None:
        if message.evaluation:
            if self.evaluation is not None:
                self.evaluation.deliver(message.sample, decode_group(message.payload))
                self._finish_evaluation()
            return
        self._payloads[message.sample] = message.payload
        self._accounts.feed(
            events.Deliver(
                replica=member.name,
                incarnation=member.incarnation,
                sample=message.sample,
                attempt=message.attempt,
                min_version=message.min_version,
                max_version=message.max_version,
                num_terms=message.num_terms,
            )
        )

    def _failed(self, member: Member, message: p.Failed) -> None:
        if message.evaluation:
            if self.evaluation is not None:
                self.evaluation.fail(message.sample, message.reason)
                self._finish_evaluation()
            return
        self._accounts.feed(
            events.Fail(
                replica=member.name,
                incarnation=member.incarnation,
                sample=message.sample,
                attempt=message.attempt,
                reason=message.reason,
                final=message.final,
            )
        )

    # --- batches and evaluations -----------------------------------------------------------------------------------------

    def _answer_batch(self) -> None:
        """Ask the ledger for the batch the policy waits for, unless an evaluation or the end comes first."""
        if self._waiting_batch is None or self.evaluation is not None:
            return
        member, step = self._waiting_batch
        if self._over(step):
            self._end_of_batches(member, step)
            return
        self._waiting_batch = None
        self._accounts.feed(
            events.RequestBatch(
                replica=member.name, incarnation=member.incarnation, step=step, epoch=member.epoch
            )
        )

    def _over(self, step: int) -> bool:
        return bool(self.stop_reason) or (self.plan.max_steps is not None and step >= self.plan.max_steps)

    def _end_of_batches(self, member: Member, step: int) -> None:
        """The last step is done: evaluate it, then let the policy go."""
        self._waiting_batch = (member, step)
        if not self.stop_reason and self._evaluate_if_due(step, last=True):
            return
        self._waiting_batch = None
        self._post(member, p.Batch(step=step, epoch=member.epoch, samples=[], payloads=[]))

    def _evaluate_if_due(self, version: int, *, last: bool = False) -> bool:
        """Start the evaluation of a version where the recipe asks for one. Until it is done nothing else is leased."""
        every = self.plan.eval_every_steps
        last = last or version == self.plan.max_steps
        due = version == 0 or last or (every > 0 and version % every == 0)
        if self.eval_source is None or not due or version in self._evaluated:
            return False
        self.evaluation = Evaluation(version=version, rows=len(self.eval_source))
        self.observer.phase(f"evaluating version {version}")
        return True

    def _finish_evaluation(self) -> None:
        if self.evaluation is None or not self.evaluation.done:
            return
        finished, self.evaluation = self.evaluation, None
        self._evaluated.add(finished.version)
        groups = [finished.groups[row] for row in sorted(finished.groups)]
        self.observer.evaluated(finished.version, finished.metrics(), groups)
        for reason in sorted(set(finished.failures.values()))[:3]:
            self.observer.note(f"no answer in the evaluation: {reason}")
        self.observer.phase("training")
        self._resume_requests()
        self._answer_batch()

    def _resume_requests(self) -> None:
        """Take up the lease requests that the evaluation held back."""
        for member in self._of_role("rollout"):
            asked, member.asked = member.asked, None
            if asked is not None:
                self._request_leases(member, asked)

    # --- what the ledger decided ---------------------------------------------------------------------------------------------

    def _dispatch(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Halt():
                self.fail(UserError(effect.message))
            case effects.PoliciesLost():
                self.fail(WorkerFailed("policy", "the last policy replica is gone"))
            case effects.Ack() | effects.RolledBack():
                pass  # deliveries travel on a connection that lives as long as the worker
            case _:
                member = self.members.get(effect.replica)
                if member is not None:
                    self._tell(member, effect)

    def _tell(self, member: Member, effect: effects.Effect) -> None:
        match effect:
            case effects.Welcome():
                member.incarnation = effect.incarnation
                welcome = p.Welcome(
                    config=self.plan.config_toml,
                    run_dir=str(self.plan.run_dir),
                    resume_from=self.plan.resume_from,
                )
                self._post(member, welcome)
            case effects.Remesh():
                member.epoch = effect.epoch
            case effects.Grant():
                prompts = [
                    self._leased(self.source, lease.sample, attempt=lease.attempt, evaluation=False)
                    for lease in effect.leases
                ]
                self._post(member, p.Grant(prompts=prompts))
            case effects.Cancel():
                self._post(member, p.Cancel(sample=effect.sample))
            case effects.NoMore():
                if member.role == "policy":
                    self._end_of_batches(member, self.ledger.version)
            case effects.AssignBatch():
                self._send_batch(member, effect)
            case effects.Committed():
                self._committed(member, effect.step)
            case effects.Reject():
                self.observer.note(f"{member.name}: {effect.reason}")

    def _send_batch(self, member: Member, effect: effects.AssignBatch) -> None:
        self._in_work = effect.samples
        if self.plan.supervised:
            payloads = [json.dumps(dict(self.source[sample].row)).encode() for sample in effect.samples]
        else:
            payloads = [self._payloads[sample] for sample in effect.samples]
        batch = p.Batch(
            step=effect.step,
            epoch=effect.epoch,
            samples=list(effect.samples),
            payloads=payloads,
        )
        self._post(member, batch)

    def _committed(self, member: Member, step: int) -> None:
        for sample in self._in_work:
            self._payloads.pop(sample, None)
        self._evaluate_if_due(step + 1)
        position = self.ledger.position()
        committed = p.Committed(
            step=step, next_sample=position.next_sample, unfinished=list(position.unfinished)
        )
        self._post(member, committed)

    def _of_role(self, role: str) -> list[Member]:
        return [member for member in self.members.values() if member.role == role]

    def _post(self, member: Member, message: p.ToWorker) -> None:
        if not member.connection.closed.is_set():
            member.connection.post(message)


class WorkerFailed(Exception):
    """A worker died or raised; the run cannot go on without it."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name

"""Workers come and go, and the run goes on, goes back to a checkpoint, or ends.

first process of a name     -> Join -> Welcome; a policy after the loss of all: once the run is rolled back
the same process again      -> Rejoin -> Join(incarnation, holding) -> Welcome, Release of what is not needed
... after it was removed    -> Refused: others have its work
another process of a name   -> Refused while the first one is alive
the connection closes       -> Disconnected: suspect until it returns, or until its launcher reports its end
one of its ranks has died   -> Gone, by its agent's report: the other ranks may not notice before the next collective

the last policy is gone     -> reports recorded -> rollback to the newest checkpoint -> a policy joins
                                                                          |
                                                                          +-> none within the wait: the run fails
the controller is gone      -> another one replays the journal, Restart -> workers return, repeat groups and requests
                            -> all groups returned: batches go on
                            -> one returns without its group, or not within the grace: it is generated again
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Set
from dataclasses import dataclass, field

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.durable import DurableLedger
from cosmos_rl_core.control.inflight import Batches
from cosmos_rl_core.control.ledger import events
from cosmos_rl_core.control.ledger.membership import Members, MemberState
from cosmos_rl_core.control.ledger.records import Position
from cosmos_rl_core.control.peers import Peers, WorkerPeer
from cosmos_rl_core.control.reports import PolicyReports, ProgressObserver
from cosmos_rl_core.control.scheduler import Scheduler
from cosmos_rl_core.control.settings import ControllerSettings
from cosmos_rl_core.errors import OutOfMemory, TakenOver, UserError, WorkerFailed, WorkerLost
from cosmos_rl_core.observe.startup import IMPORTING, describe
from cosmos_rl_core.wire.channel import Connection

LAST_WORDS_S = 1.0
"""Maximum seconds for reading the last messages of a process that has ended."""
POLICIES_LOST = "the last policy replica is gone"


class RunOutcome:
    """Decided once; later decisions are ignored. Created in a running event loop.

    outcome.worker_failed("rollout-0", error)
    await outcome.decided                      # raises the error
    """

    def __init__(self, members: Members, *, external: bool, observer: ProgressObserver) -> None:
        """external: workers are started by others, so that one that fails before it is ready does not end the run."""
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.worker = ""
        """The worker whose error has ended the run."""
        self.interrupted = False
        """Whether the last policy left before the end of the run."""
        self.is_taken_over = False
        """Whether another controller continues the run."""
        self._members, self._external, self._observer = members, external, observer

    @property
    def is_decided(self) -> bool:
        return self.decided.done()

    def finish(self) -> None:
        """End the run in good order."""
        if not self.decided.done():
            self.decided.set_result(None)

    def fail(self, error: BaseException, *, worker: str = "") -> None:
        """End the run with this error. worker: whose error it is."""
        self.is_taken_over |= isinstance(error, TakenOver)
        if not self.decided.done():
            self.worker = worker
            self.decided.set_exception(error)

    def last_policy_left(self, *, over: bool) -> None:
        """End the run if it is over, or if no other policy is expected: then like an interrupt.

        A policy that leaves saves a checkpoint first, from which another one that joins in time continues.
        """
        self.interrupted = not over
        if over or not self._external:
            self.finish()

    def policy_lost(self, reason: str) -> None:
        """End the run for want of a policy: with an error, or like an interrupt if the last one left by itself."""
        if self.interrupted:
            self.finish()
        else:
            self.fail(WorkerFailed(reason))

    def worker_failed(self, replica: str, error: Exception) -> None:
        """End the run with a worker's error, unless it has never worked, and another one can do its work.

        Another worker of the role that has already done work can take over; with `external`, one may still join. After
        a WorkerLost the replica may be started again.
        """
        member = self._members.by_name.get(replica)
        if isinstance(error, WorkerLost):
            self._observer.note(str(error).partition(";")[0])
        elif (self._external or self._has_other(replica)) and (member is None or not member.has_worked):
            self._observer.note(f"{replica} could not start, and the run continues without it: {error}")
        else:
            self.fail(error, worker=replica)

    def _has_other(self, replica: str) -> bool:
        members = self._members.by_name
        return replica in members and any(
            other.role == members[replica].role and other.has_worked and other.is_live
            for name, other in members.items()
            if name != replica
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Predecessor:
    """The state of a dead controller that its journal lacks, from its other files."""

    generation: int
    """Of the controller that continues."""
    step: int
    """Newest step with a line in metrics.jsonl; -1 without any."""
    evaluated: int
    """Newest version whose evaluation is complete; -1 without any."""


@dataclass(slots=True, kw_only=True)
class Recovery:
    """Continues the run after the loss of all policies, or of an earlier controller."""

    job: ControllerSettings
    durable: DurableLedger
    peers: Peers
    batches: Batches
    reports: PolicyReports
    scheduler: Scheduler
    outcome: RunOutcome
    resume_from: str = field(init=False)
    """Checkpoint that a new policy loads; empty: the initial model."""
    checkpoint: str = ""
    """Newest checkpoint of this run."""
    _rolled_back: asyncio.Event = field(default_factory=asyncio.Event)
    _joined: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.resume_from = self.job.resume_from

    @property
    def newcomer_from(self) -> str:
        """Checkpoint that a policy loads if it joins now; empty, too, if a member of the mesh will send its state.

        `resume_from` may have been removed by then, as newer checkpoints replace it.
        """
        return "" if self.durable.ledger.members.mesh else self.resume_from

    def close(self) -> None:
        """Stop waiting, and record reports kept for a dead policy, unless another controller continues the run."""
        self._stop_waiting()
        if not self.outcome.is_taken_over:
            self.reports.flush()

    # -- after the loss of all policies

    def begin(self) -> None:
        """All policy replicas are lost."""
        self.reports.flush()
        if self.job.policy_wait_s == 0.0:
            self.outcome.policy_lost(POLICIES_LOST)
            return
        self._stop_waiting()
        self._task = asyncio.create_task(self._run())

    async def rolled_back(self) -> None:
        """Wait for the rollback, if one is due. A policy joins after it."""
        while self.durable.ledger.is_orphaned:
            self._rolled_back.clear()
            await self._rolled_back.wait()

    def joined(self) -> None:
        """A policy has connected: end the wait."""
        self._joined.set()
        self.outcome.interrupted = False

    def wait_if_lost(self) -> None:
        """After a rollback, wait anew for a policy if none is left."""
        ledger = self.durable.ledger
        is_waiting = self._task is not None and not self._task.done()
        if not ledger.lineage or ledger.is_orphaned or ledger.members.mesh or is_waiting:
            return
        if not any(member.is_live for member in ledger.members.policies.values()) and not self.outcome.is_decided:
            self._task = asyncio.create_task(self._wait())

    def _stop_waiting(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            position, path = await asyncio.to_thread(self.job.newest_checkpoint)
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
            await asyncio.wait_for(self._joined.wait(), self.job.policy_wait_s)
        except TimeoutError:
            text = f"{POLICIES_LOST}, and no other one has come within {self.job.policy_wait_s:g} s"
            self.outcome.policy_lost(text)

    def _roll_back(self, position: Position, checkpoint: str) -> None:
        """Continue from a checkpoint on a new lineage. Raises ValueError for a version that is not available.

        If steps are undone, all groups are generated again. A policy that had connected before the loss has
        a checkpoint or weights of the old lineage: it ends with its connection, and may be started again.
        """
        ledger, observer = self.durable.ledger, self.reports.observer
        for name, member in ledger.members.policies.items():
            if member.is_live:
                self.durable.feed(events.Gone(name, member.incarnation))
                if (peer := self.peers.by_name.get(name)) is not None:
                    peer.connection.close()
        version, undone = position.version, ledger.version - position.version
        self.durable.feed(events.Rollback(position))
        self.resume_from = self.checkpoint = checkpoint  # before any new policy gets its Welcome
        self.batches.roll_back(version, ready=ledger.samples.all_ready())
        self.reports.roll_back(version)
        self.scheduler.evaluator.roll_back(version, lineage=ledger.lineage)
        observer.rolled_back(version)
        source = checkpoint or "the initial model"
        observer.note(f"all policy replicas were lost: training continues from {source}; {undone} steps are done again")

    # -- after the death of an earlier controller

    def succeed(self, earlier: Predecessor) -> None:
        """Continue the run of a dead controller, whose journal the ledger has replayed. Called before serving."""
        ledger = self.durable.ledger
        self.reports.resume(step=earlier.step, version=earlier.evaluated)
        self.scheduler.evaluator.resume(earlier.evaluated)
        self.durable.feed(events.Restart(earlier.generation))
        if ledger.halted is not None:
            return self.outcome.fail(UserError(ledger.halted))
        if ledger.why_finished() is not None and not ledger.members.ready_policies():
            return self.outcome.finish()
        self.wait_if_lost()
        assigned = ledger.assignment.samples if ledger.assignment is not None else ()
        self.batches.restarted(ledger.samples.all_ready(), step=ledger.version, assigned=assigned)
        asyncio.get_running_loop().call_later(ledger.config.restart_grace_s, self._end_grace)
        self.reports.observer.note(
            f"the controller has restarted (generation {ledger.generation}) at step {ledger.version}; "
            f"{len(ledger.members.live())} workers and {len(self.batches.awaited)} groups are expected to return"
        )

    def returned(self, replica: str, holding: Collection[int]) -> None:
        """A replica has returned, or another process of it, and holds these samples; its other groups are lost."""
        active = self.durable.ledger.samples.active
        delivered = {s for s in self.batches.awaited if s in active and active[s].replica == replica}
        self._give_up(delivered.difference(holding))

    def _end_grace(self) -> None:
        self._give_up(set(self.batches.awaited))

    def _give_up(self, lost: Set[int]) -> None:
        """Generate groups again that do not return; those of the batch in work only if it is requested."""
        if not lost:
            return
        self.batches.awaited.difference_update(lost)
        if missing := tuple(sorted(lost & self.durable.ledger.samples.all_ready())):
            self.durable.feed(events.GroupsUnheld(missing))
            self.reports.observer.note(f"groups lost with their workers and generated again: {len(missing)}")
        if not self.batches.awaited:
            self.scheduler.request_batches()


class WorkerProcesses:
    """The processes of workers, for a controller that ends some. A launcher that owns processes has its own."""

    def end_silent(self, name: str) -> None:
        """Kill a worker that does not answer any more. Here nothing: others have started it."""


@dataclass(slots=True, kw_only=True)
class Lifecycle:
    """Admits workers as peers and as members of the ledger, and removes them."""

    durable: DurableLedger
    peers: Peers
    scheduler: Scheduler
    recovery: Recovery
    outcome: RunOutcome
    observer: ProgressObserver
    processes: WorkerProcesses = field(default_factory=WorkerProcesses)

    async def admit(self, connection: Connection) -> WorkerPeer | None:
        """Return the worker of a new connection, or None if it was refused. Raises ConnectionClosed."""
        name, incarnation = connection.peer.name, connection.peer.incarnation
        role: p.Role = "policy" if connection.peer.role == "policy" else "rollout"
        rejoin = await connection.receive() if incarnation else p.Rejoin()
        if not isinstance(rejoin, p.Rejoin):
            raise ValueError(f"{name} sent {type(rejoin).__name__} in place of Rejoin")
        if refusal := self._refusal(name, role, incarnation):
            self.observer.note(f"{name} was refused: {refusal}")
            connection.post(p.Refused(refusal))
            return None
        if role == "policy" and not incarnation:
            if (earlier := self.peers.by_name.get(name)) is not None:
                self.lose(earlier)
            self.ended(name)
            await self.recovery.rolled_back()
            self.recovery.joined()
        now = self.durable.clock()
        peer = WorkerPeer(name=name, role=role, connection=connection, heartbeat_at=now, has_beaten=incarnation > 0)
        if not incarnation:
            peer.phases.enter(IMPORTING, now=now)
        earlier = self.peers.by_name.get(name)
        self.peers.add(peer)
        if earlier is not None:
            earlier.connection.close()
        self.durable.feed(events.Join(name, role, incarnation, rejoin.holding))
        self.recovery.returned(name, rejoin.holding)
        if incarnation:
            self.scheduler.evaluator.lose(name, self.peers, but=rejoin.rows)
        return peer

    def _refusal(self, name: str, role: p.Role, incarnation: int) -> str:
        """Return why a connection is refused; empty if it is not."""
        ledger = self.durable.ledger
        if incarnation and not ledger.members.is_current(name, incarnation):
            return f"{name} was away for too long: others have its work"
        if role == "rollout" and not ledger.config.rollouts:
            return "a supervised run has no rollout workers"
        if not incarnation and self.peers.is_in_use(name, now=self.durable.clock()):
            return f"a live worker has the name {name}: give this one another by --name, or stop that one first"
        return ""

    def starts(self, peer: WorkerPeer, message: p.Phase | p.Ready) -> None:
        """A worker begins a phase of its start; or it is built, also reported again on a new connection."""
        ledger, now = self.durable.ledger, self.durable.clock()
        if isinstance(message, p.Phase):
            peer.phases.enter(message.name, now=now)
            return
        if ledger.members.by_name[peer.name].state is MemberState.JOINING:
            start = describe(peer.phases.so_far(now))
            self.observer.note(f"{peer.name} is ready after {start}" if start else f"{peer.name} is ready")
            self._note_shared_gpu(peer, message.gpu)
            if message.endpoint:
                self._note_endpoint(peer.name, message.endpoint)
        self.durable.feed(peer.event(message))
        peer.ready(message, now=now)
        self.peers.announce(ledger, ready=peer)

    def _note_endpoint(self, name: str, url: str) -> None:
        """Report where agents ask a replica, and write it where they look for it."""
        self.observer.note(f"{name}: agents ask {url}")
        folder = self.recovery.job.run_dir / "endpoints"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"{url}\n")

    def _note_shared_gpu(self, peer: WorkerPeer, gpu: str) -> None:
        """Workers that are started by hand on one machine all take its first GPU."""
        others = [other.name for other in self.peers.by_name.values() if other is not peer and gpu and other.gpu == gpu]
        if others:
            self.observer.note(
                f"{peer.name} is on the GPU of {', '.join(others)} ({gpu}): give each worker its own by "
                "CUDA_VISIBLE_DEVICES, or set [run] share_gpus = true"
            )

    def lose(self, peer: WorkerPeer) -> None:
        """Remove a worker whose connection has closed."""
        if self.peers.by_name.get(peer.name) is peer:
            self.peers.remove(peer.name)
            if not peer.leaving:
                self._disconnect(peer.name, has_ended=peer.has_ended)

    def ended(self, name: str) -> None:
        """Remove a worker whose process has ended, once its last messages are read. Called by its launcher."""
        if (peer := self.peers.by_name.get(name)) is not None:
            peer.has_ended = True
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self.lose, peer)  # a child may hold the socket open
        elif name in self.durable.ledger.members.by_name:
            self._disconnect(name, has_ended=True)

    def _disconnect(self, name: str, *, has_ended: bool) -> None:
        lost = events.Gone if has_ended else events.Disconnected
        incarnation = self.durable.ledger.members.by_name[name].incarnation  # it may not be welcome yet
        self.durable.feed(lost(replica=name, incarnation=incarnation))

    def failed(self, name: str, error: Exception) -> None:
        """Handle the failure of a rank, which the agent of its machine reports.

        A worker that has lost a rank is removed: its process is refused when it connects again.
        """
        self.outcome.worker_failed(name, error)
        if isinstance(error, WorkerLost) and (peer := self.peers.by_name.get(name)) is not None:
            peer.has_ended = True
            self.lose(peer)
            peer.connection.close()

    def fatal(self, peer: WorkerPeer, message: p.Fatal) -> None:
        """Handle the error that a worker has reported; its process ends."""
        self.outcome.worker_failed(peer.name, worker_error(peer.name, peer.role, message))
        peer.leaving, peer.has_ended = self.outcome.is_decided, True

    def leaves(self, peer: WorkerPeer) -> None:
        """A policy leaves the others, which go on."""
        peer.leaving = True
        self.observer.note(f"{peer.name} has left")

    def left(self, peer: WorkerPeer, message: p.Goodbye) -> None:
        """A worker has done its work, or leaves early."""
        peer.leaving = True
        over = self.scheduler.is_over  # before the ledger returns the policy's batch
        self.durable.feed(peer.event(message))
        if not over:
            self.observer.note(f"{peer.name} has left")
        if peer.role == "policy" and not self.scheduler.has_policy():
            self.outcome.last_policy_left(over=over)

    def rejected(self, peer: WorkerPeer, message: p.Reject) -> None:
        """The ledger has rejected a message. A process that hung and goes on now ends, and may be started again."""
        if peer.is_fenced:  # the messages of a process that was cut off arrive together
            return
        self.observer.note(f"{peer.name}: {message.reason}")
        if message.fenced:
            peer.is_fenced = True
            peer.post(message)
            peer.connection.close()

    def removed(self, replica: str, *, is_silent: bool) -> None:
        """The ledger has removed a member, a silent one while its process may still run: others get its work."""
        members, is_running = self.durable.ledger.members, self.durable.ledger.why_finished() is None
        role = members.by_name[replica].role
        self.scheduler.evaluator.lose(replica, self.peers)
        self.recovery.returned(replica, ())
        is_last = role == "rollout" and not members.has_rollouts()
        if is_last and is_running and self.recovery.job.external and not self.outcome.is_decided:
            self.observer.note(f"no rollout worker is left after {replica}: the run waits for another one")
        self.recovery.wait_if_lost()
        if is_silent and not (role == "policy" and self.scheduler.is_over):  # it may be saving the last checkpoint
            self.processes.end_silent(replica)
        if (peer := self.peers.by_name.get(replica)) is not None and peer.leaving:
            peer.dismiss("it has left")


def worker_error(replica: str, role: p.Role, fatal: p.Fatal) -> Exception:
    """Return the error that a worker reported.

    A policy that has lost another one may be started again; a rollout worker has no peers.
    """
    if fatal.out_of_memory:
        return OutOfMemory(f"{replica}: {fatal.message}", role=role)
    if fatal.user:
        return UserError(fatal.message)
    kind = WorkerLost if fatal.lost and role == "policy" else WorkerFailed
    return kind(f"{replica}: {fatal.message}")

"""The controller's side of the training loop in each rank of a policy replica.

    loop.train -> PolicySteps    the order of messages: a batch or a mesh, a vote, a commit, a report
                    |-> PolicyReplica    this rank's work for each message: joins a mesh, makes a batch, saves
                    \\-> PolicyLink       the messages: rank 0 has the connection, and relays to the other ranks

next_batch(0)             next_batch(1)   ...   next_batch(n)
^ held-out loss before the first step           ^ after the last; every [eval] every_steps in between
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import TypeVar

import msgspec

from cosmos_rl_core import assemble
from cosmos_rl_core.checkpoint.manifest import TrainState
from cosmos_rl_core.checkpoint.saver import CheckpointSaver
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.errors import EpochOver, PeersUnreachable
from cosmos_rl_core.observe.trace import WAITS, Timeline
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.rollout.spool.reader import SpoolReader
from cosmos_rl_core.train.learner import PolicyLearner
from cosmos_rl_core.train.profile import ProfileWindow
from cosmos_rl_core.train.residence import Residence
from cosmos_rl_core.types import StepResult, TrainStep
from cosmos_rl_core.wire.channel import ConnectionClosed
from cosmos_rl_core.workers.batch import BatchMaker, StepPayloads, batch_share
from cosmos_rl_core.workers.client import ControllerClient
from cosmos_rl_core.workers.context import Assignment
from cosmos_rl_core.workers.failure import RefusedByController
from cosmos_rl_core.workers.mesh import PolicyMesh
from cosmos_rl_core.workers.ranks import Ranks

T = TypeVar("T")
GONE = "the connection to the controller closed before step {} was committed"
NOTICE_S = 0.5
"""Seconds in which the controller usually notices a lost replica by itself."""


class PolicyLink:
    """A policy rank's link to the controller.

    Rank 0 is connected. It relays each message to the other ranks before it acts on it, and sends for all of them.
    """

    def __init__(
        self, client: ControllerClient | None, ranks: Ranks | None, *, saving: asyncio.Event | None = None
    ) -> None:
        """client: None in all ranks but the first. ranks: None for a replica of one. saving: set when a checkpoint
        shall be saved after the step in work."""
        assert client is not None or ranks is not None
        self._client = client
        self._ranks = ranks
        self._saving = saving or asyncio.Event()
        self.is_waiting = False
        """Whether this process waits for a message of the controller."""

    @property
    def _is_ending(self) -> bool:
        return self._client is None or self._client.stopped.is_set() or self._client.leaving.is_set()

    def request_batch(self, step: int, *, epoch: int) -> None:
        if not self._is_ending:
            self.post(p.RequestBatch(step=step, epoch=epoch))

    async def batch(self) -> p.Batch | p.Remesh | None:
        """Return the next batch or mesh, or None if the run has no more."""
        if self._client is None:
            message = await self._relayed()
        else:
            message = await self._next(self._client.batches)
            if message is None or (isinstance(message, p.Batch) and (self._is_ending or not message.samples)):
                message = p.Stop(reason="no more batches")
            await self._relay(message)
        return message if isinstance(message, p.Batch | p.Remesh) else None

    async def committed(self) -> p.Committed | p.Remesh | None:
        """Return the commit of the step that was voted for, or a mesh; None if the controller is gone."""
        if self._client is None:
            message = await self._relayed()
        else:
            message = await self._next(self._client.commits)
            if isinstance(message, p.Committed) and self._saving.is_set():
                self._saving.clear()
                message = msgspec.structs.replace(message, save=True)
            await self._relay(message or p.Stop(reason="the controller is gone"))
        return message if isinstance(message, p.Committed | p.Remesh) else None

    async def leave(self) -> bool | None:
        """Leave the other policies, if this one shall leave: return whether it must save a checkpoint first.

        None: it need not leave, or the run is over. All ranks call it after the last step.
        """
        if self._client is None:
            answer = await self._relayed()
        else:
            answer = None
            if self._client.leaving.is_set() and not self._client.stopped.is_set():
                await self.send(p.Leaving())
                answer = await self._next(self._client.leaves)
            await self._relay(answer or p.Stop(reason="the run is over"))
        return answer.save if isinstance(answer, p.Leave) else None

    def is_over(self, epoch: int) -> bool:
        """Return whether a later epoch is known here. Safe in any thread.

        Only rank 0 knows: the ranks agree in each wait.
        """
        client = self._client
        return client is not None and (client.epoch > epoch or client.connection.closed.is_set())

    def peers_lost(self, epoch: int, reason: str, suspects: tuple[str, ...] = ()) -> None:
        """Report that another policy replica cannot be reached, unless the controller notices it first."""

        def report() -> None:
            if not self.is_over(epoch):
                self.post(p.PeersLost(epoch=epoch, reason=reason, suspects=suspects))

        asyncio.get_running_loop().call_later(NOTICE_S, report)

    async def send(self, message: p.ToController) -> None:
        """Send a message once per replica: from rank 0 only."""
        if self._client is not None:
            await self._client.connection.send(message)

    def post(self, message: p.ToController) -> None:
        """Like `send`, without waiting for space in the send buffer."""
        if self._client is not None:
            self._client.connection.post(message)

    def post_from_thread(self, message: p.ToController) -> None:
        """Like `post`, from another thread than the event loop's."""
        if self._client is not None:
            self._client.connection.post_from_thread(message)

    async def _next(self, messages: asyncio.Queue[T]) -> T:
        self.is_waiting = True
        try:
            return await messages.get()
        finally:
            self.is_waiting = False

    async def _relay(self, message: p.ToWorker) -> None:
        if self._ranks is not None:
            await self._ranks.broadcast(message)

    async def _relayed(self) -> p.ToWorker:
        assert self._ranks is not None
        return await self._ranks.receive()


class PolicyReplica:
    """One rank of a policy replica: its work for each message of the controller."""

    def __init__(
        self,
        at: Assignment,
        link: PolicyLink,
        *,
        learner: PolicyLearner,
        saver: CheckpointSaver,
        mesh: ReplicaMesh | None,
        replicas: PolicyMesh,
        residence: Residence,
    ) -> None:
        self._at, self._link = at, link
        self._learner, self._saver, self._replicas, self._residence = learner, saver, replicas, residence
        policy, share = learner.trainer.policy, batch_share(at.config, mesh)
        compare = assemble.build_comparison(
            at.config, at.domain, policy, share=share, mesh=mesh, log=at.context.log, warn=self._warn
        )
        self._make_batch = BatchMaker(at, policy, share=share, compare=compare)
        context, timeout_s = at.context, at.config.rollout.spool.timeout_s
        reader = SpoolReader(token=context.token, name=context.name, timeout_s=timeout_s, tls=at.data_tls)
        self._payloads = StepPayloads(reader, context.ranks)
        self._validation = assemble.build_validation(
            at.config, at.domain, policy, share=share, mesh=mesh, sums=learner.sums
        )
        self._profile = self._profile_window()

    def _warn(self, text: str) -> None:
        self._link.post_from_thread(p.Alarm(message=text))

    def _profile_window(self) -> ProfileWindow | None:
        """Return the window of [logging.profile], if this rank records one."""
        context, section = self._at.context, self._at.config.logging.profile
        rank = 0 if context.ranks is None else context.ranks.rank
        if not section.steps or rank not in section.ranks:
            return None
        path = self._at.run_dir / "profile" / f"{context.name}.json.gz"
        return ProfileWindow(path, log=context.log, **section.model_dump(exclude={"ranks"}))

    async def before_step(self, step: int) -> None:
        """Measure the loss of this version on held-out rows, if that is due; advance the profiler."""
        if self._validation is not None and self._at.config.eval.due(step, last=self._at.last_step):
            metrics = await self._learner.in_compute_thread(self._validation.measure)
            await self._link.send(p.Validated(version=step, metrics=dict(metrics)))
        if self._profile is not None:
            await self._learner.in_compute_thread(self._profile.advance)

    async def after_steps(self) -> None:
        """Write what the profiler has recorded: there are no more steps."""
        if self._profile is not None:
            await self._learner.in_compute_thread(self._profile.stop)

    async def idle(self) -> None:
        """Free the device before a wait for a message."""
        await self._residence.end()

    async def join(self, message: p.Remesh) -> int:
        """Join the replicas of a mesh; return the version of the weights, which may be those of a peer now.

        Raises EpochOver.
        """
        learner = self._learner
        try:
            behind = await learner.in_compute_thread(partial(self._replicas.join, message))
        except RefusedByController as error:
            await self._link.send(p.Alarm(message=f"it {error}"))
            raise
        learner.replicas = self._replicas.group
        if behind or learner.withholds:
            learner.withholds = False
            await learner.publish()
        return learner.version

    async def batch(self, message: p.Batch) -> TrainStep | p.PayloadsUnreadable:
        """Return this rank's training batch, or the groups that some rank cannot read. Raises EpochOver."""
        payloads = await self._payloads.read(message)
        if isinstance(payloads, p.PayloadsUnreadable):
            return payloads
        await self._residence.begin()
        make_batch = partial(self._make_batch, message, payloads, self._replicas)
        return await self._learner.in_compute_thread(make_batch)

    async def finish_step(self, committed: p.Committed) -> None:
        """Save a checkpoint where one is due."""
        state = TrainState(
            step=committed.step + 1,
            next_sample=committed.next_sample,
            unfinished=committed.unfinished,
            objective=self._learner.trainer.objective.state,
            successes=committed.successes,
        )
        leads = self._replicas.leads
        await self._learner.in_compute_thread(partial(self._saver.after_step, state, leads=leads, now=committed.save))

    async def written(self) -> None:
        """Wait until the step's files are written."""
        await self._make_batch.files.written()


class PolicySteps:
    """`loop.Steps` of one rank. All ranks of a replica call it in lockstep."""

    def __init__(self, link: PolicyLink, replica: PolicyReplica, timeline: Timeline) -> None:
        self._link = link
        self._replica = replica
        self._timeline = timeline
        self._epoch = 0
        """Epoch of the mesh that this replica has joined."""
        self._requested = (-1, -1)
        """Epoch and step of the last requested batch."""
        self._last_batch = (-1, -1)
        """Epoch and step of the last batch that was returned."""
        self._committed: p.Committed | None = None

    async def next_batch(self, step: int) -> TrainStep | None:
        await self._replica.before_step(step)
        if self._last_batch == (self._epoch, step):  # the step could not be computed together
            self._link.peers_lost(self._epoch, f"no sum of the gradients of step {step} over the policy replicas")
        while (message := await self._next(step)) is not None:
            if isinstance(message, p.Remesh):
                step = await self._join(message, step=step)
            elif message.epoch == self._epoch:  # otherwise a Remesh follows, or came
                assert message.step == step
                try:
                    batch = await self._replica.batch(message)
                except EpochOver as error:
                    self._link.peers_lost(message.epoch, str(error))
                    continue
                if not isinstance(batch, p.PayloadsUnreadable):
                    self._last_batch = self._epoch, step
                    return batch
                await self._link.send(batch)
        await self._replica.after_steps()
        return None

    async def _next(self, step: int) -> p.Batch | p.Remesh | None:
        await self._replica.idle()
        with self._timeline.span("wait for batch", track=WAITS, step=step):
            return await self._link.batch()

    async def _join(self, message: p.Remesh, *, step: int) -> int:
        """Join a mesh and request its batch; return the step. A mesh that is over already is followed by another."""
        if message.epoch <= self._epoch:
            return step
        try:
            step = await self._replica.join(message)
        except EpochOver as error:
            places = error.places if isinstance(error, PeersUnreachable) else ()
            self._link.peers_lost(message.epoch, str(error), tuple(message.members[place] for place in places))
            return step
        self._epoch = message.epoch
        self._request(step)
        return step

    async def commit(self, step: int) -> None:
        await self._link.send(p.Vote(step=step, epoch=self._epoch))
        with self._timeline.span("wait for commit", track=WAITS, step=step):
            answer = await self._link.committed()
            while isinstance(answer, p.Remesh):
                if answer.epoch > self._epoch:
                    raise EpochOver(f"epoch {answer.epoch} began before step {step} was committed")
                answer = await self._link.committed()  # a mesh of the past
        if answer is None:
            raise ConnectionClosed(GONE.format(step))
        assert answer.step == step
        self._committed = answer
        self._request(step + 1)  # the next batch can be assembled and sent during this step

    def _request(self, step: int) -> None:
        if (self._epoch, step) > self._requested:
            self._requested = self._epoch, step
            self._link.request_batch(step, epoch=self._epoch)

    async def report(self, result: StepResult, sync: Mapping[str, float]) -> None:
        assert self._committed is not None
        metrics = {**result.metrics, **sync}
        await self._replica.written()
        await self._link.send(p.StepDone(step=self._committed.step, version=result.policy_version, metrics=metrics))
        await self._replica.finish_step(self._committed)

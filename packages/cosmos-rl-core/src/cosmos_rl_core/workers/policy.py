"""The policy role of a worker: trainer, batches, weight publisher and checkpoints around the training loop.

All ranks of a replica run the same code, each with its share of every batch; rank 0 sends to the controller.
"""

from __future__ import annotations

import asyncio
from functools import cache, partial

from cosmos_rl_core import assemble
from cosmos_rl_core.checkpoint import restore
from cosmos_rl_core.checkpoint.manifest import Origin, TrainState
from cosmos_rl_core.checkpoint.resume import checkpoint_root, recipe_of
from cosmos_rl_core.checkpoint.retention import read_scores
from cosmos_rl_core.checkpoint.saver import CheckpointSaver
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.gpu_turn import RankTurn
from cosmos_rl_core.interfaces import HoldsTensors, Reference, Teacher
from cosmos_rl_core.loop import Steps, train
from cosmos_rl_core.monitor.monitor import read_healthy
from cosmos_rl_core.observe.startup import RESTORING, phase
from cosmos_rl_core.parallel.device import use_deterministic_kernels
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_core.rollout.spool.reader import SpoolReader
from cosmos_rl_core.train.learner import PolicyLearner
from cosmos_rl_core.train.profile import ProfileWindow
from cosmos_rl_core.train.replicas import RankWaits
from cosmos_rl_core.train.residence import Residence, TurnResidence
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.types import TrainBatch
from cosmos_rl_core.weight_sync import WeightPublisher
from cosmos_rl_core.wire.channel import ConnectionClosed
from cosmos_rl_core.workers.batch import BatchMaker, StepPayloads, batch_share, rollout_files
from cosmos_rl_core.workers.context import Assignment
from cosmos_rl_core.workers.failure import RefusedByController
from cosmos_rl_core.workers.mesh import PolicyMesh
from cosmos_rl_core.workers.steps import ControllerLink, PolicySteps, ProfiledSteps, ValidatedSteps

FIRST = "policy-0"


class PolicyRole:
    """Implements `workers.main.Role`."""

    def __init__(self, assignment: Assignment, link: ControllerLink) -> None:
        self._at = assignment
        self._link = link
        self._trainer: Trainer | None = None
        self._waiting = RankWaits()
        self._residence = self._build_residence()
        self._waits = 0
        """Heartbeats while it waited for the controller."""

    def pulse(self) -> p.Heartbeat:
        self._waits += self._link.is_waiting or self._residence.is_waiting
        progress, version = (self._trainer.progress, self._trainer.version) if self._trainer else (0, -1)
        waited_s, running_s = self._at.context.timeline.waited()
        return p.Heartbeat(
            progress=progress + self._waiting.completed + self._waits,
            waited_s=waited_s,
            running_s=running_s,
            version=version,
            waits_for_peers=self._waiting.is_now,
        )

    async def run(self) -> None:
        at, loop = self._at, asyncio.get_running_loop()
        _check_directory(at)
        _check_ranks(at)
        await self._residence.begin()
        mesh, trainer, (reference, teacher), state = await loop.run_in_executor(at.compute, self._build)
        self._trainer = trainer
        self._residence.keep(trainer, reference, teacher)
        await self._residence.end()
        saver = await loop.run_in_executor(at.compute, self._saver, trainer, mesh, state, loop)
        publisher = await self._publisher(trainer)
        replicas = await loop.run_in_executor(at.compute, self._replicas, trainer, mesh, (reference, teacher))
        if at.config.monitor.rolls_back and not at.resume_from:  # step 0 may be the last healthy step
            await loop.run_in_executor(at.compute, partial(saver.after_step, state, leads=replicas.leads))
        learner = PolicyLearner(
            trainer,
            publisher=publisher,
            reference=reference,
            teacher=teacher,
            compute=at.compute,
            timeline=at.context.timeline,
            max_skipped_steps=at.config.policy.max_skipped_steps,
            keeps_old=at.config.algorithm.old_logprobs == "policy",
            residence=self._residence,
        )
        learner.withholds = True  # until it has joined a mesh
        steps = self._steps(learner, saver, mesh, replicas)
        address = publisher.address if publisher else ""
        await self._link.send(p.Ready(address=address, version=trainer.version, gpu=self._at.own_gpu()))
        at.context.log(f"ready at version {trainer.version}")
        together = mesh is None
        """Whether all ranks reached this point, so that they can save; after an error some may not have."""
        saves: bool | None = None
        """Whether it leaves others, and must save before."""
        try:
            await train(steps, learner)
            together = True
            if replicas.count > 1:
                saves = await self._link.leave()
        except ConnectionClosed:  # by the controller, at a commit: all ranks get here
            together = True
            raise
        finally:
            finish = partial(saver.finish, leads=replicas.leads if saves is None else saves)
            folder = await learner.in_compute_thread(finish) if together else None
            if publisher is not None:
                await publisher.close()
            self._residence.close()
        at.context.log(f"left at version {trainer.version}")
        if folder is not None:
            await self._link.send(p.CheckpointDone(step=trainer.version, path=str(folder), lineage=at.lineage))

    def _build_residence(self) -> Residence:
        at = self._at
        if not at.config.run.colocate:
            return Residence()
        rank = 0 if at.context.ranks is None else at.context.ranks.rank
        return TurnResidence(RankTurn(at.run_dir, rank), compute=at.compute, timeline=at.context.timeline)

    def _build(self) -> tuple[ReplicaMesh | None, Trainer, tuple[Reference | None, Teacher | None], TrainState]:
        at = self._at
        at.prepare_torch()
        if at.config.run.deterministic:
            use_deterministic_kernels()
        with at.building():
            mesh = assemble.build_mesh(at.config)
            trainer = assemble.build_trainer(at.config, at.domain, mesh)
            reference = assemble.build_reference(at.config, at.domain, trainer, mesh)
            frozen = reference, assemble.build_teacher(at.config, at.domain, trainer, mesh)
            if not at.resume_from:
                return mesh, trainer, frozen, TrainState(step=0)
            phase(RESTORING)
            rank = 0 if mesh is None else mesh.rank
            state = restore.load(at.resume_from, policy=trainer.policy, optimizer=trainer.optimizer, rank=rank)
            trainer.version = state.step
            return mesh, trainer, frozen, state

    def _saver(
        self, trainer: Trainer, mesh: ReplicaMesh | None, state: TrainState, loop: asyncio.AbstractEventLoop
    ) -> CheckpointSaver:
        """Build the saver, in all ranks at the same time. Its callbacks run in its own thread and post to the loop."""
        at, link = self._at, self._link
        section = at.config.checkpoint
        ranks = RankGroup() if mesh is None else RankGroup.of_all()
        layout = "one rank" if mesh is None else mesh.dims.describe()
        return CheckpointSaver(
            section,
            root=checkpoint_root(at.config, at.run_dir),
            trainer=trainer,
            state=state,
            ranks=ranks,
            origin=Origin(num_ranks=ranks.size, layout=layout, recipe=recipe_of(at.config)),
            resumed_from=at.resume_from,
            scores=partial(read_scores, at.run_dir, section.best_metric),
            healthy=partial(read_healthy, at.run_dir) if at.config.monitor.rolls_back else lambda: None,
            readable=self._residence.readable,
            timeline=at.context.timeline,
            on_saved=partial(_saved, at, loop, link),
            on_failed=partial(_failed, at, loop, link),
        )

    def _replicas(
        self, trainer: Trainer, mesh: ReplicaMesh | None, frozen: tuple[Reference | None, Teacher | None]
    ) -> PolicyMesh:
        at = self._at
        models = dict(zip(("policy", "reference", "teacher"), (trainer.policy, *frozen)))
        is_first = at.config.policy.replicas == 1 or at.context.replica == FIRST
        return PolicyMesh(
            at.context,
            controller=at.present_controller,
            trainer=trainer,
            mesh=mesh,
            is_over=self._link.is_over,
            waiting=self._waiting,
            timeout_s=at.config.policy.collective_timeout_s,
            peer_s=at.config.elastic.peer_s / 2,  # the controller waits as long for the sum that a cut has stopped
            leads_first=is_first and trainer.version == at.version,  # a newcomer has no weights to save yet
            models={name: model for name, model in models.items() if isinstance(model, HoldsTensors)},
        )

    def _steps(
        self, learner: PolicyLearner, saver: CheckpointSaver, mesh: ReplicaMesh | None, replicas: PolicyMesh
    ) -> Steps:
        """Build the controller's side of the loop; a supervised replica also measures its loss on held-out rows."""
        at, link = self._at, self._link
        policy, share = learner.trainer.policy, batch_share(at.config, mesh)
        payloads_of, files = self._payloads(), rollout_files(at)
        warn = partial(_warn, asyncio.get_running_loop(), link)
        compare = assemble.build_comparison(
            at.config, at.domain, policy, share=share, mesh=mesh, log=at.context.log, warn=warn
        )

        @cache
        def maker(place: int, count: int) -> BatchMaker:
            own, writes = share.of_replica(place, count), place == 0 and at.context.leads
            return BatchMaker(at, policy, share=own, of_replica=share, files=files, writes=writes, compare=compare)

        async def join(message: p.Remesh) -> int:
            try:
                behind = await learner.in_compute_thread(partial(replicas.join, message))
            except RefusedByController as error:
                await link.send(p.Alarm(message=f"it {error}"))
                raise
            learner.replicas = replicas.group
            if behind or learner.withholds:
                learner.withholds = False
                await learner.publish()
            return learner.version

        async def batch(message: p.Batch) -> TrainBatch | p.PayloadsUnreadable:
            payloads = await payloads_of(message)
            if isinstance(payloads, p.PayloadsUnreadable):
                return payloads
            await self._residence.begin()
            make_batch = maker(replicas.place, replicas.count)
            return await learner.in_compute_thread(partial(make_batch, message, payloads, replicas.group))

        async def checkpoint(committed: p.Committed) -> None:
            save = partial(saver.after_step, _state_after(committed), leads=replicas.leads, now=committed.save)
            await learner.in_compute_thread(save)

        steps = PolicySteps(
            link,
            mesh=join,
            batch=batch,
            written=files.written,
            checkpoint=checkpoint,
            idle=self._residence.end,
            timeline=at.context.timeline,
        )
        validation = assemble.build_validation(at.config, at.domain, policy, share=share, mesh=mesh)
        if validation is None:
            return self._profiled(steps, learner)
        return ValidatedSteps(
            self._profiled(steps, learner),
            due=partial(at.config.eval.due, last=at.last_step),
            measure=lambda: learner.in_compute_thread(validation.measure),
            report=lambda version, metrics: link.send(p.Validated(version=version, metrics=dict(metrics))),
        )

    def _profiled(self, steps: Steps, learner: PolicyLearner) -> Steps:
        """Record the window of [logging.profile], if this rank does."""
        context, section = self._at.context, self._at.config.logging.profile
        rank = 0 if context.ranks is None else context.ranks.rank
        if not section.steps or rank not in section.ranks:
            return steps
        window = ProfileWindow(
            self._at.run_dir / "profile" / f"{context.name}.json.gz",
            log=context.log,
            **section.model_dump(exclude={"ranks"}),
        )
        in_compute_thread = learner.in_compute_thread
        return ProfiledSteps(
            steps,
            advance=lambda: in_compute_thread(window.advance),
            stop=lambda: in_compute_thread(window.stop),
        )

    def _payloads(self) -> StepPayloads:
        context, spool = self._at.context, self._at.config.rollout.spool
        reader = SpoolReader(token=context.token, name=context.name, timeout_s=spool.timeout_s, tls=self._at.data_tls)
        return StepPayloads(reader, context.ranks)

    async def _publisher(self, trainer: Trainer) -> WeightPublisher | None:
        at = self._at
        config, ranks = at.config, at.context.ranks
        if config.is_sft:
            return None
        return await asyncio.to_thread(
            assemble.build_sync(config).publisher,
            self._residence.readable(trainer.policy.rollout_weights()),
            settings=assemble.sync_settings(config, token=at.context.token, tls=at.data_tls),
            bind=at.context.address or config.run.bind,
            ranks=None if ranks is None else ranks.messages,
        )


def _check_ranks(at: Assignment) -> None:
    """Raise UserError for another number of ranks than the recipe's: such a replica cannot join a mesh of others."""
    section, ranks = at.config.policy, at.context.ranks
    expected = ParallelDims.of(section.parallel, world_size=section.world_size).world_size
    if (actual := 1 if ranks is None else ranks.messages.size) != expected:
        nodes = f"--num-nodes {section.num_nodes} " if section.num_nodes > 1 else ""
        raise UserError(
            f"this policy has {actual} ranks, and that of the recipe {expected}: start it with {nodes}--ranks-per-node "
            f"{expected // section.num_nodes}"
        )


def _check_directory(at: Assignment) -> None:
    """Raise UserError if checkpoints or the monitor's files would be on this machine only."""
    config = at.config
    if at.shares_run_dir or (config.checkpoint.path and not config.monitor.rolls_back):
        return
    use = "rollbacks of [monitor]" if config.monitor.rolls_back else "checkpoints"
    instead = "" if config.monitor.rolls_back else ", or set [checkpoint] path to a place that all machines see"
    raise UserError(
        f"{use} need the run's directory {config.run.output_dir}, which the machine of {at.context.name} does not "
        f"share: mount it there at the same path{instead}"
    )


def _state_after(committed: p.Committed) -> TrainState:
    return TrainState(step=committed.step + 1, next_sample=committed.next_sample, unfinished=committed.unfinished)


def _saved(at: Assignment, loop: asyncio.AbstractEventLoop, link: ControllerLink, step: int, path: str) -> None:
    at.context.log(f"saved step {step} in {path}")
    _post(loop, link, p.CheckpointDone(step=step, path=path, lineage=at.lineage))


def _failed(at: Assignment, loop: asyncio.AbstractEventLoop, link: ControllerLink, text: str) -> None:
    at.context.log(text)
    _post(loop, link, p.Alarm(message=text))


def _warn(loop: asyncio.AbstractEventLoop, link: ControllerLink, text: str) -> None:
    _post(loop, link, p.Alarm(message=text))


def _post(loop: asyncio.AbstractEventLoop, link: ControllerLink, message: p.ToController) -> None:
    """Send a message from another thread."""
    loop.call_soon_threadsafe(link.post, message)

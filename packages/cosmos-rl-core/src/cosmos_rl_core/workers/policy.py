"""The policy role of a worker: trainer, batches, weight publisher and checkpoints around the training loop.

All ranks of a replica run the same code, each with its share of every batch; rank 0 sends to the controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from cosmos_rl_core import assemble
from cosmos_rl_core.checkpoint import restore
from cosmos_rl_core.checkpoint.manifest import Origin, TrainState
from cosmos_rl_core.checkpoint.resume import checkpoint_root, recipe_of
from cosmos_rl_core.checkpoint.retention import read_scores
from cosmos_rl_core.checkpoint.saver import CheckpointSaver, SavingRun
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.gpu_time import RankGpuTime
from cosmos_rl_core.loop import train
from cosmos_rl_core.monitor.monitor import read_healthy
from cosmos_rl_core.observe.startup import RESTORING, phase
from cosmos_rl_core.parallel.device import use_deterministic_kernels
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_core.storage.weights_digest import base_digests
from cosmos_rl_core.train.learner import FrozenModels, PolicyLearner
from cosmos_rl_core.train.replicas import RankWaits, WaitLimits
from cosmos_rl_core.train.residence import ColocatedResidence, Residence
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.weight_sync import WeightPublisher
from cosmos_rl_core.wire.channel import ConnectionClosed
from cosmos_rl_core.workers.context import Assignment
from cosmos_rl_core.workers.mesh import PolicyMesh
from cosmos_rl_core.workers.steps import PolicyLink, PolicyReplica, PolicySteps

FIRST = "policy-0"


class PolicyRole:
    """The policy: builds its parts and trains until the run is over."""

    def __init__(self, assignment: Assignment, link: PolicyLink) -> None:
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
        mesh, trainer, frozen, state = await loop.run_in_executor(at.compute, self._build)
        self._trainer = trainer
        self._residence.keep(trainer, frozen.reference, frozen.teacher)
        await self._residence.end()
        saver = await loop.run_in_executor(at.compute, self._saver, trainer, mesh, state)
        publisher = await self._publisher(trainer)
        replicas = await loop.run_in_executor(at.compute, self._replicas, trainer, frozen)
        if at.config.monitor.rolls_back and not at.welcome.resume_from:  # step 0 may be the last healthy step
            await loop.run_in_executor(at.compute, partial(saver.after_step, state, leads=replicas.leads))
        learner = PolicyLearner(
            trainer,
            publisher=publisher,
            frozen=frozen,
            compute=at.compute,
            timeline=at.context.timeline,
            max_skipped_steps=at.config.policy.max_skipped_steps,
            keeps_old=at.config.algorithm.old_logprobs == "policy",
            residence=self._residence,
        )
        learner.withholds = True  # until it has joined a mesh
        replica = PolicyReplica(
            at,
            self._link,
            learner=learner,
            saver=saver,
            mesh=mesh,
            replicas=replicas,
            residence=self._residence,
        )
        steps = PolicySteps(self._link, replica, at.context.timeline)
        address = publisher.address if publisher else ""
        await self._link.send(p.Ready(address=address, version=trainer.version, gpu=at.own_gpu()))
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
            replicas.leave()
            if publisher is not None:
                await publisher.close()
            self._residence.close()
        at.context.log(f"left at version {trainer.version}")
        if folder is not None:
            await self._link.send(p.CheckpointDone(step=trainer.version, path=str(folder), lineage=at.welcome.lineage))

    def _build_residence(self) -> Residence:
        at = self._at
        if not at.config.run.colocate:
            return Residence()
        rank = 0 if at.context.ranks is None else at.context.ranks.rank
        return ColocatedResidence(RankGpuTime(at.run_dir, rank), compute=at.compute, timeline=at.context.timeline)

    def _build(self) -> tuple[ReplicaMesh | None, Trainer, FrozenModels, TrainState]:
        at = self._at
        at.prepare_torch()
        if at.config.run.deterministic:
            use_deterministic_kernels()
        with at.building():
            mesh = assemble.build_mesh(at.config)
            trainer = assemble.build_trainer(at.config, at.domain, mesh)
            reference = assemble.build_reference(at.config, at.domain, trainer, mesh)
            frozen = FrozenModels(
                reference=reference,
                teacher=assemble.build_teacher(at.config, at.domain, trainer, mesh),
                sums=assemble.build_answer_sums(at.config, trainer.policy, reference, mesh),
            )
            if not at.welcome.resume_from:
                return mesh, trainer, frozen, TrainState(step=0)
            phase(RESTORING)
            rank = 0 if mesh is None else mesh.rank
            state = restore.load(at.welcome.resume_from, policy=trainer.policy, optimizer=trainer.optimizer, rank=rank)
            trainer.version = state.step
            if len(state.objective) == len(trainer.objective.state):  # else the recipe has switched it on or off since
                trainer.objective.state = state.objective
            return mesh, trainer, frozen, state

    def _saver(self, trainer: Trainer, mesh: ReplicaMesh | None, state: TrainState) -> CheckpointSaver:
        """Build the saver, in all ranks at the same time. It calls its run in its own thread."""
        at = self._at
        ranks = RankGroup() if mesh is None else RankGroup.of_all()
        layout = "one rank" if mesh is None else mesh.dims.describe()
        recipe = recipe_of(at.config)
        base = base_digests(recipe) if ranks.leads else {}
        return CheckpointSaver(
            at.config.checkpoint,
            root=checkpoint_root(at.config, at.run_dir),
            trainer=trainer,
            state=state,
            ranks=ranks,
            origin=Origin(num_ranks=ranks.size, layout=layout, recipe=recipe, base=base),
            resumed_from=at.welcome.resume_from,
            run=_SavingReplica(at, self._residence, self._link),
        )

    def _replicas(self, trainer: Trainer, frozen: FrozenModels) -> PolicyMesh:
        at = self._at
        models = {"policy": trainer.policy, "reference": frozen.reference, "teacher": frozen.teacher}
        is_first = at.config.policy.replicas == 1 or at.context.replica == FIRST
        return PolicyMesh(
            at.context,
            controller=at.present_controller,
            trainer=trainer,
            is_over=self._link.is_over,
            limits=WaitLimits(
                timeout_s=at.config.policy.collective_timeout_s,
                peer_s=at.config.elastic.peer_s / 2,  # the controller waits as long for the sum that a cut has stopped
            ),
            waiting=self._waiting,
            leads_first=is_first and trainer.version == at.welcome.version,  # a newcomer has no weights to save yet
            models={name: model for name, model in models.items() if model is not None},
        )

    async def _publisher(self, trainer: Trainer) -> WeightPublisher | None:
        at = self._at
        config, ranks = at.config, at.context.ranks
        if config.is_sft:
            return None
        return await asyncio.to_thread(
            assemble.build_sync(config).publisher,
            self._residence.readable(trainer.policy.rollout_weights()),
            settings=config.sync,
            token=at.context.token,
            tls=at.data_tls,
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


class _SavingReplica(SavingRun):
    """A policy replica whose saver reports to the controller."""

    def __init__(self, at: Assignment, residence: Residence, link: PolicyLink) -> None:
        super().__init__(at.context.timeline)
        self._at, self._residence, self._link = at, residence, link

    def scores(self) -> Mapping[int, float]:
        return read_scores(self._at.run_dir, self._at.config.checkpoint.best_metric)

    def healthy(self) -> int | None:
        return read_healthy(self._at.run_dir) if self._at.config.monitor.rolls_back else None

    def saved(self, step: int, folder: str) -> None:
        self._at.context.log(f"saved step {step} in {folder}")
        self._link.post_from_thread(p.CheckpointDone(step=step, path=folder, lineage=self._at.welcome.lineage))

    def failed(self, text: str) -> None:
        self._at.context.log(text)
        self._link.post_from_thread(p.Alarm(message=text))

    def readable(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._residence.readable(tensors)

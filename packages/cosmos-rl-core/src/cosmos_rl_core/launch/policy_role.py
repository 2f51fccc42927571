"""A policy replica as a role: trainer, batches, publisher and checkpoints around the loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cosmos_rl_core import assemble
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.client import RemoteSteps, decode_groups
from cosmos_rl_core.interfaces import Policy, WeightPublisher
from cosmos_rl_core.launch.assignment import Assignment
from cosmos_rl_core.loop import train
from cosmos_rl_core.observe.rollouts import write_rollouts
from cosmos_rl_core.train import checkpoint
from cosmos_rl_core.train.batcher import Batcher
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.train.worker import PolicyLearner
from cosmos_rl_core.types import Share, TrainBatch

WORK = ("forward_backward", "optim_step")
"""Spans of the timeline that count as work."""


class PolicyRole:
    """Implements `launch.roles.Role`."""

    def __init__(self, assignment: Assignment) -> None:
        self._at = assignment
        self._trainer: Trainer | None = None

    def pulse(self) -> p.Heartbeat:
        progress = self._trainer.progress if self._trainer else 0
        return p.Heartbeat(progress=progress, busy_s=self._at.context.timeline.total(*WORK), holding=[])

    async def run(self) -> None:
        at = self._at
        loop = asyncio.get_running_loop()
        trainer, reference, state = await loop.run_in_executor(at.compute, self._build)
        self._trainer = trainer
        publisher = await self._publisher(trainer)
        saver = CheckpointSaver(at, trainer, state=state)
        learner = PolicyLearner(
            trainer,
            publisher=publisher,
            reference=reference,
            compute=at.compute,
            timeline=at.context.timeline,
            max_skipped_steps=at.config.policy.max_skipped_steps,
        )
        make_batch = BatchMaker(at, trainer.policy)
        steps = RemoteSteps(
            at.client,
            batch=lambda message: learner.in_compute_thread(partial(make_batch, message)),
            checkpoint=lambda committed: learner.in_compute_thread(partial(saver.after_step, committed)),
        )
        await at.client.connection.send(
            p.Ready(address=publisher.address if publisher else "", version=trainer.version)
        )
        try:
            await train(steps, learner)
        finally:
            path = await learner.in_compute_thread(saver.save)
            if publisher is not None:
                await publisher.close()
        if path is not None:
            await at.client.connection.send(p.CheckpointDone(step=trainer.version, path=str(path)))

    def _build(self) -> tuple[Trainer, Policy | None, checkpoint.TrainState]:
        at = self._at
        at.prepare_torch()
        with at.context.timeline.span("build"):
            trainer = assemble.build_trainer(at.config, at.domain)
            reference = assemble.build_reference(at.config, at.domain, trainer)
            if at.resume_from is None:
                return trainer, reference, checkpoint.TrainState(step=0)
            state = checkpoint.load(at.resume_from, policy=trainer.policy, optimizer=trainer.optimizer)
            trainer.version = state.step
            return trainer, reference, state

    async def _publisher(self, trainer: Trainer) -> WeightPublisher | None:
        config = self._at.config
        if config.is_sft:
            return None
        return await asyncio.to_thread(
            assemble.build_sync(config).publisher,
            trainer.policy.weights(),
            token=self._at.context.token,
            transport=config.sync.transport,
            dtype=config.sync.dtype,
            bucket_bytes=config.sync.bucket_bytes,
            timeout_s=config.sync.timeout_s,
            bind="127.0.0.1",
        )


class BatchMaker:
    """A Batch message -> what the trainer takes; writes the step's rollouts on the way."""

    def __init__(self, assignment: Assignment, policy: Policy) -> None:
        self._at = assignment
        self._policy = policy
        config = assignment.config
        self._batcher = Batcher(
            assemble.build_collate(config, assignment.domain, Share()), max_staleness=config.sync.max_staleness
        )

    def __call__(self, message: p.Batch) -> TrainBatch:
        at = self._at
        with at.context.timeline.span("collate", step=message.step):
            if at.config.is_sft:
                return self._supervised([json.loads(row) for row in message.payloads])
            groups = decode_groups(message)
            every = at.config.logging.rollouts_every
            if every and message.step % every == 0:
                write_rollouts(at.run_dir / "rollouts", step=message.step, groups=groups)
            return self._batcher(groups, step=message.step)

    def _supervised(self, rows: list[Mapping[str, Any]]) -> TrainBatch:
        terms = self._at.config.policy.microbatch_terms
        batch = self._at.domain.collate_sft(rows, policy=self._policy, microbatch_terms=terms, share=Share())
        return replace(batch, metrics={**batch.metrics, "terms": float(batch.num_terms)})


class CheckpointSaver:
    """Saves when a step is due, and at the end."""

    def __init__(self, assignment: Assignment, trainer: Trainer, *, state: checkpoint.TrainState) -> None:
        self._section = assignment.config.checkpoint
        self._root = assignment.run_dir / "checkpoints"
        self._trainer = trainer
        self._state = state

    def after_step(self, committed: p.Committed) -> Path | None:
        version = committed.step + 1
        self._state = checkpoint.TrainState(
            step=version, next_sample=committed.next_sample, unfinished=tuple(committed.unfinished)
        )
        due = self._section.every_steps and version % self._section.every_steps == 0
        return self.save() if due else None

    def save(self) -> Path | None:
        """Save the last whole step; None in the middle of one, where weights and stream position do not agree."""
        if self._trainer.version != self._state.step:
            return None
        return checkpoint.save(
            self._root,
            state=self._state,
            policy=self._trainer.policy,
            optimizer=self._trainer.optimizer,
            keep=self._section.keep,
        )

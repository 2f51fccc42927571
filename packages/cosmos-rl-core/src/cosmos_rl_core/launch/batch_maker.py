"""A step's Batch message and its payloads -> this rank's share of it, as the trainer takes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from cosmos_rl_core import assemble
from cosmos_rl_core.algorithms.advantages import build_batch_advantage
from cosmos_rl_core.algorithms.episodes import build_step_advantages
from cosmos_rl_core.config.run import RunConfig
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.payload import decode_group
from cosmos_rl_core.interfaces import Policy
from cosmos_rl_core.launch.assignment import Assignment
from cosmos_rl_core.launch.step_payloads import Payloads
from cosmos_rl_core.observe.dropped_rows import write_dropped
from cosmos_rl_core.observe.rollouts import write_rollouts
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.stages import microbatch_multiple
from cosmos_rl_core.train.batcher import Batcher
from cosmos_rl_core.types import Prompt, RolloutGroup, Share, TrainBatch


def batch_share(config: RunConfig, mesh: ReplicaMesh | None) -> Share:
    """The part of each batch that this rank trains on."""
    if mesh is None:
        return Share()
    return replace(mesh.share, multiple=microbatch_multiple(config.policy.parallel))


class BatchMaker:
    """A Batch message -> what the trainer takes; writes the step's rollouts on the way."""

    def __init__(self, assignment: Assignment, policy: Policy, *, share: Share) -> None:
        self._at = assignment
        config = assignment.config
        self._collate_sft = assemble.build_collate_sft(config, assignment.domain, policy, share)
        self._batcher = Batcher(
            assemble.build_collate(config, assignment.domain, share),
            max_staleness=config.sync.max_staleness,
            batch_advantage=build_batch_advantage(config.algorithm),
            of_steps=build_step_advantages(config.algorithm),
            anchor=assemble.build_anchor(config, assignment.domain, policy, share),
            minibatches=config.policy.minibatches,
            epochs=config.policy.epochs,
            seed=config.run.seed,
            on_groups=self._write_rollouts,
        )

    def __call__(self, message: p.Batch, payloads: Payloads) -> TrainBatch:
        at = self._at
        with at.context.timeline.span("collate", step=message.step):
            batch = self._supervised(message, payloads) if at.config.is_sft else self._of_groups(message, payloads)
        reasons = (*batch.rows_dropped, *(() if batch.anchor is None else batch.anchor.rows_dropped))
        if reasons and at.context.leads:
            write_dropped(at.run_dir, step=message.step, reasons=reasons)
        return batch

    def _of_groups(self, message: p.Batch, payloads: Payloads) -> TrainBatch:
        groups = [decode_group(encoded) for encoded in payloads.encoded]
        batch = self._batcher(groups, step=message.step)
        return replace(batch, metrics={**batch.metrics, **payloads.metrics})

    def _write_rollouts(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """With the advantages that the step trains on, which may follow from all of its groups."""
        at = self._at
        every = at.config.logging.rollouts_every
        if every and step % every == 0 and at.context.leads:
            write_rollouts(at.run_dir / "rollouts", step=step, groups=groups)

    def _supervised(self, message: p.Batch, payloads: Payloads) -> TrainBatch:
        rows = zip(message.samples, map(json.loads, map(bytes, payloads.encoded)), strict=True)
        batch = self._collate_sft([Prompt(sample_id=sample, row=row) for sample, row in rows])
        return replace(batch, metrics={**batch.metrics, "terms": float(batch.num_terms)})

"""A policy replica's learner: the trainer, its frozen models and the publisher behind awaitable verbs.

All tensor work runs in one dedicated thread (an OpenMP team belongs to the thread that made it), so that the event
loop stays responsive to heartbeats, weight readers and Ctrl-C.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.interfaces import Reference, Teacher
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.parallel.device import to_host
from cosmos_rl_core.parallel.metrics import sum_over_terms
from cosmos_rl_core.train.answer_sums import AnswerSumsStage
from cosmos_rl_core.train.replicas import ReplicaGroup
from cosmos_rl_core.train.residence import Residence
from cosmos_rl_core.train.trainer import Trainer
from cosmos_rl_core.types import Microbatch, StepResult, TrainBatch, TrainStep
from cosmos_rl_core.weight_sync import WeightPublisher

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenModels:
    """The models whose outputs a step needs and does not change."""

    reference: Reference | None = None
    teacher: Teacher | None = None
    sums: AnswerSumsStage | None = None
    """Where whole answers of rows are compared: the reference's part of the batch, in place of its terms."""

    @torch.no_grad()
    def complete(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """Add their outputs to microbatches."""
        if self.reference is not None and self.sums is None:
            with self.reference.prepared():
                microbatches = [self._with_reference(self.reference, microbatch) for microbatch in microbatches]
        if self.teacher is not None:
            microbatches = [_with(each, teacher=self.teacher.forward(each)) for each in microbatches]
        return microbatches

    def _with_reference(self, reference: Reference, microbatch: Microbatch) -> Microbatch:
        outputs = reference.forward(microbatch)
        tensors = to_host(outputs.tensors)  # of every microbatch of the step: on a GPU they would grow with the step
        return _with(microbatch, ref_logprobs=outputs.logprobs, ref_tensors=tensors)


def _with(microbatch: Microbatch, **terms: Any) -> Microbatch:
    """Return a microbatch with these fields of its terms."""
    return replace(microbatch, terms=replace(microbatch.terms, **terms))


class PolicyLearner:
    """The verbs of `loop.train`, in one rank."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        publisher: WeightPublisher | None,
        frozen: FrozenModels,
        compute: ThreadPoolExecutor,
        timeline: Timeline,
        max_skipped_steps: int,
        keeps_old: bool = False,
        residence: Residence | None = None,
    ) -> None:
        """compute: the thread of all tensor work. keeps_old: give the updates of a step, where there are several, the
        policy's log-probabilities from its start. residence: of the policy's tensors, which are off their device after
        `publish`.
        """
        self.trainer = trainer
        self._publisher = publisher
        self._frozen = frozen
        self._compute = compute
        self._timeline = timeline
        self._max_skipped_steps = max_skipped_steps
        self._keeps_old = keeps_old
        self._residence = residence or Residence()
        self.replicas: ReplicaGroup | None = None
        """The policy replicas that train together with this one; None if it trains alone."""
        self.withholds = False
        """Whether nothing is published yet: the weights may still be replaced by those of another replica."""
        self._step: TrainStep | None = None
        """The step that is computed."""
        self._later: tuple[TrainBatch, ...] = ()
        """Its updates that follow its commit."""
        self._results: list[StepResult] = []
        """Of the updates that were taken before the commit."""
        self._undo: Undo | None = None
        """The state before those."""
        self._skipped = 0
        self._fenced: Mapping[str, float] = {}
        """Metrics of the last fence."""

    @property
    def version(self) -> int:
        return self.trainer.version

    @property
    def sums(self) -> AnswerSumsStage | None:
        """The reference's part of batches of preferences."""
        return self._frozen.sums

    async def forward_backward(self, step: TrainStep) -> None:
        """Compute the gradients of the step. Raises EpochOver."""
        if self._skipped > self._max_skipped_steps:
            raise UserError(
                f"the gradient was not finite in {self._skipped} steps in a row, the last at step {self.version - 1}; "
                "the weights are those of the last good step. Lower [policy.optimizer] learning_rate, or check the "
                "model's samples in rollouts/."
            )
        if len(step.updates) > 1 and self.replicas is not None:
            await self._fence()
        await self.in_compute_thread(partial(self._forward_backward, step))

    async def sum_gradients(self) -> None:
        """Sum the gradients over the policy replicas. Raises EpochOver."""
        if self.replicas is not None:
            with self._timeline.span("sum_gradients", step=self.version):
                await self.in_compute_thread(partial(self.trainer.sum_over, self.replicas))

    async def undo(self) -> None:
        """Restore the weights of the step's start, and forget its gradients."""
        self._later, self._results = (), []
        if self._undo is not None:
            await self.in_compute_thread(self._undo)
            self._undo = None

    async def optim_step(self) -> StepResult:
        """Update the weights."""
        if self._undo is None:
            await self._fence()
        with self._timeline.span("optim_step", step=self.version):
            result = await self.in_compute_thread(self._updates)
        self._skipped = self._skipped + 1 if result.skipped else 0
        return result

    async def _fence(self) -> None:
        if self._publisher is not None:
            with self._timeline.span("fence", step=self.version):
                self._fenced = await self._publisher.fence()

    async def publish(self) -> Mapping[str, float]:
        """Offer the weights to the rollout replicas, and return the metrics of that."""
        publishes = self._publisher is not None and not self.withholds
        if publishes and self._residence.is_on_device:  # what has changed since the last time was here meanwhile
            await self.in_compute_thread(self.trainer.policy.before_publish)
        await self._residence.end()
        if self._publisher is None or self.withholds:
            return {}
        with self._timeline.span("publish", step=self.version):
            weights, ready = await self.in_compute_thread(self._weights)
            published = await self._publisher.publish(self.version, weights, ready=ready)
        stall = self._fenced.get("sync_stall_s", 0.0)
        return {**self._fenced, **published, "sync_s": published.get("sync_s", 0.0) + stall}

    async def in_compute_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)

    def _weights(self) -> tuple[Mapping[str, Tensor], torch.cuda.Event | None]:
        """The rollouts' weights, with an event after the GPU's work on them so far, the last step included."""
        weights = self._residence.readable(self.trainer.policy.rollout_weights())
        if not any(weight.is_cuda for weight in weights.values()):
            return weights, None
        ready = torch.cuda.Event()
        ready.record()
        return weights, ready

    def _forward_backward(self, step: TrainStep) -> None:
        with self._timeline.span("forward_backward", step=self.version):
            self._step = step
            keeps_old = self._keeps_old and len(step.updates) > 1
            batches = [self._with_logprobs(batch, keeps_old=keeps_old) for batch in step.batches]
            if (share := self.trainer.objective.top_entropy) is not None:
                batches = self._with_high_entropy(batches, share)
            first, *later = [batches[number] for number in step.updates]
            self._gradients_of(first)
            if later and self.replicas is not None:
                later = self._update_together(later, self.replicas)
            self._later = tuple(later)

    def _update_together(self, later: Sequence[TrainBatch], replicas: ReplicaGroup) -> list[TrainBatch]:
        """Take all updates of the step but the last with the other replicas; they are undone if one is lost.

        After the commit the step cannot be redone, and a replica that is lost then would leave the others with weights
        that differ. So everything that needs the others comes before the commit, the last sum included.
        """
        self._undo = Undo(self.trainer.optimizer)
        for batch in later:
            self.trainer.sum_over(replicas)
            self._results.append(self.trainer.optim_step(last=False))
            self._gradients_of(batch)
        return []

    def _gradients_of(self, batch: TrainBatch) -> None:
        self.trainer.begin(batch)
        self.trainer.forward_backward(batch.microbatches)
        assert self._step is not None
        if self._step.data_term is not None:
            self.trainer.forward_backward_data_term(self._step.data_term)

    def _updates(self) -> StepResult:
        """Take the step: apply the update whose gradients are computed, then compute and apply the later ones."""
        # With other replicas `_later` is empty here: `_update_together` has taken all updates but this one.
        results = [*self._results, self.trainer.optim_step(last=not self._later)]
        for left, batch in reversed(list(enumerate(reversed(self._later)))):
            self._gradients_of(batch)
            results.append(self.trainer.optim_step(last=left == 0))
        self._later, self._results, self._undo = (), [], None
        assert self._step is not None
        result = _as_one(results, of_step=self._step.metrics)
        if not result.skipped and any(batch.num_terms for batch in self._step.batches):
            self.trainer.objective.stepped(result.metrics)
        return result

    @torch.no_grad()
    def _with_logprobs(self, batch: TrainBatch, *, keeps_old: bool) -> TrainBatch:
        """Add the outputs of the frozen models, and with `keeps_old` the policy's log-probabilities as it is now."""
        if self._frozen.sums is not None:
            batch = self._frozen.sums.complete(batch, self.replicas)
        microbatches = self._frozen.complete(batch.microbatches)
        if keeps_old:
            old = [self.trainer.policy.forward(microbatch).logprobs for microbatch in microbatches]
            microbatches = [_with(each, old_logprobs=logprobs) for each, logprobs in zip(microbatches, old)]
        return replace(batch, microbatches=tuple(microbatches))

    @torch.no_grad()
    def _with_high_entropy(self, batches: Sequence[TrainBatch], share: float) -> list[TrainBatch]:
        """Mark the `share` of all terms of the step whose entropies are highest. Raises EpochOver."""
        microbatches = [microbatch for batch in batches for microbatch in batch.microbatches]
        entropies = []
        for microbatch in microbatches:
            entropy = self.trainer.policy.forward(microbatch, with_entropy=True).entropy
            assert entropy is not None
            entropies.append(entropy.float().clamp(min=0).cpu())
        trained = [entropy[each.terms.loss_mask.cpu() > 0] for entropy, each in zip(entropies, microbatches)]
        least = smallest_of_share(torch.cat([torch.empty(0), *trained]), share, sum_counts=self._sum_counts)
        marked = iter([(entropy >= least).float() for entropy in entropies])
        return [
            replace(batch, microbatches=tuple(_with(each, high_entropy=next(marked)) for each in batch.microbatches))
            for batch in batches
        ]

    def _sum_counts(self, counts: Tensor) -> Tensor:
        """Sum counts over the ranks with different terms, and over the replicas. Raises EpochOver."""
        if self.trainer.mesh is not None:
            counts = sum_over_terms(counts, self.trainer.mesh)
        if self.replicas is not None:
            gathered = self.replicas.gather(counts.numpy().tobytes())
            counts = torch.from_numpy(np.sum([np.frombuffer(each, np.int64) for each in gathered], axis=0))
        return counts


def smallest_of_share(values: Tensor, share: float, *, sum_counts: Callable[[Tensor], Tensor]) -> float:
    """Return the smallest of the largest `share` of all values: those at the quantile 1 - share or above.

    values: [n] float32, at least 0, those of this rank. sum_counts: sums [256] int64 over all ranks.

    Floats of one sign sort as their bits do, so four rounds of 256 counts find the value exactly, a byte each.
    """
    bits = values.view(torch.int32)
    prefix, index = 0, -1
    for shift in (24, 16, 8, 0):
        inside = bits[bits >> (shift + 8) == prefix] if shift < 24 else bits
        counts = sum_counts(torch.bincount((inside >> shift) & 255, minlength=256))
        if index < 0:
            index = max(0, math.ceil((1 - share) * (int(counts.sum()) - 1)))  # among all values, ascending
        below = counts.cumsum(0)
        byte = min(int((below <= index).sum()), 255)  # 255 only without any value
        index -= int(below[byte] - counts[byte])
        prefix = prefix << 8 | byte
    return torch.tensor(prefix & 0x7FFFFFFF, dtype=torch.int32).view(torch.float32).item()


class Undo:
    """A copy of the trained parameters and their optimizer state; calling it restores them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._parameters = {parameter: parameter.detach().clone() for parameter in parameters}
        self._state = {parameter: _copied(optimizer.state[parameter]) for parameter in optimizer.state}

    @torch.no_grad()
    def __call__(self) -> None:
        for parameter, saved in self._parameters.items():
            parameter.copy_(saved)
            self._optimizer.state.pop(parameter, None)
        self._optimizer.state.update(self._state)
        self._optimizer.zero_grad(set_to_none=True)


def _copied(state: Mapping[str, object]) -> dict[str, object]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def _as_one(results: Sequence[StepResult], *, of_step: Mapping[str, float]) -> StepResult:
    """Merge the updates of a step: each of their metrics is the mean over the updates that have it."""
    names = dict.fromkeys(name for result in results for name in result.metrics)
    columns = {name: [r.metrics[name] for r in results if name in r.metrics] for name in names}
    return StepResult(
        policy_version=results[-1].policy_version,
        metrics={**of_step, **{name: fmean(column) for name, column in columns.items()}},
        skipped=any(result.skipped for result in results),
    )

"""The trainer: sums named loss terms, each divided by its own global count. It depends on no algorithm and no domain.

    loss = sum_k coef_k * ( sum_t weight_t * value_k,t ) / normalizer

where t runs over the terms of all microbatches and ranks; weights and normalizer come from the objective's
aggregation, or the loss term's own, so that any split into microbatches gives the same gradient.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from cosmos_rl_core.algorithms.aggregation import aggregated
from cosmos_rl_core.errors import EpochOver
from cosmos_rl_core.interfaces import Objective, Policy
from cosmos_rl_core.parallel.device import to_device
from cosmos_rl_core.parallel.dtensor import local_part
from cosmos_rl_core.parallel.gradients import clip_gradients
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.metrics import sum_metrics
from cosmos_rl_core.train.replicas import ReplicaGroup
from cosmos_rl_core.types import LossTerm, Microbatch, PolicyOutputs, StepResult, TrainBatch


class Trainer:
    """Start a step, accumulate its gradients, update the weights.

    trainer.begin(batch)
    trainer.forward_backward(batch.microbatches)
    trainer.forward_backward_data_term(rows)        # where there are supervised rows beside the rollouts
    result = trainer.optim_step()

    A step of several updates is these three for each, all but the last with `optim_step(last=False)`.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        objective: Objective,
        data_term: Objective | None = None,
        optimizer: torch.optim.Optimizer,
        lr_factor: Callable[[int], float],
        max_grad_norm: float,
        mesh: ReplicaMesh | None = None,
    ) -> None:
        """data_term: the objective of supervised rows beside the rollouts."""
        self.policy = policy
        self.optimizer = optimizer
        self.version = 0
        self.progress = 0
        """Microbatches done since the start, for heartbeats."""
        self.objective = objective
        self._data_term = data_term
        self._lr_factor = lr_factor
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]
        self._max_grad_norm = max_grad_norm
        self.mesh = mesh
        self._batch: TrainBatch | None = None
        self._sums: dict[str, torch.Tensor] = {}

    @property
    def needs_reference(self) -> bool:
        """Whether the objective reads `ref_logprobs`."""
        return self.objective.needs_reference

    def begin(self, batch: TrainBatch) -> None:
        """Start an update: the batch's global counts are the denominators."""
        self._batch = batch
        self._sums = {}
        self.optimizer.zero_grad(set_to_none=True)

    def forward_backward(self, microbatches: Sequence[Microbatch]) -> None:
        """Add the gradients of the batch's microbatches."""
        assert self._batch is not None, "begin(batch) comes first"
        self.policy.forward_backward(microbatches, loss=self._loss, with_entropy=self.objective.needs_entropy)
        self.progress += len(microbatches)  # in every rank of a pipeline, of which the last alone takes the loss

    def forward_backward_data_term(self, batch: TrainBatch) -> None:
        """Add the gradients of supervised data, which has counts of its own."""

        def loss_of(outputs: PolicyOutputs, microbatch: Microbatch) -> Tensor:
            assert self._data_term is not None, "the trainer was built without an objective for supervised data"
            terms = to_device(microbatch.terms, outputs.logprobs.device)
            (loss,), _ = self._data_term(outputs, terms)
            value = aggregated(loss, self._data_term, terms=terms, batch=batch)
            self._add("loss_data_term", value)
            self._add("loss", loss.coef * value)
            return loss.coef * value

        self.policy.forward_backward(batch.microbatches, loss=loss_of, with_entropy=False)
        self.progress += len(batch.microbatches)

    def _loss(self, outputs: PolicyOutputs, microbatch: Microbatch) -> torch.Tensor:
        """The weighted sum of all loss terms over a microbatch; adds to the step's metrics."""
        assert self._batch is not None
        terms = to_device(microbatch.terms, outputs.logprobs.device)
        losses, metrics = self.objective(outputs, terms)
        total = torch.zeros((), device=outputs.logprobs.device)
        for loss in losses:
            value = aggregated(loss, self.objective, terms=terms, batch=self._batch)
            total = total + loss.coef * value
            self._add(f"loss_{loss.name}", value)
        self._add("loss", total)
        mask = terms.loss_mask
        if self.objective.rollout_metrics:
            for name, values in metrics.items():
                of_rollouts = LossTerm(name=name, values=values.detach())
                self._add(name, aggregated(of_rollouts, self.objective, terms=terms, batch=self._batch))
            metrics = {}
        for name, values in {**metrics, **outputs.metrics}.items():
            trained = values.detach().masked_fill(mask == 0, 0.0)
            self._add(name, (mask * trained).sum() / max(1, self._batch.num_terms))
        return total

    def sum_over(self, group: ReplicaGroup) -> None:
        """Sum gradients and metrics over the policy replicas. A parameter without a gradient in all stays without one.

        Raises EpochOver; the gradients are dropped then, as some may be sums and others not.
        """
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        mine = bytes(parameter.grad is not None for parameter in parameters)
        try:
            has_gradient = np.bitwise_or.reduce([np.frombuffer(each, np.uint8) for each in group.gather(mine)])
            group.sum([_local_gradient(parameter) for parameter, has in zip(parameters, has_gradient) if has])
            metrics: Counter[str] = Counter()
            own = msgspec.msgpack.encode({name: float(value) for name, value in self._sums.items()})
            for encoded in group.gather(own):
                metrics.update(msgspec.msgpack.decode(encoded, type=dict[str, float]))
        except EpochOver:
            self.optimizer.zero_grad(set_to_none=True)
            raise
        self._sums = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}

    def optim_step(self, *, last: bool = True) -> StepResult:
        """Clip, check, step. A gradient that is not finite leaves the weights unchanged and is reported.

        last: no further update belongs to this step, which then makes a new version.
        """
        assert self._batch is not None
        norm = clip_gradients(
            self.policy.module.parameters(),
            max_norm=self._max_grad_norm,
            num_stages=self.mesh.dims.pp if self.mesh else 1,
            device=self.mesh.device if self.mesh else None,
            elsewhere=self.policy.second_copies(),
        )
        summed = self._read(norm)
        finite = math.isfinite(summed["grad_norm"])
        scale = self._lr_factor(self.version)
        if finite:
            for group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
                group["lr"] = base * scale
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.version += last
        if finite and last:
            self.policy.stepped(self.version)
        metrics = {**self._batch.metrics, **summed, **self.policy.metrics()}
        metrics["learning_rate"] = self._base_lrs[0] * scale
        self._batch = None
        return StepResult(policy_version=self.version, metrics=metrics, skipped=not finite)

    def _read(self, norm: torch.Tensor) -> dict[str, float]:
        """Return the step's metrics and the gradients' norm: the only wait for the device in a step."""
        if self.mesh is not None:
            return sum_metrics(self._sums, self.mesh, equal={"grad_norm": norm})
        values = {**self._sums, "grad_norm": norm}
        return dict(zip(values, torch.stack([value.double().to(norm.device) for value in values.values()]).tolist()))

    def _add(self, name: str, value: torch.Tensor) -> None:
        """Add to a metric on its own device; it is read once a step, so that a GPU need not wait."""
        value = value.detach()
        self._sums[name] = self._sums[name] + value if name in self._sums else value


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter's gradient; one without a gradient gets zeros."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_part(parameter.grad)

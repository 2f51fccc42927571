"""The loss on held-out rows, measured by the policy replica between two optimizer steps.

All ranks measure together, each its share of the rows, forward only; `workers.steps` decides when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cosmos_rl_core.data.source import PromptSource
from cosmos_rl_core.interfaces import Objective, Policy
from cosmos_rl_core.parallel.device import to_device
from cosmos_rl_core.parallel.metrics import sum_metrics
from cosmos_rl_core.train.answer_sums import AnswerSumsStage
from cosmos_rl_core.types import Prompt, TrainBatch

if TYPE_CHECKING:
    from cosmos_rl_core.parallel.mesh import ReplicaMesh


class Validation:
    """Mean negative log-likelihood of the target terms over all held-out rows.

    metrics = validation.measure()      # {"eval/loss": 1.25, "eval/perplexity": 3.49, ...}
    """

    def __init__(
        self,
        policy: Policy,
        *,
        source: PromptSource,
        rows_at_once: int,
        collate: Callable[[Sequence[Prompt]], TrainBatch],
        mesh: ReplicaMesh | None,
    ) -> None:
        """Measure `policy` on one epoch of `source`, collated `rows_at_once` at a time into this rank's share."""
        self._policy = policy
        self._source = source
        self._rows_at_once = rows_at_once
        self._collate = collate
        self._mesh = mesh

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Return `eval/loss`, `eval/perplexity`, `eval/terms` and `eval/rows`; the same on every rank.

        Raises UserError for a row that cannot be collated, as in training.
        """
        total = torch.zeros((), dtype=torch.float64)
        num_terms = num_rows = 0
        for batch in self._batches():
            num_terms += batch.num_terms
            num_rows += batch.num_rollouts
            for microbatch in batch.microbatches:
                logprobs = self._policy.forward(microbatch).logprobs
                mask = microbatch.terms.loss_mask.to(logprobs.device)
                total -= logprobs.masked_fill(mask == 0, 0.0).sum(dtype=torch.float64).cpu()
        self._policy.metrics()  # drop those counted here: they are not the next step's
        summed = self._summed({"nll": total})["nll"]
        loss = summed / num_terms if num_terms else math.nan
        return {
            "eval/loss": loss,
            "eval/perplexity": math.exp(min(loss, 700.0)),  # above, a float overflows
            "eval/terms": float(num_terms),
            "eval/rows": float(num_rows),
        }

    def _batches(self) -> Iterator[TrainBatch]:
        for start in range(0, len(self._source), self._rows_at_once):
            end = min(start + self._rows_at_once, len(self._source))
            yield self._collate([self._source[i] for i in range(start, end)])

    def _summed(self, totals: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Over the ranks."""
        if self._mesh is not None:
            return sum_metrics(totals, self._mesh)
        return {name: float(value) for name, value in totals.items()}


class PreferenceValidation(Validation):
    """Mean loss of preference training over all held-out rows, with its metrics.

    metrics = validation.measure()      # {"eval/loss": 0.62, "eval/reward_accuracy": 0.8, ..., "eval/rows": 100}
    """

    def __init__(self, policy: Policy, *, objective: Objective, sums: AnswerSumsStage | None, **keys: Any) -> None:
        """sums: of the reference, where the objective needs it. Further keys: those of `Validation`."""
        super().__init__(policy, **keys)
        self._objective, self._sums = objective, sums

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Return `eval/loss`, the objective's metrics, `eval/terms` and `eval/rows`; the same on every rank."""
        totals: dict[str, float] = {}
        num_terms = num_rollouts = 0
        num_rows = float(len(self._source))
        for batch in self._batches():
            num_rows -= batch.metrics.get("rows_dropped", 0.0)
            batch = batch if self._sums is None else self._sums.complete(batch)
            num_terms += batch.num_terms
            num_rollouts += batch.num_rollouts
            for microbatch in batch.microbatches:
                outputs = self._policy.forward(microbatch)
                terms = to_device(microbatch.terms, outputs.logprobs.device)
                (loss,), metrics = self._objective(outputs, terms)
                weights = self._objective.term_weights(terms)
                for name, values in {"loss": loss.values, **metrics}.items():
                    totals[name] = totals.get(name, 0.0) + float((weights * values).sum())
        self._policy.metrics()  # drop those counted here: they are not the next step's
        summed = self._summed({name: torch.tensor(value, dtype=torch.float64) for name, value in totals.items()})
        counts = TrainBatch(microbatches=(), num_terms=num_terms, num_rollouts=num_rollouts)
        means = {f"eval/{name}": value / self._objective.normalizer(counts) for name, value in summed.items()}
        return {**means, "eval/terms": float(num_terms), "eval/rows": num_rows}

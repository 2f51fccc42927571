"""The loss on held-out rows, measured by the policy replica between two optimizer steps.

All ranks measure together, each its share of the rows, forward only; `workers.steps` decides when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from cosmos_rl_core.data.source import PromptSource
from cosmos_rl_core.interfaces import Policy
from cosmos_rl_core.parallel.metrics import sum_metrics
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
        for start in range(0, len(self._source), self._rows_at_once):
            end = min(start + self._rows_at_once, len(self._source))
            batch = self._collate([self._source[i] for i in range(start, end)])
            num_terms += batch.num_terms
            num_rows += batch.num_rollouts
            for microbatch in batch.microbatches:
                logprobs = self._policy.forward(microbatch).logprobs
                mask = microbatch.terms.loss_mask.to(logprobs.device)
                total -= logprobs.masked_fill(mask == 0, 0.0).sum(dtype=torch.float64).cpu()
        self._policy.metrics()  # drop those counted here: they are not the next step's
        summed = float(total) if self._mesh is None else sum_metrics({"nll": total}, self._mesh)["nll"]
        loss = summed / num_terms if num_terms else math.nan
        return {
            "eval/loss": loss,
            "eval/perplexity": math.exp(min(loss, 700.0)),  # above, a float overflows
            "eval/terms": float(num_terms),
            "eval/rows": float(num_rows),
        }

"""From the losses of terms to one number: a weighted sum over all terms, divided by a global count.

    loss = sum_t weight_t * value_t / normalizer

Weights need only the microbatch (and, of a rollout that is cut into several, how many terms it has in all), the
normalizer only global counts, so that any split of a batch into microbatches and ranks gives the same loss.

    aggregation              weight_t                            normalizer
    term_mean                mask_t                              terms
    sequence_mean_of_means   mask_t / terms of its rollout       rollouts
    sequence_mean_of_sums    mask_t                              rollouts
    constant                 mask_t                              rollouts * constant
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cosmos_rl_core.types import Aggregates

if TYPE_CHECKING:
    from torch import Tensor

    from cosmos_rl_core.types import LossTerm, TermBatch, TrainBatch

AggregationName = Literal["term_mean", "sequence_mean_of_means", "sequence_mean_of_sums", "constant"]


def rollout_sums(values: Tensor, terms: TermBatch) -> Tensor:
    """Sum values [T] over the trained terms of each rollout -> [num_rollouts]."""
    masked = values * terms.loss_mask
    return masked.new_zeros(terms.num_rollouts).index_add(0, terms.rollout_index, masked)


def rollout_lengths(terms: TermBatch) -> Tensor:
    """Count the trained terms of each rollout -> [num_rollouts]; at least 1, so that it can divide."""
    mask = terms.loss_mask
    return mask.new_zeros(terms.num_rollouts).index_add(0, terms.rollout_index, mask).clamp(min=1)


def whole_lengths(terms: TermBatch) -> Tensor:
    """Return the trained terms of each rollout -> [num_rollouts], also those in other microbatches; at least 1."""
    return rollout_lengths(terms) if terms.rollout_terms is None else terms.rollout_terms.clamp(min=1)


def rollout_means(values: Tensor, terms: TermBatch) -> Tensor:
    """Average values [T] over the trained terms of each rollout that are here -> [num_rollouts]; 0 without any."""
    return rollout_sums(values, terms) / rollout_lengths(terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation(Aggregates):
    """The two factors of the sum above."""

    kind: AggregationName
    constant: int
    """Divisor of a rollout's sum, read by kind = "constant"."""

    def term_weights(self, terms: TermBatch) -> Tensor:
        """Return the weight [T] of each term."""
        if self.kind == "sequence_mean_of_means":
            return terms.loss_mask / whole_lengths(terms)[terms.rollout_index]
        return terms.loss_mask

    def normalizer(self, batch: TrainBatch) -> float:
        """Return the global count that divides; at least 1, so that an empty batch has loss 0."""
        if self.kind == "term_mean":
            return float(max(batch.num_terms, 1))
        rollouts = float(max(batch.num_rollouts, 1))
        return rollouts * self.constant if self.kind == "constant" else rollouts


def aggregated(loss: LossTerm, objective: Aggregates, *, terms: TermBatch, batch: TrainBatch) -> Tensor:
    """Return a microbatch's part of a named loss, without its coefficient: sum_t weight_t value_t / normalizer.

    Weights and normalizer are the loss's own where it has an aggregation, else the objective's.
    """
    by = objective if loss.aggregation is None else loss.aggregation
    return (by.term_weights(terms) * loss.values).sum() / by.normalizer(batch)

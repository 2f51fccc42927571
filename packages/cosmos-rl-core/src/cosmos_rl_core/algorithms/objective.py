"""Objectives that the trainer minimises, composed of the parts that [algorithm] names.

old -> loss -> * correction weight * sequence mask -> "policy"
rollout     -> log(policy / rollout)^2             -> "rollout_kl" * rollout_kl_coef
values, returns -> critic's loss -> "value"    * value_coef
reference   -> KL estimate (* ratio)               -> "kl"       * kl_coef
entropy     -> minus entropy                       -> "entropy"  * entropy_coef
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from cosmos_rl_core.algorithms.aggregation import Aggregation
from cosmos_rl_core.algorithms.losses import (
    LOSSES,
    LossFn,
    correction_weight,
    entropy_loss,
    gaussian_kl,
    importance_ratio,
    kl_estimate,
    sequence_mask,
    unbiased_kl,
    value_loss,
)
from cosmos_rl_core.algorithms.table import find_algorithm
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.interfaces import Objective
from cosmos_rl_core.types import LossTerm, PolicyOutputs, TermBatch

if TYPE_CHECKING:
    from torch import Tensor

    from cosmos_rl_core.algorithms.config import AlgorithmConfig

    Losses = tuple[list[LossTerm], Mapping[str, Tensor]]


def build_objective(config: AlgorithmConfig, *, max_terms: int) -> Objective:
    """Return the objective of a config. `aggregation_constant` is the sampling's `max_terms` if not set."""
    aggregation = Aggregation(kind=config.aggregation, constant=config.aggregation_constant or max_terms)
    row = find_algorithm(config.name)
    if row.objective is not None:
        return row.objective(config, aggregation=aggregation)
    if config.loss == "supervised":
        return SupervisedObjective(aggregation=aggregation, weighted=row.selects)
    return PolicyObjective(config, loss=row.loss or LOSSES[config.loss], aggregation=aggregation)


def data_term_objective(coef: float) -> Objective:
    """Return the objective of supervised rows beside rollouts: maximum likelihood, every term weighs the same."""
    return SupervisedObjective(aggregation=Aggregation(kind="term_mean", constant=1), coef=coef)


class PolicyObjective(Objective):
    """The policy loss with its corrections, KL and entropy.

    Metrics [T]: those of the loss (`ratio_mean`, `clip_fraction`), `mismatch_kl`, `entropy`, and where they apply
    `correction_weight`, `sequence_masked`, `high_entropy`, `entropy_coef`, `kl`.
    """

    def __init__(self, config: AlgorithmConfig, *, loss: LossFn, aggregation: Aggregation) -> None:
        self.config = config
        self.loss = loss
        self.aggregation = aggregation
        kind = config.entropy_aggregation
        self._entropy_aggregation = None if kind is None else replace(aggregation, kind=kind)
        self.top_entropy = config.top_entropy
        # the coefficient, and whether it applies: 1 while the entropy is at most the target
        self.state = () if config.entropy_target is None else (config.entropy_coef, 0.0)
        self.needs_entropy = True  # always a metric of the run; part of the loss where entropy_coef is above 0
        self.needs_reference = config.kl_coef > 0

    def __call__(self, outputs: PolicyOutputs, terms: TermBatch) -> Losses:
        outputs, terms = _trained_only(outputs, terms)
        parts = [
            self._policy(outputs, terms),
            self._value(outputs, terms),
            self._rollout_kl(outputs, terms),
            self._kl(outputs, terms),
            self._entropy(outputs, terms),
        ]
        mismatch = {"mismatch_kl": terms.rollout_logprobs - outputs.logprobs.detach()}
        losses = [loss for loss, _ in parts if loss is not None]
        return losses, mismatch | {name: value for _, metrics in parts for name, value in metrics.items()}

    def stepped(self, metrics: Mapping[str, float]) -> None:
        """Move the coefficient of the entropy towards its target. Skywork-OR1 (arXiv 2505.22312, section 4)."""
        config = self.config
        if config.entropy_target is None:
            return
        is_low = metrics["entropy"] <= config.entropy_target
        moved = self.state[0] + (config.entropy_coef_step if is_low else -config.entropy_coef_step)
        self.state = (min(max(moved, 0.0), config.entropy_coef_max), float(is_low))

    def _policy(self, outputs: PolicyOutputs, terms: TermBatch) -> tuple[LossTerm, dict[str, Tensor]]:
        config, logprobs = self.config, outputs.logprobs
        values, metrics = self.loss(logprobs, self._old(logprobs, terms), terms, config)
        if values.shape != logprobs.shape:
            raise UserError(
                f"the loss of algorithm {config.name!r} has to return one value a term, shape "
                f"{tuple(logprobs.shape)}; it returned {tuple(values.shape)}"
            )
        metrics = dict(metrics)
        if config.old_logprobs == "policy":
            metrics["correction_weight"] = weight = self._correction(logprobs, terms)
            values = values * weight
        if config.sequence_mask_delta is not None:
            keep = sequence_mask(logprobs, terms, delta=config.sequence_mask_delta)
            metrics["sequence_masked"] = 1 - keep
            values = values * keep
        if terms.high_entropy is not None:
            metrics["high_entropy"] = terms.high_entropy
            values = values * terms.high_entropy
        return LossTerm(name="policy", values=values), metrics

    def _value(self, outputs: PolicyOutputs, terms: TermBatch) -> tuple[LossTerm | None, dict[str, Tensor]]:
        config = self.config
        if config.advantage != "gae" or config.value_coef == 0:
            return None, {}
        if outputs.values is None or terms.values is None or terms.returns is None:
            raise UserError(
                f"algorithm {config.name!r} trains a critic, which this model does not have; give it one, or take an "
                'algorithm that compares rollouts of a group, such as "grpo"'
            )
        values = value_loss(
            outputs.values,
            old_values=terms.values,
            returns=terms.returns,
            clip=config.value_clip,
            huber_delta=config.value_huber_delta,
        )
        return LossTerm(name="value", values=values, coef=config.value_coef), {"value": outputs.values.detach()}

    def _rollout_kl(self, outputs: PolicyOutputs, terms: TermBatch) -> tuple[LossTerm | None, dict[str, Tensor]]:
        if self.config.rollout_kl_coef == 0:
            return None, {}
        values = (outputs.logprobs - terms.rollout_logprobs).square()
        return LossTerm(name="rollout_kl", values=values, coef=self.config.rollout_kl_coef), {}

    def _kl(self, outputs: PolicyOutputs, terms: TermBatch) -> tuple[LossTerm | None, dict[str, Tensor]]:
        config, logprobs = self.config, outputs.logprobs
        if not self.needs_reference:
            return None, {}
        assert terms.ref_logprobs is not None, "needs_reference was true, but the batch has no ref_logprobs"
        if config.kl_estimator in ("exact", "exact_dt"):
            values = gaussian_kl(outputs.tensors, terms.ref_tensors, estimator=config.kl_estimator)
        else:
            values = kl_estimate(logprobs, terms.ref_logprobs, estimator=config.kl_estimator)
        if config.kl_unbiased:
            ratio = importance_ratio(logprobs, self._old(logprobs, terms))
            if config.old_logprobs == "policy" and config.kl_ratio == "rollout":
                ratio = ratio * self._correction(logprobs, terms)
            values = unbiased_kl(values, ratio)
        return LossTerm(name="kl", values=values, coef=config.kl_coef), {"kl": values.detach()}

    def _entropy(self, outputs: PolicyOutputs, terms: TermBatch) -> tuple[LossTerm | None, dict[str, Tensor]]:
        if outputs.entropy is None:
            assert self.config.entropy_coef == 0, "the loss has an entropy term, but the policy returned no entropy"
            return None, {}
        metrics = {"entropy": outputs.entropy.detach()}
        coef = self.state[0] * self.state[1] if self.state else self.config.entropy_coef
        if self.state:
            metrics["entropy_coef"] = torch.full_like(outputs.entropy, coef).detach()
        if coef == 0:
            return None, metrics
        values = entropy_loss(outputs.entropy)
        loss = LossTerm(
            name="entropy",
            values=values if terms.high_entropy is None else values * terms.high_entropy,
            coef=coef,
            aggregation=self._entropy_aggregation,
        )
        return loss, metrics

    def _old(self, logprobs: Tensor, terms: TermBatch) -> Tensor:
        """The denominator of the ratio [T], without gradient."""
        if self.config.old_logprobs == "rollout":
            return terms.rollout_logprobs
        return logprobs.detach() if terms.old_logprobs is None else terms.old_logprobs

    def _correction(self, logprobs: Tensor, terms: TermBatch) -> Tensor:
        """old / rollout [T], truncated or masked; only where the ratio itself leaves it out."""
        return correction_weight(
            self._old(logprobs, terms),
            terms.rollout_logprobs,
            correction=self.config.correction,
            cap=self.config.correction_cap,
            floor=self.config.correction_floor,
            level=self.config.correction_level,
            terms=terms,
        )


class SupervisedObjective(Objective):
    """Maximum likelihood of the trained terms; rollout log-probs are not read, advantages only where they weigh."""

    def __init__(self, *, aggregation: Aggregation, coef: float = 1.0, weighted: bool = False) -> None:
        self.aggregation = aggregation
        self.coef = coef
        self._weighted = weighted

    def __call__(self, outputs: PolicyOutputs, terms: TermBatch) -> Losses:
        logprobs = outputs.logprobs.masked_fill(terms.loss_mask == 0, 0.0)
        weights = terms.advantages.masked_fill(terms.loss_mask == 0, 0.0) if self._weighted else 1.0
        return [LossTerm(name="nll", values=-weights * logprobs, coef=self.coef)], {}


def _trained_only(outputs: PolicyOutputs, terms: TermBatch) -> tuple[PolicyOutputs, TermBatch]:
    """Set masked values to 0: a NaN there would survive a multiplication by 0."""
    left_out = terms.loss_mask == 0

    def fill(values: Tensor) -> Tensor:
        return values.masked_fill(left_out, 0.0)

    def fill_rows(values: Tensor) -> Tensor:
        return values.masked_fill(left_out.view(-1, *(1,) * (values.dim() - 1)), 0.0)

    outputs = replace(
        outputs,
        logprobs=fill(outputs.logprobs),
        entropy=None if outputs.entropy is None else fill(outputs.entropy),
        values=None if outputs.values is None else fill(outputs.values),
        tensors={name: fill_rows(tensor) for name, tensor in outputs.tensors.items()},
    )
    terms = replace(
        terms,
        rollout_logprobs=fill(terms.rollout_logprobs),
        advantages=fill(terms.advantages),
        ref_logprobs=None if terms.ref_logprobs is None else fill(terms.ref_logprobs),
        ref_tensors={name: fill_rows(tensor) for name, tensor in terms.ref_tensors.items()},
        old_logprobs=None if terms.old_logprobs is None else fill(terms.old_logprobs),
        values=None if terms.values is None else fill(terms.values),
        returns=None if terms.returns is None else fill(terms.returns),
    )
    return outputs, terms

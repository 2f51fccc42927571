"""Learning from a teacher: divergences between two distributions, and the objective with a teacher's part.

    loss          adds to the objective
    divergence    coef * D(policy, teacher) of each term, over the vocabulary, with gradient
    advantage     -coef * (log policy(y) - log teacher(y)) of each sampled term y, to its advantage

With p the policy and q the teacher, D is GKD's generalised Jensen-Shannon divergence (arXiv 2306.13649, section 2):

    beta = 0        KL(q || p), forward
    0 < beta < 1    beta KL(q || m) + (1 - beta) KL(p || m),    m = beta q + (1 - beta) p
    beta = 1        KL(p || q), reverse

A divergence is a loss with gradient and never a detached advantage: it is a number of a state, whatever was sampled
there, and sum_y p(y) D grad log p(y) = D grad sum_y p(y) = 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cosmos_rl_core.interfaces import Objective
from cosmos_rl_core.types import LossTerm, PolicyOutputs, TermBatch, TrainBatch

if TYPE_CHECKING:
    from cosmos_rl_core.algorithms.config import TeacherSection

TASK_LOSSES = ("policy", "nll")
"""Losses of the task itself, which `task_coef` multiplies."""


def kl_divergence(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return KL(p || q) [...] of log-probabilities [..., V]."""
    return (logprobs.exp() * (logprobs - other)).sum(-1)


def divergence(logprobs: Tensor, teacher_logprobs: Tensor, *, beta: float) -> Tensor:
    """Return D of the log-probabilities [..., V] of policy and teacher -> [...]."""
    if beta == 1:
        return kl_divergence(logprobs, teacher_logprobs)
    if beta == 0:
        return kl_divergence(teacher_logprobs, logprobs)
    mixture = log_mixture(logprobs, teacher_logprobs, beta=beta)
    forward, reverse = kl_divergence(teacher_logprobs, mixture), kl_divergence(logprobs, mixture)
    return beta * forward + (1 - beta) * reverse


def log_mixture(logprobs: Tensor, teacher_logprobs: Tensor, *, beta: float) -> Tensor:
    """Return log(beta q + (1 - beta) p) for 0 < beta < 1."""
    return torch.logaddexp(teacher_logprobs + math.log(beta), logprobs + math.log1p(-beta))


def discounted(values: Tensor, rollout_index: Tensor, *, discount: float) -> Tensor:
    """Return sum_k discount^k values[t + k] over the later terms of each term's rollout [T].

    rollout_index [T]: as in `TermBatch`, non-decreasing. Tokens that are no terms, such as an environment's, do not
    count as steps. Takes log2(T) passes: each doubles the terms that are summed.
    """
    total, reach = values, 1
    while discount and reach < len(values):
        same = rollout_index[reach:] == rollout_index[:-reach]
        later = torch.where(same, total[reach:], 0.0)
        total = total + discount**reach * torch.cat([later, later.new_zeros(reach)])
        reach *= 2
    return total


class TaughtObjective(Objective):
    """The objective of an algorithm, with the part of a teacher.

    Metrics [T]: those of the algorithm, and with loss = "advantage" `teacher_kl` and `teacher_agreement`; with
    "divergence" the policy reports these two.
    """

    def __init__(self, task: Objective, config: TeacherSection) -> None:
        self._task = task
        self._config = config
        self.needs_entropy = task.needs_entropy
        self.needs_reference = task.needs_reference
        self.top_entropy = task.top_entropy

    @property
    def state(self) -> tuple[float, ...]:
        return self._task.state

    @state.setter
    def state(self, state: tuple[float, ...]) -> None:
        self._task.state = state

    def stepped(self, metrics: Mapping[str, float]) -> None:
        self._task.stepped(metrics)

    def __call__(self, outputs: PolicyOutputs, terms: TermBatch) -> tuple[list[LossTerm], Mapping[str, Tensor]]:
        if self._config.loss == "advantage":
            return self._with_advantages(outputs, terms)
        losses, metrics = self._task(outputs, terms)
        values = outputs.tensors["teacher"].masked_fill(terms.loss_mask == 0, 0.0)
        weighted = [self._weighted(loss) for loss in losses]
        taught = LossTerm(name="teacher", values=values, coef=self._config.coef)
        return [*(loss for loss in weighted if loss.coef), taught], metrics

    def term_weights(self, terms: TermBatch) -> Tensor:
        return self._task.term_weights(terms)

    def normalizer(self, batch: TrainBatch) -> float:
        return self._task.normalizer(batch)

    def _weighted(self, loss: LossTerm) -> LossTerm:
        return replace(loss, coef=loss.coef * self._config.task_coef) if loss.name in TASK_LOSSES else loss

    def _with_advantages(self, outputs: PolicyOutputs, terms: TermBatch) -> tuple[list[LossTerm], Mapping[str, Tensor]]:
        config = self._config
        excess = terms.rollout_logprobs - terms.teacher["logprobs"]
        kl = excess.masked_fill(terms.loss_mask == 0, 0.0)
        taught = discounted(kl, terms.rollout_index, discount=config.discount)
        advantages = config.task_coef * terms.advantages - config.coef * taught
        losses, metrics = self._task(outputs, replace(terms, advantages=advantages))
        return losses, {**metrics, "teacher_kl": kl, "teacher_agreement": terms.teacher["agreement"]}

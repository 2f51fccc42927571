"""Preference training: losses of pairs of answers, or of judged ones, from the log-probability of each whole answer.

With s = sum_t log p_t of an answer, n its terms, r = s - s_ref, and c, w the chosen and the rejected answer of a pair:

    dpo     -log sigmoid(beta (r_c - r_w))
    cdpo    -(1 - e) log sigmoid(beta (r_c - r_w)) - e log sigmoid(-beta (r_c - r_w)),   e = label_smoothing
    ipo     (r_c / n_c - r_w / n_w - 1 / (2 beta))^2
    simpo   -log sigmoid(beta (s_c / n_c - s_w / n_w) - gamma)
    orpo    -s_c / n_c - beta log sigmoid(odds_c - odds_w),   odds = m - log(1 - exp m),   m = s / n
    kto     desirable_weight (1 - sigmoid(beta (r - z))) of a chosen answer,
            undesirable_weight (1 - sigmoid(beta (z - r))) of a rejected one
    reward_model    -log sigmoid(v_c - v_w - margin) + center_coef (v_c + v_w)^2,   v = score of a whole text
    process_reward_model    -log sigmoid(y v) of a step, y = 1 of a right one and -1 of a wrong one

z is the mean r of answers after prompts of other rows, at least 0, without gradient. The loss of a pair is given to
both of its rollouts, and a mean over rollouts is then the mean over pairs, however the batch is split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from cosmos_rl_core.algorithms.aggregation import Aggregation, rollout_lengths, rollout_sums
from cosmos_rl_core.interfaces import Objective
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import LossTerm, PolicyOutputs, TermBatch

if TYPE_CHECKING:
    from torch import Tensor


class PreferenceOptions(Strict):
    """[algorithm.options] of "dpo", "ipo" and "orpo"."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the reference ("dpo", "ipo": a smaller one lets the policy go further), or weight of the odds ratio
    beside the likelihood of the chosen answer ("orpo")."""


class SmoothedOptions(PreferenceOptions):
    """[algorithm.options] of "cdpo"."""

    label_smoothing: float = Field(default=0.1, gt=0, lt=0.5)
    """Share of pairs whose answers are taken to be the wrong way round."""


class MarginOptions(PreferenceOptions):
    """[algorithm.options] of "simpo"."""

    beta: float = Field(default=2.0, gt=0)
    """Scale of the difference of mean log-probabilities."""
    gamma: float = Field(default=1.0, ge=0)
    """Margin that beta times the difference has to exceed."""


class JudgedOptions(PreferenceOptions):
    """[algorithm.options] of "kto"."""

    desirable_weight: float = Field(default=1.0, gt=0)
    """Weight of good answers. Its authors keep desirable_weight * good rows to undesirable_weight * bad rows within 1
    and 4/3."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """Weight of bad answers."""


class ScoreOptions(Strict):
    """[algorithm.options] of "reward_model"."""

    center_coef: float = Field(default=0.0, ge=0)
    """Coefficient of (chosen score + rejected score)^2, which keeps the mean score at 0; 0.01 is usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSums:
    """The answers of a microbatch, each as a whole."""

    logprobs: Tensor
    """[num_rollouts] with gradient: of the policy, the sum over the trained terms."""
    ratios: Tensor
    """[num_rollouts] with gradient: `logprobs` minus those of the reference; `logprobs` without one."""
    lengths: Tensor
    """[num_rollouts]: trained terms."""
    preference: Tensor
    """[num_rollouts], as in `TermBatch`."""
    baseline: Tensor | None
    """As in `TermBatch`."""
    margins: Tensor | None = None
    """[num_rollouts], as in `TermBatch`."""

    def difference(self, values: Tensor) -> Tensor:
        """Return the values [num_rollouts] of the chosen answers minus those of the rejected ones [pairs]."""
        return values[self.preference > 0] - values[self.preference < 0]

    def of_both(self, values: Tensor) -> Tensor:
        """Return the value of its pair [pairs] for each answer [num_rollouts]; 0 for padding."""
        zeros = values.new_zeros(len(self.preference))
        return zeros.masked_scatter(self.preference > 0, values).masked_scatter(self.preference < 0, values)


PreferenceLoss = Callable[[AnswerSums, Any], "Tensor"]
"""(answers, options) -> loss of each answer [num_rollouts], of a pair the same for both."""


def dpo_loss(answers: AnswerSums, options: PreferenceOptions) -> Tensor:
    """Rafailov et al., 2023, arXiv 2305.18290, equation 7."""
    return _smoothed(answers, answers.ratios, options.beta, smoothing=0.0)


def cdpo_loss(answers: AnswerSums, options: SmoothedOptions) -> Tensor:
    """Mitchell, 2023: DPO where a share of the labels is wrong."""
    return _smoothed(answers, answers.ratios, options.beta, smoothing=options.label_smoothing)


def ipo_loss(answers: AnswerSums, options: PreferenceOptions) -> Tensor:
    """Azar et al., 2023, arXiv 2310.12036, equation 17, with means over the terms of an answer as its authors use."""
    margins = answers.difference(answers.ratios / answers.lengths)
    return answers.of_both((margins - 1 / (2 * options.beta)) ** 2)


def simpo_loss(answers: AnswerSums, options: MarginOptions) -> Tensor:
    """Meng et al., 2024, arXiv 2405.14734, equation 6."""
    return _smoothed(answers, answers.logprobs / answers.lengths, options.beta, smoothing=0.0, gamma=options.gamma)


def orpo_loss(answers: AnswerSums, options: PreferenceOptions) -> Tensor:
    """Hong et al., 2024, arXiv 2403.07691, equation 6. The likelihood is that of the answer's terms alone."""
    import torch
    from torch.nn.functional import logsigmoid

    means = answers.logprobs / answers.lengths
    # Of answers alone: the odds of padding, whose mean is 0, are infinite, and would have a gradient of NaN.
    chosen, rejected = means[answers.preference > 0], means[answers.preference < 0]
    odds = chosen - rejected - torch.log(-torch.expm1(chosen)) + torch.log(-torch.expm1(rejected))
    return answers.of_both(-chosen - options.beta * logsigmoid(odds))


def kto_loss(answers: AnswerSums, options: JudgedOptions) -> Tensor:
    """Ethayarajh et al., 2024, arXiv 2402.01306, equations 7 and 8."""
    import torch

    baseline = 0.0 if answers.baseline is None else answers.baseline
    margins = options.beta * (answers.ratios - baseline)
    good, bad = answers.preference > 0, answers.preference < 0
    losses = options.desirable_weight * (1 - torch.sigmoid(margins)) * good
    return losses + options.undesirable_weight * (1 - torch.sigmoid(-margins)) * bad


def score_loss(answers: AnswerSums, options: ScoreOptions) -> Tensor:
    """Bradley-Terry with margins (Llama 2, arXiv 2307.09288, equation 2) and centred (arXiv 2312.09244, section 3)."""
    from torch.nn.functional import logsigmoid

    chosen, rejected = (answers.logprobs[sign * answers.preference > 0] for sign in (1, -1))
    margins = 0.0 if answers.margins is None else answers.margins[answers.preference > 0]
    return answers.of_both(-logsigmoid(chosen - rejected - margins) + options.center_coef * (chosen + rejected) ** 2)


def _smoothed(answers: AnswerSums, scores: Tensor, beta: float, *, smoothing: float, gamma: float = 0.0) -> Tensor:
    from torch.nn.functional import logsigmoid

    margins = beta * answers.difference(scores) - gamma
    return answers.of_both(-(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins))


class StepObjective(Objective):
    """Binary cross-entropy of the scores of single steps (Lightman et al., 2023, arXiv 2305.20050, section 2.6). The
    advantage of a term is the label of its step: 1 of a right one, -1 of a wrong one.

    Metrics, means over steps: `step_accuracy`, the share of scores with the sign of the label, and `right_steps`.
    """

    def __init__(self, config: Any, *, aggregation: Aggregation) -> None:
        """config: the `AlgorithmConfig`, of which nothing is read."""
        self.aggregation = aggregation

    def __call__(self, outputs: PolicyOutputs, terms: TermBatch) -> tuple[list[LossTerm], Mapping[str, Tensor]]:
        from torch.nn.functional import logsigmoid

        scores = terms.advantages * outputs.logprobs
        metrics = {"step_accuracy": scores.detach() > 0, "right_steps": terms.advantages > 0}
        losses = [LossTerm(name="steps", values=-logsigmoid(scores))]
        return losses, {name: values.to(scores.dtype) for name, values in metrics.items()}


class PreferenceObjective(Objective):
    """A preference loss.

    Metrics, means over the answers of their kind: `chosen_logprob` and `rejected_logprob` of whole answers,
    `chosen_reward` and `rejected_reward`, beta times the log-ratio to the reference, or without one the mean
    log-probability of a term; of a reward model its scores, and no log-probabilities. Of pairs `reward_margin` and
    `reward_accuracy`; of judged answers `baseline`.
    """

    rollout_metrics = True

    def __init__(
        self,
        config: Any,
        *,
        aggregation: Aggregation,
        loss: PreferenceLoss,
        options: type[Strict],
        reference: bool,
        in_pairs: bool,
    ) -> None:
        """config: the `AlgorithmConfig`, of which the options are read."""
        self.aggregation = aggregation
        self.needs_reference = reference
        self._in_pairs = in_pairs
        self._loss = loss
        self._options: Any = options.model_validate(config.options)

    def __call__(self, outputs: PolicyOutputs, terms: TermBatch) -> tuple[list[LossTerm], Mapping[str, Tensor]]:
        assert not self.needs_reference or terms.ref_sums is not None, "the batch has no ref_sums"
        sums = rollout_sums(outputs.logprobs.masked_fill(terms.loss_mask == 0, 0.0), terms)
        answers = AnswerSums(
            logprobs=sums,
            ratios=sums - terms.ref_sums if terms.ref_sums is not None else sums,
            lengths=rollout_lengths(terms),
            preference=sums.new_zeros(len(sums)) if terms.preference is None else terms.preference,
            baseline=terms.baseline,
            margins=terms.margins,
        )
        losses = self._loss(answers, self._options)
        metrics = {name: values[terms.rollout_index] for name, values in self._metrics(answers).items()}
        return [LossTerm(name="preference", values=losses[terms.rollout_index])], metrics

    def _metrics(self, answers: AnswerSums) -> dict[str, Tensor]:
        """[num_rollouts] each."""
        chosen, rejected = answers.preference.clamp(min=0), (-answers.preference).clamp(min=0)
        logprobs = answers.logprobs.detach()
        scores = answers.ratios.detach() if self.needs_reference else logprobs / answers.lengths
        is_scored = isinstance(self._options, ScoreOptions)
        rewards = logprobs if is_scored else self._options.beta * scores
        metrics = {"chosen_reward": chosen * rewards, "rejected_reward": rejected * rewards}
        if not is_scored:
            metrics |= {"chosen_logprob": chosen * logprobs, "rejected_logprob": rejected * logprobs}
        if self._in_pairs:
            margins = answers.difference(rewards)
            metrics |= {
                "reward_margin": answers.of_both(margins),
                "reward_accuracy": answers.of_both((margins > 0).to(margins.dtype)),
            }
        elif answers.baseline is not None:
            metrics["baseline"] = answers.baseline.expand(len(rewards))
        return metrics

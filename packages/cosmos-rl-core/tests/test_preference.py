"""Preference losses by hand, whatever the split, and the reference's part of a batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.algorithms.table import TABLE
from cosmos_rl_core.train.answer_sums import AnswerSumsStage
from cosmos_rl_core.types import Microbatch, PolicyOutputs, TermBatch, TrainBatch

LENGTHS = (2, 3, 1, 2)
POLICY = ((-0.5, -1.0), (-0.5, -0.5, -1.5), (-2.0,), (-1.0, -0.25))
REFERENCE = (-2.0, -2.0, -1.5, -1.75)
RATIOS = (0.5, -0.5, -0.5, 0.5)
PAIRS = sorted(name for name, row in TABLE.items() if row.rows == "pairs" and row.objective is not None)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def batch(preference=(2.0, -2.0, 2.0, -2.0), *, rollouts=(0, 1, 2, 3), baseline=None) -> TermBatch:
    lengths = torch.tensor([LENGTHS[rollout] for rollout in rollouts])
    terms = int(lengths.sum())
    return TermBatch(
        rollout_logprobs=torch.zeros(terms),
        advantages=torch.ones(terms),
        loss_mask=torch.ones(terms, dtype=torch.float64),
        rollout_index=torch.repeat_interleave(torch.arange(len(rollouts)), lengths),
        num_rollouts=len(rollouts),
        preference=torch.tensor([preference[rollout] for rollout in rollouts], dtype=torch.float64),
        rollout_keys=torch.tensor([rollout + 1 for rollout in rollouts]),
        ref_sums=torch.tensor([REFERENCE[rollout] for rollout in rollouts], dtype=torch.float64),
        baseline=baseline,
    )


def logprobs(rollouts=(0, 1, 2, 3)) -> torch.Tensor:
    return torch.tensor([value for rollout in rollouts for value in POLICY[rollout]], dtype=torch.float64)


def objective_of(name: str, **options):
    return build_objective(AlgorithmConfig(name=name, options=options), max_terms=1)


def measured(objective, terms: TermBatch, values: torch.Tensor, *, num_rollouts: int = 4) -> dict[str, torch.Tensor]:
    """Loss and metrics as the trainer reports them."""
    (loss,), metrics = objective(PolicyOutputs(logprobs=values), terms)
    counts = TrainBatch(microbatches=(), num_terms=8, num_rollouts=num_rollouts)
    weights = objective.term_weights(terms) / objective.normalizer(counts)
    return {name: (weights * values).sum() for name, values in {"loss": loss.values, **metrics}.items()}


@pytest.mark.parametrize(
    ("name", "options", "of_pairs"),
    [
        ("dpo", {"beta": 0.5}, [-log_sigmoid(0.5), -log_sigmoid(-0.5)]),
        (
            "cdpo",
            {"beta": 0.5, "label_smoothing": 0.25},
            [-0.75 * log_sigmoid(x) - 0.25 * log_sigmoid(-x) for x in (0.5, -0.5)],
        ),
        ("ipo", {"beta": 0.5}, [(0.25 + 0.5 / 3 - 1) ** 2, (-0.5 - 0.25 - 1) ** 2]),
        (
            "simpo",
            {"beta": 2.0, "gamma": 0.5},
            [-log_sigmoid(2 * (-0.75 + 2.5 / 3) - 0.5), -log_sigmoid(2 * (-2 + 0.625) - 0.5)],
        ),
        (
            "reward_model",
            {"center_coef": 0.01},
            [-log_sigmoid(-1.5 + 2.5) + 0.01 * 4.0**2, -log_sigmoid(-2.0 + 1.25) + 0.01 * 3.25**2],
        ),
        (
            "orpo",
            {"beta": 0.5},
            [
                -c - 0.5 * log_sigmoid(c - math.log(1 - math.exp(c)) - w + math.log(1 - math.exp(w)))
                for c, w in ((-0.75, -2.5 / 3), (-2.0, -0.625))
            ],
        ),
    ],
)
def test_pairs_by_hand(name, options, of_pairs):
    found = measured(objective_of(name, **options), batch(), logprobs())
    assert float(found["loss"]) == pytest.approx(sum(of_pairs) / 2, rel=1e-12)


def test_a_margin_is_subtracted_from_the_difference_of_scores():
    terms = replace(batch(), margins=torch.tensor([0.5, 0.5, 2.0, 2.0], dtype=torch.float64))
    found = measured(objective_of("reward_model"), terms, logprobs())
    assert float(found["loss"]) == pytest.approx(-(log_sigmoid(0.5) + log_sigmoid(-2.75)) / 2, rel=1e-12)
    assert float(found["reward_accuracy"]) == pytest.approx(0.5)
    assert float(found["reward_margin"]) == pytest.approx((1.0 - 0.75) / 2)
    assert float(found["chosen_reward"]) == pytest.approx((-1.5 - 2.0) / 2)
    assert "chosen_logprob" not in found


def test_steps_by_hand():
    """Every step weighs the same, whatever the number of steps of its answer and the split of the batch."""
    labels = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    whole, parts = logprobs().requires_grad_(), logprobs().requires_grad_()
    found = measured(objective_of("process_reward_model"), replace(batch(), advantages=labels), whole)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(whole, (labels > 0).double())
    torch.testing.assert_close(found["loss"], expected, rtol=1e-12, atol=0)
    assert float(found["step_accuracy"]) == pytest.approx(4 / 8)  # every score is negative
    assert float(found["right_steps"]) == pytest.approx(4 / 8)
    expected.backward()
    for rollouts, place in {(0, 1): slice(0, 5), (2, 3): slice(5, 8)}.items():
        terms = replace(batch(rollouts=rollouts), advantages=labels[place])
        measured(objective_of("process_reward_model"), terms, parts[place])["loss"].backward()
    assert whole.grad is not None and parts.grad is not None
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=0)


def test_judged_answers_by_hand():
    terms = batch((4.0, -4 / 3, -4 / 3, -4 / 3), baseline=torch.tensor(0.25, dtype=torch.float64))
    found = measured(objective_of("kto", beta=0.5, desirable_weight=2.0, undesirable_weight=3.0), terms, logprobs())
    good = 2 * (1 - sigmoid(0.5 * (0.5 - 0.25)))
    bad = [3 * (1 - sigmoid(0.5 * (0.25 - ratio))) for ratio in RATIOS[1:]]
    assert float(found["loss"]) == pytest.approx((good + sum(bad)) / 4, rel=1e-12)
    assert float(found["chosen_reward"]) == pytest.approx(0.25)
    assert float(found["rejected_reward"]) == pytest.approx(0.5 * sum(RATIOS[1:]) / 3)
    assert float(found["baseline"]) == pytest.approx(0.25)


def test_metrics_are_means_over_answers_and_pairs():
    found = measured(objective_of("dpo", beta=0.5), batch(), logprobs())
    assert {name: round(float(value), 6) for name, value in found.items() if name != "loss"} == {
        "chosen_logprob": -1.75,
        "rejected_logprob": -1.875,
        "chosen_reward": 0.0,
        "rejected_reward": 0.0,
        "reward_margin": 0.0,
        "reward_accuracy": 0.5,
    }


@pytest.mark.parametrize("name", PAIRS)
def test_the_split_into_microbatches_changes_neither_loss_nor_gradient(name):
    objective = objective_of(name)
    whole, parts = logprobs().requires_grad_(), logprobs().requires_grad_()
    measured(objective, batch(), whole)["loss"].backward()
    places = {(0, 1): slice(0, 5), (2, 3): slice(5, 8)}
    for rollouts, place in places.items():
        measured(objective, batch(rollouts=rollouts), parts[place])["loss"].backward()
    assert whole.grad is not None and parts.grad is not None
    assert torch.allclose(whole.grad, parts.grad, rtol=1e-12)
    assert whole.grad.abs().sum() > 0


@pytest.mark.parametrize("name", [*PAIRS, "kto", "process_reward_model"])
def test_padding_has_no_loss(name):
    terms = batch((0.0,) * 4, rollouts=(2,))
    terms = replace(terms, preference=None, loss_mask=torch.zeros(1, dtype=torch.float64))
    values = logprobs((2,)).requires_grad_()
    found = measured(objective_of(name), terms, values)
    found["loss"].backward()
    assert all(value.item() == 0 for value in found.values())
    assert values.grad is not None and values.grad.tolist() == [0.0]


class Frozen:
    """Answers with its log-probability a term, and counts its passes."""

    def __init__(self, value: float) -> None:
        self.value, self.passes = value, 0

    def forward(self, microbatch, *, with_entropy=False):
        self.passes += 1
        return PolicyOutputs(logprobs=torch.full((len(microbatch.terms.loss_mask),), self.value))

    def prepared(self):
        return torch.no_grad()


def microbatch(rollouts) -> Microbatch:
    return Microbatch(inputs={}, terms=replace(batch(rollouts=rollouts), ref_sums=None))


def test_the_reference_reads_each_answer_once():
    reference = Frozen(-1.0)
    stage = AnswerSumsStage(Frozen(0.0), reference, None)  # type: ignore[arg-type]
    counts = {"num_terms": 8, "num_rollouts": 4}
    first = stage.complete(TrainBatch(microbatches=(microbatch((0, 1)), microbatch((2, 3))), **counts))
    again = stage.complete(TrainBatch(microbatches=(microbatch((2, 3, 0, 1)),), **counts))
    assert reference.passes == stage.passes == 2
    sums = [each.terms.ref_sums for each in (*first.microbatches, *again.microbatches)]
    assert [each.tolist() for each in sums if each is not None] == [[-2, -3], [-1, -2], [-1, -2, -2, -3]]


@pytest.mark.parametrize(("value", "baseline"), [(-0.5, 1.0), (-2.0, 0.0)])
def test_the_baseline_is_a_mean_over_mismatched_answers(value, baseline):
    stage = AnswerSumsStage(Frozen(value), Frozen(-1.0), None)  # type: ignore[arg-type]
    mismatched = replace(microbatch((0, 1, 2, 3)).terms, preference=None, rollout_keys=None)
    found = stage.complete(
        TrainBatch(
            microbatches=(microbatch((0, 1)),),
            num_terms=5,
            num_rollouts=2,
            mismatched=(Microbatch(inputs={}, terms=mismatched),),
        )
    )
    assert found.microbatches[0].terms.baseline is not None
    assert float(found.microbatches[0].terms.baseline) == baseline


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"clip_high": 0.3}, "preference training does not read it"),
        ({"options": {"gamma": 1.0}}, "options.gamma"),
        ({"options": {"beta": 0.0}}, "options.beta"),
    ],
)
def test_keys_without_effect_are_refused(keys, error):
    with pytest.raises(ValidationError, match=error):
        AlgorithmConfig(name="dpo", **keys)

"""Losses and gradients beside those of TRL's own trainers, called on the same log-probabilities in float64."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.types import PolicyOutputs, TermBatch, TrainBatch

pytest.importorskip("trl", reason="trl is not installed; benchmarks/_peer_env.py names its version")

PAIRS, WIDTH = 5, 9


class Answers:
    """Ragged answers [2 * PAIRS, WIDTH], the chosen ones first as TRL has them."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, WIDTH, (2 * PAIRS,), generator=generator)
        self.mask = torch.arange(WIDTH) < self.lengths[:, None]
        shape = (2 * PAIRS, WIDTH)
        self.logprobs = (-torch.rand(shape, generator=generator, dtype=torch.float64) * self.mask).requires_grad_()
        self.reference = -torch.rand(shape, generator=generator, dtype=torch.float64) * self.mask
        self.order = torch.arange(2 * PAIRS).view(2, PAIRS).T.flatten()
        """Chosen and rejected answers by turns."""

    def ours(
        self,
        name: str,
        *,
        baseline: torch.Tensor | None = None,
        margins: torch.Tensor | None = None,
        **options: float,
    ) -> torch.Tensor:
        """Our loss, in two microbatches, the second of which has the first three pairs."""
        config = AlgorithmConfig(name=name, options=options)
        objective = build_objective(config, max_terms=1)
        counts = TrainBatch(microbatches=(), num_terms=int(self.lengths.sum()), num_rollouts=2 * PAIRS)
        total = torch.zeros((), dtype=torch.float64)
        for rows in (self.order[6:], self.order[:6]):
            kept = self.mask[rows]
            values = self.logprobs[rows][kept]
            terms = TermBatch(
                rollout_logprobs=torch.zeros(len(values)),
                advantages=torch.ones(len(values)),
                loss_mask=torch.ones(len(values), dtype=torch.float64),
                rollout_index=torch.arange(len(rows))[:, None].expand(-1, WIDTH)[kept],
                num_rollouts=len(rows),
                preference=torch.where(rows < PAIRS, 2.0, -2.0).double(),
                ref_sums=self.reference[rows].sum(1),
                baseline=baseline,
                margins=None if margins is None else margins[rows],
            )
            (loss,), _ = objective(PolicyOutputs(logprobs=values), terms)
            total = total + (objective.term_weights(terms) * loss.values).sum() / objective.normalizer(counts)
        return total

    def padded(self) -> torch.Tensor:
        """The mask as TRL has it, after a prompt of one token."""
        return torch.cat([torch.zeros(2 * PAIRS, 1, dtype=torch.int64), self.mask.long()], dim=1)

    def outputs(self, logprobs: torch.Tensor) -> SimpleNamespace:
        zeros = torch.zeros(logprobs.shape)
        return SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def trainer(**fields) -> SimpleNamespace:
    """What TRL's `_compute_loss` reads of its trainer."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda values: values, gather_for_metrics=lambda values: values
    )
    common = {
        "accelerator": accelerator,
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "label_smoothing": 0.0,
    }
    return SimpleNamespace(**{**common, **fields})


class Model:
    """Returns the same outputs for any input."""

    training = True

    def __init__(self, outputs: SimpleNamespace) -> None:
        self._outputs = outputs

    def __call__(self, **_inputs: object) -> SimpleNamespace:
        return self._outputs


def of_dpo(answers: Answers, loss: str, *, beta: float) -> torch.Tensor:
    from trl import DPOTrainer

    me = trainer(
        loss_types=[loss],
        loss_weights=[1.0],
        beta=beta,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
    )
    chosen, rejected = answers.reference.sum(1).chunk(2)
    mask = answers.padded()
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}
    inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    return DPOTrainer._compute_loss(me, Model(answers.outputs(answers.logprobs)), inputs, False)


def of_kto(answers: Answers, *, mismatched: torch.Tensor, beta: float, good: float, bad: float) -> torch.Tensor:
    from trl import KTOTrainer

    me = trainer(
        loss_type="kto", beta=beta, desirable_weight=good, undesirable_weight=bad, calculate_KL=True,
        _compute_kl_logps=lambda model, batch: mismatched,
    )  # fmt: skip
    mask = answers.padded()
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask, "label": torch.arange(10) < PAIRS}
    inputs |= {"ref_logps": answers.reference.sum(1), "ref_KL_logps": torch.zeros(10, dtype=torch.float64)}
    return KTOTrainer._compute_loss(me, Model(answers.outputs(answers.logprobs)), inputs, False)


def of_cpo(answers: Answers, scores: torch.Tensor, loss: str, **fields: float) -> torch.Tensor:
    from trl.experimental.cpo import CPOTrainer

    me = trainer(loss_type=loss, alpha=0.0, **fields)
    return CPOTrainer.cpo_loss(me, *scores.chunk(2))[0].mean()


def of_orpo(answers: Answers, monkeypatch: pytest.MonkeyPatch, *, beta: float) -> torch.Tensor:
    from trl.experimental.orpo import ORPOTrainer

    monkeypatch.setattr(torch.Tensor, "float", lambda values: values)  # it would compute in float32
    chosen, rejected = (answers.logprobs.sum(1) / answers.lengths).chunk(2)
    return -chosen.mean() - ORPOTrainer.odds_ratio_loss(trainer(beta=beta), chosen, rejected)[0].mean()


def must_be_equal(answers: Answers, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    (our_gradient,) = torch.autograd.grad(ours, answers.logprobs)
    (their_gradient,) = torch.autograd.grad(theirs, answers.logprobs)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-9, abs=0)
    assert our_gradient.abs().sum() > 0
    assert torch.allclose(our_gradient, their_gradient * answers.mask, rtol=1e-9, atol=1e-12)


every_seed = pytest.mark.parametrize("seed", range(20))


@every_seed
@pytest.mark.parametrize(("name", "loss"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_pairs_with_a_reference(name, loss, seed):
    answers = Answers(seed)
    must_be_equal(answers, answers.ours(name, beta=0.3), of_dpo(answers, loss, beta=0.3))


@every_seed
def test_smoothed_labels(seed):
    answers = Answers(seed)
    theirs = of_cpo(answers, (answers.logprobs - answers.reference).sum(1), "sigmoid", beta=0.3, label_smoothing=0.2)
    must_be_equal(answers, answers.ours("cdpo", beta=0.3, label_smoothing=0.2), theirs)


@every_seed
def test_mean_log_probabilities_with_a_margin(seed):
    answers = Answers(seed)
    theirs = of_cpo(answers, answers.logprobs.sum(1) / answers.lengths, "simpo", beta=2.0, simpo_gamma=0.7)
    must_be_equal(answers, answers.ours("simpo", beta=2.0, gamma=0.7), theirs)


@every_seed
def test_odds_ratios(seed, monkeypatch):
    answers = Answers(seed)
    ours = answers.ours("orpo", beta=0.4)
    must_be_equal(answers, ours, of_orpo(answers, monkeypatch, beta=0.4))


@every_seed
@pytest.mark.parametrize("shift", [0.5, -0.5])
def test_judged_answers(seed, shift):
    answers = Answers(seed)
    mismatched = torch.full((10,), shift, dtype=torch.float64)
    ours = answers.ours(
        "kto", baseline=mismatched.mean().clamp(min=0), beta=0.3, desirable_weight=1.5, undesirable_weight=0.5
    )
    must_be_equal(answers, ours, of_kto(answers, mismatched=mismatched, beta=0.3, good=1.5, bad=0.5))


@every_seed
@pytest.mark.parametrize("center", [None, 0.01])
@pytest.mark.parametrize("with_margins", [False, True])
def test_scores_of_a_reward_model(seed, center, with_margins):
    from trl import RewardTrainer

    answers = Answers(seed)
    margins = torch.rand(PAIRS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    me = trainer(args=SimpleNamespace(center_rewards_coefficient=center))
    mask = answers.padded()
    inputs = {"input_ids": mask, "attention_mask": mask} | ({"margin": margins} if with_margins else {})
    scores = answers.logprobs.sum(1)  # any function of the leaves that has one value an answer
    theirs = RewardTrainer.compute_loss(me, Model(SimpleNamespace(logits=scores[:, None])), inputs)
    ours = answers.ours("reward_model", margins=margins.repeat(2) if with_margins else None, center_coef=center or 0.0)
    must_be_equal(answers, ours, theirs)

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.algorithms.table import TABLE
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import PolicyOutputs, TermBatch, TrainBatch

POLICY_ALGORITHMS = sorted(name for name, row in TABLE.items() if not row.rows and not row.selects and name != "ppo")
every_algorithm = pytest.mark.parametrize("name", POLICY_ALGORITHMS)

LENGTHS = (3, 2, 1, 2)
MASK = (1, 1, 0, 1, 1, 0, 1, 1)  # rollout 2 trains nothing
ADVANTAGES = (1.0, 1.0, 1.0, -1.0, -1.0, 2.0, 0.5, 0.5)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def batch(*, rollout_logprobs, advantages=ADVANTAGES, lengths=LENGTHS, mask=MASK, ref_logprobs=None):
    return TermBatch(
        rollout_logprobs=rollout_logprobs,
        advantages=tensor(*advantages),
        loss_mask=tensor(*mask),
        rollout_index=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_rollouts=len(lengths),
        ref_logprobs=ref_logprobs,
    )


def counts(terms):
    trained = terms.rollout_index[terms.loss_mask > 0]
    return TrainBatch(microbatches=(), num_terms=len(trained), num_rollouts=len(trained.unique()))


def total(objective, outputs, terms):
    """What the trainer minimises."""
    losses, _ = objective(outputs, terms)
    weights, normalizer = objective.term_weights(terms), objective.normalizer(counts(terms))
    return torch.stack([loss.coef * (weights * loss.values).sum() / normalizer for loss in losses]).sum()


def objective_of(**keys):
    return build_objective(AlgorithmConfig(**keys), max_terms=4)


def drawn(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return -torch.rand(len(MASK), generator=generator, dtype=torch.float64) - 0.1


def test_the_whole_objective_by_hand():
    # One rollout of two terms, A = 2: ratios 1.5 (held at 1.2) and 0.9; reference / policy = 2 and 1;
    # entropies 0.3 and 0.5. Mean over terms:
    #   policy    -(1.2 * 2 + 0.9 * 2) / 2       = -2.1
    #   kl (k3)   ((2 - 1 - log 2) + 0) / 2      = (1 - log 2) / 2
    #   entropy   -(0.3 + 0.5) / 2               = -0.4
    logprobs = tensor(-1.0, -2.0)
    terms = batch(
        rollout_logprobs=logprobs - tensor(1.5, 0.9).log(),
        ref_logprobs=logprobs + tensor(2.0, 1.0).log(),
        advantages=(2.0, 2.0),
        lengths=(2,),
        mask=(1, 1),
    )
    objective = objective_of(name="grpo", kl_coef=0.1, entropy_coef=0.01)
    outputs = PolicyOutputs(logprobs=logprobs, entropy=tensor(0.3, 0.5))
    expected = -2.1 + 0.1 * (1 - math.log(2)) / 2 + 0.01 * -0.4
    assert total(objective, outputs, terms).item() == pytest.approx(expected, rel=1e-12)
    losses, metrics = objective(outputs, terms)
    assert [(loss.name, loss.coef) for loss in losses] == [("policy", 1.0), ("kl", 0.1), ("entropy", 0.01)]
    expected_metrics = {
        "ratio_mean": tensor(1.5, 0.9),
        "clip_fraction": tensor(1.0, 0.0),
        "mismatch_kl": tensor(-math.log(1.5), -math.log(0.9)),
        "kl": tensor(1 - math.log(2), 0.0),
        "entropy": tensor(0.3, 0.5),
    }
    torch.testing.assert_close(dict(metrics), expected_metrics)


def test_supervised_loss_by_hand():
    # trained terms 0, 1, 3: -(-1 - 2 - 4) / 3
    terms = batch(rollout_logprobs=tensor(0, 0, 0, 0), advantages=(0.0,) * 4, lengths=(3, 1), mask=(1, 1, 0, 1))
    outputs = PolicyOutputs(logprobs=tensor(-1, -2, -3, -4))
    assert total(objective_of(name="sft"), outputs, terms).item() == pytest.approx(7 / 3, rel=1e-15)


def test_decoupled_loss_weighs_by_the_truncated_correction_by_hand():
    # policy / rollout = 3 (cut to 2) and 0.5: gradient -w A / 2, with every ratio 1
    logprobs = tensor(-1.0, -2.0).requires_grad_()
    terms = batch(
        rollout_logprobs=logprobs.detach() - tensor(3.0, 0.5).log(),
        advantages=(1.0, -1.0),
        lengths=(2,),
        mask=(1, 1),
    )
    objective = objective_of(name="dapo", old_logprobs="policy", correction_cap=2.0)
    outputs = PolicyOutputs(logprobs=logprobs)
    (found,) = torch.autograd.grad(total(objective, outputs, terms), logprobs)
    torch.testing.assert_close(found, tensor(-2 / 2, 0.5 / 2))
    _, metrics = objective(outputs, terms)
    torch.testing.assert_close(metrics["correction_weight"], tensor(2.0, 0.5))
    torch.testing.assert_close(metrics["ratio_mean"], tensor(1.0, 1.0))


def test_sequence_mask_drops_the_policy_loss_and_keeps_the_kl():
    logprobs = tensor(-3.0, -3.0).requires_grad_()
    terms = batch(
        rollout_logprobs=tensor(-1.0, -1.0),
        ref_logprobs=tensor(-2.0, -2.0),
        advantages=(-1.0, -1.0),
        lengths=(2,),
        mask=(1, 1),
    )
    objective = objective_of(name="dapo", sequence_mask_delta=0.5, kl_coef=1.0, kl_estimator="k2")
    losses, metrics = objective(PolicyOutputs(logprobs=logprobs), terms)
    assert [loss.values.tolist() for loss in losses] == [[0.0, 0.0], [0.5, 0.5]]
    assert metrics["sequence_masked"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("old_logprobs", ["rollout", "policy"])
def test_unbiased_kl_is_weighed_by_the_ratio_to_the_sampler(old_logprobs):
    # policy / rollout = 1.5, reference / policy = 2: 1.5 * (2 - 1 - log 2)
    logprobs = tensor(-1.0)
    terms = batch(
        rollout_logprobs=logprobs - math.log(1.5),
        ref_logprobs=logprobs + math.log(2),
        advantages=(0.0,),
        lengths=(1,),
        mask=(1,),
    )
    objective = objective_of(old_logprobs=old_logprobs, kl_coef=0.1, kl_unbiased=True)
    _, metrics = objective(PolicyOutputs(logprobs=logprobs), terms)
    torch.testing.assert_close(metrics["kl"], tensor(1.5 * (1 - math.log(2))))


@every_algorithm
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000))
def test_on_policy_the_gradient_is_reinforces(name, seed):
    objective = objective_of(name=name)
    logprobs = drawn(seed).requires_grad_()
    terms = batch(rollout_logprobs=logprobs.detach())
    (found,) = torch.autograd.grad(total(objective, PolicyOutputs(logprobs=logprobs), terms), logprobs)
    weights, normalizer = objective.term_weights(terms), objective.normalizer(counts(terms))
    torch.testing.assert_close(found, -weights * terms.advantages / normalizer)


@every_algorithm
@pytest.mark.parametrize("junk", [math.nan, math.inf, -1e30, 3.0])
def test_what_the_mask_leaves_out_never_changes_loss_or_gradient(name, junk):
    objective = objective_of(name=name, kl_coef=0.1, kl_unbiased=True, entropy_coef=0.1, sequence_mask_delta=0.2)

    def loss_and_gradient(value):
        out = tensor(*MASK) == 0
        logprobs = drawn(1).masked_fill(out, value).requires_grad_()
        terms = batch(
            rollout_logprobs=drawn(2).masked_fill(out, value),
            ref_logprobs=drawn(3).masked_fill(out, value),
            advantages=tensor(*ADVANTAGES).masked_fill(out, value).tolist(),
        )
        outputs = PolicyOutputs(logprobs=logprobs, entropy=-logprobs)
        loss = total(objective, outputs, terms)
        metrics = objective(outputs, terms)[1]
        assert all(torch.isfinite(values).all() for values in metrics.values())
        return loss.item(), torch.autograd.grad(loss, logprobs)[0].tolist()

    assert loss_and_gradient(junk) == loss_and_gradient(0.0)


@every_algorithm
def test_two_microbatches_give_the_loss_and_gradient_of_one(name):
    objective = objective_of(name=name, kl_coef=0.1, entropy_coef=0.1)
    logprobs, sampled, reference = drawn(1).requires_grad_(), drawn(2), drawn(3)
    whole = batch(rollout_logprobs=sampled, ref_logprobs=reference)

    def part(first, last, lengths):
        terms = batch(
            rollout_logprobs=sampled[first:last],
            ref_logprobs=reference[first:last],
            advantages=ADVANTAGES[first:last],
            lengths=lengths,
            mask=MASK[first:last],
        )
        outputs = PolicyOutputs(logprobs=logprobs[first:last], entropy=-logprobs[first:last])
        losses, _ = objective(outputs, terms)
        weights = objective.term_weights(terms)
        sums = torch.stack([loss.coef * (weights * loss.values).sum() for loss in losses])
        return sums.sum() / objective.normalizer(counts(whole))

    split = part(0, 5, LENGTHS[:2]) + part(5, 8, LENGTHS[2:])
    one = total(objective, PolicyOutputs(logprobs=logprobs, entropy=-logprobs), whole)
    torch.testing.assert_close(split, one)
    torch.testing.assert_close(torch.autograd.grad(split, logprobs), torch.autograd.grad(one, logprobs))


@every_algorithm
def test_a_batch_that_trains_nothing_has_loss_and_gradient_zero(name):
    logprobs = drawn().requires_grad_()
    terms = batch(rollout_logprobs=drawn(1), mask=(0,) * len(MASK))
    loss = total(objective_of(name=name), PolicyOutputs(logprobs=logprobs), terms)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, logprobs)[0].any()


@pytest.mark.parametrize(
    ("keys", "reference"), [({}, False), ({"entropy_coef": 0.01}, False), ({"kl_coef": 0.01}, True)]
)
def test_only_a_kl_term_needs_a_reference(keys, reference):
    assert objective_of(name="grpo", **keys).needs_reference == reference


def test_dr_grpo_divides_by_max_terms_unless_told_otherwise():
    train = TrainBatch(microbatches=(), num_terms=5, num_rollouts=2)
    assert objective_of(name="dr_grpo").normalizer(train) == 2 * 4
    assert objective_of(name="dr_grpo", aggregation_constant=100).normalizer(train) == 2 * 100


MY_LOSSES = """
from cosmos_rl_core.algorithms.table import Algorithm

def reinforce(logprobs, old_logprobs, terms, config):
    return -terms.advantages * logprobs, {}

def total(logprobs, old_logprobs, terms, config):
    return reinforce(logprobs, old_logprobs, terms, config)[0].sum(), {}

REINFORCE = Algorithm(name="reinforce", title="", paper="", summary="", loss=reinforce)
TOTAL = Algorithm(name="total", title="", paper="", summary="", loss=total)
"""


@pytest.fixture
def my_losses(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(MY_LOSSES)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("my_losses")
def test_a_loss_of_your_own_replaces_the_named_one():
    logprobs = drawn().requires_grad_()
    losses, _ = objective_of(name="my_losses:REINFORCE")(
        PolicyOutputs(logprobs=logprobs), batch(rollout_logprobs=drawn(1))
    )
    trained = tensor(*MASK)
    torch.testing.assert_close(losses[0].values, -tensor(*ADVANTAGES) * logprobs * trained)


@pytest.mark.usefixtures("my_losses")
def test_a_loss_of_the_wrong_shape_is_an_error():
    objective = objective_of(name="my_losses:TOTAL")
    with pytest.raises(UserError, match="one value a term"):
        objective(PolicyOutputs(logprobs=drawn()), batch(rollout_logprobs=drawn(1)))


def test_the_entropy_coefficient_follows_its_target_by_hand():
    objective = objective_of(
        name="grpo", entropy_coef=0.01, entropy_target=0.4, entropy_coef_step=0.01, entropy_coef_max=0.02
    )
    terms = batch(rollout_logprobs=drawn())

    def coef():
        losses, metrics = objective(PolicyOutputs(logprobs=drawn(), entropy=-drawn()), terms)
        coefs = [loss.coef for loss in losses if loss.name == "entropy"]
        assert metrics["entropy_coef"].tolist() == (coefs or [0.0]) * len(MASK)
        return coefs

    assert coef() == []  # no entropy is known yet
    for entropy, expected in [
        (0.3, [0.02]),
        (0.4, [0.02]),
        (0.5, []),
        (0.3, [0.02]),
        (0.5, []),
        (0.5, []),
        (0.1, [0.01]),
    ]:
        objective.stepped({"entropy": entropy})
        assert coef() == pytest.approx(expected)


def test_terms_of_low_entropy_lose_their_policy_and_entropy_loss_and_keep_the_kl():
    logprobs = tensor(-1.0, -2.0)
    terms = batch(
        rollout_logprobs=logprobs, ref_logprobs=logprobs - 1, advantages=(2.0, 2.0), lengths=(2,), mask=(1, 1)
    )
    terms = replace(terms, high_entropy=tensor(0.0, 1.0))
    objective = objective_of(name="grpo", kl_coef=0.1, entropy_coef=0.01, top_entropy=0.5)
    losses, metrics = objective(PolicyOutputs(logprobs=logprobs, entropy=tensor(0.3, 0.5)), terms)
    values = {loss.name: loss.values for loss in losses}
    torch.testing.assert_close(values["policy"], tensor(0.0, -2.0))
    torch.testing.assert_close(values["entropy"], tensor(0.0, -0.5))
    assert (values["kl"] > 0).all()
    assert metrics["high_entropy"].tolist() == [0.0, 1.0]


def test_the_policy_is_kept_near_the_rollout_by_hand():
    logprobs = tensor(-1.0, -2.0)
    terms = batch(rollout_logprobs=logprobs - tensor(0.3, -0.1), advantages=(0.0, 0.0), lengths=(2,), mask=(1, 1))
    objective = objective_of(name="dppo", rollout_kl_coef=0.5)
    assert total(objective, PolicyOutputs(logprobs=logprobs), terms).item() == pytest.approx(0.5 * (0.09 + 0.01) / 2)

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.losses import (
    LOSSES,
    correction_weight,
    importance_ratio,
    sequence_ratio,
    sequence_token_ratio,
    surrogate,
)
from cosmos_rl_core.types import TermBatch

every_loss = pytest.mark.parametrize("name", sorted(LOSSES))
both_of_sequences = pytest.mark.parametrize("name", ["sequence_clipped", "sequence_clipped_token"])


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def terms_of(advantages, *, lengths=None, mask=None):
    """Terms whose rollouts are as long as `lengths` says, all trained unless masked."""
    size = len(advantages)
    lengths = lengths or [size]
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return TermBatch(
        rollout_logprobs=torch.zeros(size, dtype=torch.float64),
        advantages=torch.as_tensor(advantages, dtype=torch.float64),
        loss_mask=torch.ones(size, dtype=torch.float64) if mask is None else tensor(*mask),
        rollout_index=index,
        num_rollouts=len(lengths),
    )


def gradient(values, logprobs):
    return torch.autograd.grad(values.sum(), logprobs)[0]


def of_ratios(*ratios):
    """Log-probs [T] whose ratio to zeros is `ratios`."""
    return tensor(*ratios).log().requires_grad_()


def test_clipped_surrogate_by_hand():
    # clip to [0.8, 1.28]
    #   A = +1, ratio 1.5: -min(1.5, 1.28)  = -1.28, held     A = -1, ratio 0.5: max(0.5, 0.8)  = 0.8, held
    #   A = +1, ratio 0.5: -min(0.5, 0.8)   = -0.5            A = -1, ratio 1.5: max(1.5, 1.28) = 1.5
    #   A = +2, ratio 1.25: -2.5
    advantages = tensor(1, 1, 2, -1, -1)
    values, metrics = surrogate(tensor(1.5, 0.5, 1.25, 0.5, 1.5), advantages, clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(values, tensor(-1.28, -0.5, -2.5, 0.8, 1.5))
    assert metrics["clip_fraction"].tolist() == [1, 0, 0, 1, 0]
    assert metrics["ratio_mean"].tolist() == [1.5, 0.5, 1.25, 0.5, 1.5]


def test_dual_clip_bounds_the_loss_of_bad_terms_by_hand():
    # A = -2: ratio 5 costs 10 without, 3 * 2 = 6 with dual_clip 3; ratio 2 costs 4 either way. A = +2: -1.
    ratio, advantages = tensor(5, 2, 0.5), tensor(-2, -2, 2)
    values, metrics = surrogate(ratio, advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    torch.testing.assert_close(values, tensor(6, 4, -1))
    assert metrics["clip_fraction"].tolist() == [1, 0, 0]


def test_clipped_terms_have_no_gradient_and_others_have_ratio_times_advantage():
    logprobs = of_ratios(1.5, 0.5, 0.5, 1.5, 9.0)
    terms = terms_of([1.0, 1.0, -1.0, -1.0, -1.0])
    config = AlgorithmConfig(dual_clip=3.0)
    values, _ = LOSSES["clipped"](logprobs, torch.zeros_like(logprobs), terms, config)
    # d(-ratio A)/d logprob = -ratio A where neither clip holds
    torch.testing.assert_close(gradient(values, logprobs), tensor(0, -0.5, 0, 1.5, 0))


def test_truncated_by_hand():
    # weight min(ratio, 2); value -weight A logprob; gradient -weight A, also where the cap holds
    logprobs = of_ratios(4.0, 0.5)
    config = AlgorithmConfig(name="aipo", max_ratio=2.0)
    terms = terms_of([1.0, -3.0])
    values, metrics = LOSSES["truncated"](logprobs, torch.zeros_like(logprobs), terms, config)
    torch.testing.assert_close(values.detach(), tensor(-2 * math.log(4), 1.5 * math.log(0.5)))
    torch.testing.assert_close(gradient(values, logprobs), tensor(-2, 1.5))
    assert metrics["clip_fraction"].tolist() == [1, 0]
    torch.testing.assert_close(metrics["ratio_mean"], tensor(4, 0.5))


def test_cispo_by_hand():
    # weight clip(ratio, 1 - 0.4, 1 + 1) = [0.6, 2]: every term keeps -weight A
    logprobs = of_ratios(4.0, 0.5, 1.5)
    config = AlgorithmConfig(name="cispo", clip_low=0.4, clip_high=1.0)
    terms = terms_of([1.0, -3.0, 2.0])
    values, metrics = LOSSES["cispo"](logprobs, torch.zeros_like(logprobs), terms, config)
    torch.testing.assert_close(values.detach(), tensor(-2 * math.log(4), 1.8 * math.log(0.5), -3 * math.log(1.5)))
    torch.testing.assert_close(gradient(values, logprobs), tensor(-2, 1.8, -3))
    assert metrics["clip_fraction"].tolist() == [1, 1, 0]


def test_sequence_ratio_by_hand():
    # rollout 0: (0.2 + 0.4) / 2 = 0.3, without its masked term (9); rollout 1: -0.5; rollout 2: none, e^0
    logprobs = tensor(0.2, 0.4, 9.0, -0.5, 7.0)
    terms = terms_of([1.0] * 5, lengths=[3, 1, 1], mask=[1, 1, 0, 1, 0])
    a, b = math.exp(0.3), math.exp(-0.5)
    for ratio in (sequence_ratio, sequence_token_ratio):
        torch.testing.assert_close(ratio(logprobs, torch.zeros_like(logprobs), terms), tensor(a, a, a, b, 1.0))


@both_of_sequences
def test_gspo_gradient_is_the_papers(name):
    # J = sum_i s_i A_i has dJ/dlogprob_t = s_i A_i / |y_i|; the aggregation weighs each term by 1 / |y_i|
    logprobs = tensor(0.2, 0.4, -0.5).requires_grad_()
    terms = terms_of([2.0, 2.0, -1.0], lengths=[2, 1])
    config = AlgorithmConfig(name="gspo", clip_low=1.0, clip_high=10.0)
    values, _ = LOSSES[name](logprobs, torch.zeros_like(logprobs), terms, config)
    s0, s1 = math.exp(0.3), math.exp(-0.5)
    found = gradient(values * tensor(0.5, 0.5, 1.0), logprobs)
    torch.testing.assert_close(found, tensor(-s0 * 2 / 2, -s0 * 2 / 2, s1))


@both_of_sequences
def test_gspo_gradient_is_that_of_its_value(name):
    terms = terms_of([2.0, 2.0, -1.0, -1.0, -1.0], lengths=[2, 3])
    weights = tensor(1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3)
    config = AlgorithmConfig(name="gspo", clip_low=1.0, clip_high=10.0)

    def loss(logprobs):
        values, _ = LOSSES[name](logprobs, torch.zeros_like(logprobs), terms, config)
        return (values * weights).sum()

    assert torch.autograd.gradcheck(loss, tensor(0.2, 0.4, -0.5, 0.1, 0.3).requires_grad_())


@both_of_sequences
def test_gspo_clips_a_rollout_as_a_whole(name):
    # rollout 0 has s = e^0.3 = 1.35 > 1.2: none of its terms has a gradient, not even that with e^-0.2
    logprobs = tensor(0.8, -0.2, 0.1).requires_grad_()
    terms = terms_of([1.0, 1.0, 1.0], lengths=[2, 1])
    config = AlgorithmConfig(name="gspo", clip_low=0.2, clip_high=0.2)
    values, metrics = LOSSES[name](logprobs, torch.zeros_like(logprobs), terms, config)
    torch.testing.assert_close(values.detach(), tensor(-1.2, -1.2, -math.exp(0.1)))
    torch.testing.assert_close(gradient(values, logprobs), tensor(0, 0, -math.exp(0.1)))
    assert metrics["clip_fraction"].tolist() == [1, 1, 0]


@settings(deadline=None)
@given(
    log_ratios=st.lists(st.floats(-1.5, 1.5), min_size=4, max_size=4),
    advantages=st.lists(st.sampled_from([-2.0, -0.5, 0.5, 2.0]), min_size=4, max_size=4),
)
def test_gradient_of_the_clipped_loss_is_that_of_its_value(log_ratios, advantages):
    config = AlgorithmConfig(dual_clip=3.0)
    kinks = [math.log(0.8), math.log(1.2), math.log(3.0)]
    log_ratios = [x if min(abs(x - kink) for kink in kinks) > 1e-3 else 0.0 for x in log_ratios]
    terms = terms_of(advantages)

    def loss(logprobs):
        return LOSSES["clipped"](logprobs, torch.zeros_like(logprobs), terms, config)[0]

    assert torch.autograd.gradcheck(loss, tensor(*log_ratios).requires_grad_())


@every_loss
@settings(deadline=None)
@given(
    logprobs=st.lists(st.floats(-5, -0.1), min_size=6, max_size=6),
    advantages=st.lists(st.floats(-3, 3), min_size=3, max_size=3),
)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name, logprobs, advantages):
    policy = tensor(*logprobs).requires_grad_()
    lengths = [1, 3, 2]
    terms = terms_of([a for a, n in zip(advantages, lengths, strict=True) for _ in range(n)], lengths=lengths)
    values, metrics = LOSSES[name](policy, policy.detach(), terms, AlgorithmConfig())
    torch.testing.assert_close(gradient(values, policy), -terms.advantages)
    assert metrics["ratio_mean"].tolist() == [1.0] * 6
    assert "clip_fraction" not in metrics or not metrics["clip_fraction"].any()


@every_loss
def test_a_term_the_policy_has_left_far_behind_stays_finite_in_float32(name):
    logprobs = torch.tensor([-200.0, -0.1]).requires_grad_()
    old = torch.tensor([-0.1, -200.0])
    terms = terms_of([1.0, -1.0], lengths=[1, 1])
    values, _ = LOSSES[name](logprobs, old, terms, AlgorithmConfig())
    assert torch.isfinite(values).all()
    assert torch.isfinite(gradient(values, logprobs)).all()


def test_ratio_is_cut_at_e_to_the_20():
    ratio = importance_ratio(tensor(0.0, -100.0), tensor(-100.0, 0.0))
    torch.testing.assert_close(ratio, tensor(math.exp(20), math.exp(-20)))


def test_sapo_by_hand():
    # ratio 1.5, A = 2, tau = 1: gate 4 sigmoid(0.5); ratio 0.5, A = -1, tau = 2: gate 2 sigmoid(-1)
    policy = tensor(math.log(1.5), math.log(0.5)).requires_grad_()
    config = AlgorithmConfig(name="sapo", sapo_temperature_negative=2.0)
    values, _ = LOSSES["sapo"](policy, tensor(0, 0), terms_of([2.0, -1.0]), config)
    up, down = 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(1))
    torch.testing.assert_close(values, tensor(-2 * 4 * up, 2 * down))
    # d/d log(policy) = -4 sigmoid' ratio A, with sigmoid' = sigmoid (1 - sigmoid)
    expected = tensor(-4 * up * (1 - up) * 1.5 * 2, 4 * down * (1 - down) * 0.5)
    torch.testing.assert_close(gradient(values, policy), expected)


def test_vespo_weighs_whole_rollouts_by_hand():
    # rollout 0: w = 2 * 0.25 = 0.5 and A = 1,  phi = 0.5^2 e^(3 (1 - 0.5))
    # rollout 1: w = 1.5 and A = -1,            phi = 1.5^3 e^(2 (1 - 1.5))
    policy = tensor(math.log(2), math.log(0.25), math.log(1.5)).requires_grad_()
    terms = terms_of([1.0, 1.0, -1.0], lengths=[2, 1])
    values, metrics = LOSSES["vespo"](policy, tensor(0, 0, 0), terms, AlgorithmConfig(name="vespo"))
    good, bad = 0.5**2 * math.exp(1.5), 1.5**3 * math.exp(-1)
    torch.testing.assert_close(metrics["sequence_weight"], tensor(good, good, bad))
    torch.testing.assert_close(gradient(values, policy), tensor(-good, -good, bad))


def test_dppo_drops_terms_that_moved_too_far_the_way_they_are_pushed():
    old = tensor(0.5, 0.5, 0.5, 0.5, 0.01).log()
    policy = tensor(0.75, 0.75, 0.25, 0.25, 0.05).log().requires_grad_()
    terms = terms_of([1.0, -1.0, 1.0, -1.0, 1.0])
    values, metrics = LOSSES["dppo"](policy, old, terms, AlgorithmConfig(name="dppo"))
    torch.testing.assert_close(values, tensor(0, 1.5, -0.5, 0, -5))  # a ratio of 5 is kept where 0.04 moved
    torch.testing.assert_close(gradient(values, policy), tensor(0, 1.5, -0.5, 0, -5))
    assert metrics["clip_fraction"].tolist() == [1, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("level", "correction", "weights"),
    [
        ("sequence", "truncate", (2, 2, 0.25, 0.25)),  # products 4 and 0.25
        ("sequence", "mask", (0, 0, 0.25, 0.25)),
        ("geometric", "truncate", (2, 2, 0.5, 0.5)),
        ("geometric", "mask", (2, 2, 0.5, 0.5)),
    ],
)
def test_the_correction_of_whole_rollouts_by_hand(level, correction, weights):
    old = tensor(8.0, 0.5, 0.25, 1.0).log()
    terms = terms_of([1.0] * 4, lengths=[2, 2])
    weight = correction_weight(old, tensor(0, 0, 0, 0), correction=correction, cap=2.0, level=level, terms=terms)
    torch.testing.assert_close(weight, tensor(*weights))

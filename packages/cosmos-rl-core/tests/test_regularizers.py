"""Estimators against exact sums over a categorical distribution of four outcomes."""

from __future__ import annotations

import math

import pytest
import torch

from cosmos_rl_core.algorithms.losses import (
    correction_weight,
    entropy_loss,
    gaussian_kl,
    kl_estimate,
    sequence_mask,
    unbiased_kl,
)
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import TermBatch

REFERENCE = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
SAMPLER = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def policy():
    """Logits with gradient and the log-probs of all four outcomes."""
    logits = tensor(0.3, -0.7, 1.1, 0.2).requires_grad_()
    return logits, logits.log_softmax(0)


def exact_kl(logprobs):
    return (logprobs.exp() * (logprobs - REFERENCE.log())).sum()


def grad(value, logits):
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # policy 0.2, reference 0.1: d = log(0.1 / 0.2) = -log 2
        ("k1", math.log(2)),
        ("k2", math.log(2) ** 2 / 2),
        ("k3", 0.5 - 1 + math.log(2)),
    ],
)
def test_estimators_by_hand(estimator, expected):
    found = kl_estimate(tensor(0.2).log(), tensor(0.1).log(), estimator=estimator)
    torch.testing.assert_close(found, tensor(expected))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_on_policy(estimator):
    _, logprobs = policy()
    mean = (logprobs.exp() * kl_estimate(logprobs, REFERENCE.log(), estimator=estimator)).sum()
    torch.testing.assert_close(mean, exact_kl(logprobs))


def test_k2_is_biased():
    _, logprobs = policy()
    mean = (logprobs.exp() * kl_estimate(logprobs, REFERENCE.log(), estimator="k2")).sum()
    assert abs(mean - exact_kl(logprobs)).item() > 0.005


def test_k2_and_k3_are_never_negative_and_k1_is():
    _, logprobs = policy()
    smallest = {k: kl_estimate(logprobs, REFERENCE.log(), estimator=k).min().item() for k in ("k1", "k2", "k3")}
    assert smallest["k1"] < 0 <= min(smallest["k2"], smallest["k3"])


def mean_gradient_on_policy(estimator):
    """The mean gradient of the estimate over terms drawn from the policy; the drawing itself has none."""
    logits, logprobs = policy()
    estimate = kl_estimate(logprobs, REFERENCE.log(), estimator=estimator)
    return logits, logprobs, grad((logprobs.detach().exp() * estimate).sum(), logits)


def test_k1_has_no_gradient_on_average():
    _, _, found = mean_gradient_on_policy("k1")
    torch.testing.assert_close(found, torch.zeros(4, dtype=torch.float64))


def test_k2_has_the_gradient_of_the_kl_on_average():
    logits, logprobs, found = mean_gradient_on_policy("k2")
    torch.testing.assert_close(found, grad(exact_kl(logprobs), logits))


def test_k3_has_the_gradient_of_the_opposite_kl_on_average():
    logits, logprobs, found = mean_gradient_on_policy("k3")
    opposite = (REFERENCE * (REFERENCE.log() - logprobs)).sum()
    torch.testing.assert_close(found, grad(opposite, logits))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimate_is_the_kl_and_has_its_gradient_under_any_sampler(estimator):
    logits, logprobs = policy()
    ratio = (logprobs - SAMPLER.log()).exp()
    estimate = unbiased_kl(kl_estimate(logprobs, REFERENCE.log(), estimator=estimator), ratio)
    mean = (SAMPLER * estimate).sum()
    torch.testing.assert_close(mean, exact_kl(logprobs))
    torch.testing.assert_close(grad(mean, logits), grad(exact_kl(logprobs), logits))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient_of_the_estimators_is_that_of_their_values(estimator):
    def value(logprobs):
        return unbiased_kl(kl_estimate(logprobs, REFERENCE.log(), estimator=estimator), (logprobs + 1).exp())

    assert torch.autograd.gradcheck(value, policy()[1].detach().requires_grad_())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_term_the_reference_finds_impossible_stays_finite_in_float32(estimator):
    logprobs = torch.tensor([-0.1, -300.0]).requires_grad_()
    estimate = kl_estimate(logprobs, torch.tensor([-300.0, -0.1]), estimator=estimator)
    assert torch.isfinite(estimate).all()
    assert torch.isfinite(torch.autograd.grad(estimate.sum(), logprobs)[0]).all()


def test_entropy_has_its_gradient():
    # H = -sum p log p; dH/dlogit_k = -p_k (log p_k + H)
    logits, logprobs = policy()
    entropy = -(logprobs.exp() * logprobs).sum()
    expected = logprobs.exp() * (logprobs + entropy)  # of the loss, -H
    torch.testing.assert_close(grad(entropy_loss(entropy), logits), expected.detach())


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        # old / rollout = 0.3, 1, 3
        ("truncate", [0.3, 1.0, 2.0]),
        ("mask", [0.0, 1.0, 0.0]),
        ("none", [1.0, 1.0, 1.0]),
    ],
)
def test_correction_weights_by_hand(correction, expected):
    old = tensor(0.3, 1.0, 3.0).log().requires_grad_()
    weight = correction_weight(old, torch.zeros(3, dtype=torch.float64), correction=correction, cap=2.0, floor=0.5)
    torch.testing.assert_close(weight, tensor(*expected))
    assert not weight.requires_grad


def test_sequence_mask_drops_bad_rollouts_the_policy_has_left_by_hand():
    # mean log(rollout / policy): (0.2 + 0.6) / 2 = 0.4 without the masked term, then -0.4, 0.4, 0.1
    # A < 0 in rollouts 0, 1 and 3: only rollout 0 is both bad and beyond 0.3
    terms = TermBatch(
        rollout_logprobs=torch.zeros(6, dtype=torch.float64),
        advantages=tensor(-1, -1, -1, -1, 1, -1),
        loss_mask=tensor(1, 1, 0, 1, 1, 1),
        rollout_index=torch.tensor([0, 0, 0, 1, 2, 3]),
        num_rollouts=4,
    )
    logprobs = tensor(-0.2, -0.6, 50.0, 0.4, -0.4, -0.1)
    assert sequence_mask(logprobs, terms, delta=0.3).tolist() == [0, 0, 0, 1, 1, 1]


def test_the_exact_kl_of_gaussians_is_half_the_squared_distance_of_their_whitened_means():
    mean, ref_mean, std = torch.randn(5, 3), torch.randn(5, 3), 0.4
    wanted = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, std), torch.distributions.Normal(ref_mean, std)
    ).sum(-1)
    assert torch.allclose(gaussian_kl({"whitened": mean / std}, {"whitened": ref_mean / std}), wanted)


def test_the_exact_kl_wants_gaussians():
    with pytest.raises(UserError, match='take "k3"'):
        gaussian_kl({}, {})

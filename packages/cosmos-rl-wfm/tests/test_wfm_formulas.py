from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from wfm_fixtures import seeded

from cosmos_rl_core.algorithms.advantages import build_advantage
from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.losses import gaussian_kl
from cosmos_rl_wfm.objectives.formulas import (
    OLD_WEIGHT_DECAYS,
    flow_matching_loss,
    flow_weight,
    nft_loss,
    nft_losses,
    nft_preference,
    noisy,
)
from cosmos_rl_wfm.objectives.table import ddrl_shaping
from cosmos_rl_wfm.samplers.steps import step


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


# Divergences


def velocity_kl(v, other, *, t, t_next, sigma):
    """The closed form in velocities, |dt| / 2 (sigma (1 - t) / (2 t) + 1 / sigma)^2 mean |v - v'|^2: the paper's."""
    factor = (t - t_next) / 2 * (sigma * (1 - t) / (2 * t) + 1 / sigma).square()
    return factor * (v - other).square().flatten(1).mean(1)


@pytest.mark.parametrize("rule", ["flow_sde", "dance_sde"])
def test_the_divergence_of_steps_is_the_closed_form_in_velocities(rule):
    x, v, other = (torch.randn(3, 2, 5, generator=seeded(seed)) for seed in range(3))
    t, t_next, level, t_first = torch.tensor([1.0, 0.6, 0.2]), torch.tensor([0.8, 0.5, 0.1]), 0.7, 0.8
    a, b = (step(rule, x, of, t=t, t_next=t_next, t_first=t_first, noise_level=level) for of in (v, other))
    below_one = torch.tensor([0.8, 0.6, 0.2])
    sigma = level * (t / (1 - below_one)).sqrt() if rule == "flow_sde" else torch.full((3,), level)
    wanted = velocity_kl(v, other, t=t, t_next=t_next, sigma=sigma)
    found = gaussian_kl({"whitened": a.whitened()}, {"whitened": b.whitened()})
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)


def test_the_divergence_by_hand():
    # std^2 = sigma^2 |dt| = 0.4; means differ by (1 + sigma^2 (1 - t) / (2 t)) dt dv = 0.3 (1, 3): 0.09 5 / 0.8
    x, zero = torch.zeros(1, 2), torch.zeros(1, 2)
    times = {"t": torch.tensor([0.5]), "t_next": torch.tensor([0.4]), "t_first": 0.9, "noise_level": 2.0}
    a, b = (step("dance_sde", x, v, **times) for v in (torch.tensor([[1.0, 3.0]]), zero))
    kl = gaussian_kl({"whitened": a.whitened()}, {"whitened": b.whitened()})
    assert kl.item() == pytest.approx(0.09 * 5 / 0.8)


# Supervised


def test_the_flow_loss_and_its_weights_by_hand():
    # v - (noise - clean) = (1 - 3, 4 - 3) and (0, 2): means of squares 2.5 and 2
    v, clean, noise = tensor([1, 4], [0, 2]), tensor([-1, 1], [0, 0]), tensor([2, 4], [0, 0])
    t = tensor(0.5, 0.25)
    assert flow_matching_loss(v, clean=clean, noise=noise).tolist() == [2.5, 2.0]
    assert flow_weight(t, "uniform").tolist() == [1, 1]
    assert flow_weight(t, "edm").tolist() == [0.5, 1 / 16 + 9 / 16]


def test_the_edm_weighting_is_that_of_the_clean_estimate():
    clean, noise, v = (torch.randn(5, 7, generator=seeded(seed), dtype=torch.float64) for seed in range(3))
    t = tensor(0.1, 0.3, 0.5, 0.7, 0.9)
    sigma, x = t / (1 - t), noisy(clean, noise, t=t)
    error = (x - t[:, None] * v - clean).square().mean(1)
    wanted = (sigma**2 + 1) / sigma**2 * error
    measured = flow_weight(t, "edm") * flow_matching_loss(v, clean=clean, noise=noise)
    torch.testing.assert_close(measured.double(), wanted, rtol=1e-5, atol=0)


# DDRL


def shaped_by_ddrl(advantages, **options):
    config = AlgorithmConfig.model_validate({"name": "ddrl", "options": {"exponential": True, **options}})
    return ddrl_shaping(np.asarray(advantages, np.float64), config)


def test_ddrl_advantages_by_hand():
    assert shaped_by_ddrl([0, math.log(2), -math.log(3)]).tolist() == pytest.approx([-1, -0.5, -3])
    assert shaped_by_ddrl([0, math.log(4)], temperature=2.0).tolist() == pytest.approx([-1, -0.5])


def test_a_group_of_equal_rewards_pushes_nothing():
    config = AlgorithmConfig.model_validate({"name": "ddrl", "options": {"exponential": True}})
    assert build_advantage(config)(np.full(3, 0.3)).tolist() == [0, 0, 0]
    assert (build_advantage(config)(np.array([0.3, 0.2, 0.3])) < 0).all()


def test_ddrl_leaves_advantages_alone_unless_asked():
    config = AlgorithmConfig.model_validate({"name": "ddrl"})
    wanted = 1 / (math.sqrt(2) + 1e-4)  # the sample's standard deviation, as in cosmos-rl
    assert build_advantage(config)(np.array([1.0, 3.0])).tolist() == pytest.approx([-wanted, wanted], rel=1e-12)


def test_ddrl_ends_at_the_data_tilted_by_the_reward():
    # Three outcomes. max_p sum_i p_i stop(lambda(r_i - Z)) - KL(data || p) by its policy gradient, where Z is such that
    # data exp(r - Z) sums to 1: at the optimum lambda + data / p = 0, p = data exp(r - Z).
    data, reward = tensor(0.5, 0.3, 0.2), tensor(0.0, 1.0, -1.0)
    wanted = data * reward.exp() / (data * reward.exp()).sum()
    shaped = torch.from_numpy(shaped_by_ddrl((reward - (data * reward.exp()).sum().log()).numpy()))
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    for _ in range(400):
        p = logits.softmax(0)
        objective = (p * shaped).sum() + (data * p.log()).sum()
        (gradient,) = torch.autograd.grad(objective, logits)
        logits = (logits + gradient).detach().requires_grad_()
    torch.testing.assert_close(logits.softmax(0).detach(), wanted, rtol=0, atol=1e-6)


# DiffusionNFT


def test_the_preference_by_hand():
    assert nft_preference(tensor(-9, -5, -2.5, 0, 5, 9), advantage_limit=5.0).tolist() == [0, 0, 0.25, 0.5, 1, 1]


def test_positive_and_negative_losses_by_hand():
    # v+ = 0.5 (1 + 3) = 2, v- = 1.5 1 - 0.5 3 = 0. At t = 0.5, x = 4: clean estimates 3 and 4, errors 1 and 2 from 2.
    v, old_v, x, clean = tensor([3.0]), tensor([1.0]), tensor([4.0]), tensor([2.0])
    arguments = {"x": x, "t": tensor(0.5), "clean": clean, "beta": 0.5}
    plain = nft_losses(v, old_v, **arguments, self_normalised=False)
    assert [loss.item() for loss in plain] == [1.0, 4.0]
    normalised = nft_losses(v, old_v, **arguments)
    assert [loss.item() for loss in normalised] == [1.0, 2.0]  # over the mean absolute errors 1 and 2
    assert nft_loss(*plain, preference=tensor(0.75), beta=0.5, advantage_limit=5.0).item() == 10 * (0.75 + 0.25 * 4)


def test_the_normaliser_has_no_gradient_and_a_floor():
    v = tensor([2.0, 4.0]).requires_grad_()
    zero = tensor([0.0, 0.0])
    positive, _ = nft_losses(v, zero, x=zero, t=tensor(1), clean=zero, beta=1.0)
    (gradient,) = torch.autograd.grad(positive.sum(), v)
    assert gradient[0].tolist() == pytest.approx([2 / 3, 4 / 3])  # 2 v / 2 elements / mean |error| of 3
    exact, _ = nft_losses(zero, zero, x=zero, t=tensor(1), clean=zero, beta=1.0)
    assert exact.item() == 0


def test_old_weights_get_no_gradient():
    v, old_v = (torch.randn(2, 5, generator=seeded(seed)).requires_grad_() for seed in range(2))
    x, clean = torch.zeros(2, 5), torch.ones(2, 5)
    sum(nft_losses(v, old_v, x=x, t=torch.tensor([0.4, 0.8]), clean=clean, beta=0.5)).sum().backward()
    assert v.grad is not None
    assert old_v.grad is None


@pytest.mark.parametrize("beta, limit", [(1.0, 1.0), (0.1, 5.0)])
def test_the_gradient_at_the_old_weights_is_the_advantage_times_that_of_regression(beta, limit):
    v = torch.randn(2, 5, generator=seeded(), dtype=torch.float64).requires_grad_()
    x, clean = (torch.randn(2, 5, generator=seeded(seed), dtype=torch.float64) for seed in (1, 2))
    t, advantages = tensor(0.4, 0.8), tensor(0.5, -0.25) * limit
    losses = nft_losses(v, v.detach(), x=x, t=t, clean=clean, beta=beta, self_normalised=False)
    preference = nft_preference(advantages, advantage_limit=limit)
    loss = nft_loss(*losses, preference=preference, beta=beta, advantage_limit=limit)
    (gradient,) = torch.autograd.grad(loss.sum(), v)
    regression = (x - t[:, None] * v - clean).square().mean(1)
    (wanted,) = torch.autograd.grad((advantages * regression).sum(), v)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_nft_ends_where_its_theorem_says(beta):
    # At one noisy state three clean outcomes are possible. old_v is the mean of their velocities (x - clean) / t.
    x, t, clean, preference = tensor(0.3), 0.6, tensor(1.0, -0.5, 0.2), tensor(0.9, 0.2, 0.5)
    single = (x - clean) / t
    old_v = single.mean()
    wanted = old_v + 2 / beta * (preference * (single - old_v)).mean()
    v = old_v.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([v], max_iter=50, tolerance_grad=1e-12)

    def loss():
        optimizer.zero_grad()
        rows = {"x": x.expand(3, 1), "t": torch.full((3,), t), "clean": clean[:, None]}
        losses = nft_losses(v.expand(3, 1), old_v.expand(3, 1), **rows, beta=beta, self_normalised=False)
        value = nft_loss(*losses, preference=preference, beta=beta).mean()
        value.backward()
        return value

    optimizer.step(loss)
    assert v.item() == pytest.approx(wanted.item(), abs=1e-5)
    assert v.item() != pytest.approx(old_v.item(), abs=0.1)


def test_decays_of_old_weights_by_hand():
    at = {name: [decay.at(update) for update in (0, 75, 76, 400, 10_000)] for name, decay in OLD_WEIGHT_DECAYS.items()}
    assert at["none"] == [0, 0, 0, 0, 0]
    assert at["slow"] == pytest.approx([0, 0.075, 0.076, 0.4, 0.5])
    assert at["late"] == pytest.approx([0, 0, 0.0075, 0.999, 0.999])

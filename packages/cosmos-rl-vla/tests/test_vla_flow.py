"""The formulas of `flow`, against values worked out by hand, torch.distributions and simulation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Beta, Normal

from cosmos_rl_vla.config import ActionNoiseSection as Noise
from cosmos_rl_vla.models import flow
from cosmos_rl_vla.models.flow import ActionGaussian

X = torch.tensor([[[0.8, -0.4]]])
V = torch.tensor([[[0.5, 1.0]]])


def step(noise, index, *, num_steps=4, x=X, v=V, std=None):
    return flow.transition(x, v, index=torch.tensor([index]), num_steps=num_steps, noise=noise, std=std)


def test_times_run_from_noise_to_action():
    assert flow.times(torch.arange(5), num_steps=4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_mixing_is_the_straight_line_from_action_to_noise():
    actions, noise = torch.zeros(2, 1, 3), torch.ones(2, 1, 3)
    assert flow.mix(actions, noise, torch.tensor([0.25, 1.0]))[:, 0, 0].tolist() == [0.25, 1.0]


def test_euler_steps_along_the_true_velocity_end_at_the_action():
    action, noise = torch.randn(1, 3, 2), torch.randn(1, 3, 2)
    x = noise
    for _ in range(4):
        x = flow.ode_step(x, noise - action, num_steps=4)
    torch.testing.assert_close(x, action)


def test_flow_sde_by_hand():
    # tau = .5, next = .25, sigma^2 = .6^2 * .5 / .5 = .36; action = x - .5 v, noise = x + .5 v
    # weights: .75 and .25 - .36 * .25 / (2 * .5) = .16; std = .6 * .5
    drawn = step(Noise(kind="sde", level=0.6), 2)
    torch.testing.assert_close(drawn.mean, 0.75 * torch.tensor([[[0.55, -0.9]]]) + 0.16 * torch.tensor([[[1.05, 0.1]]]))
    torch.testing.assert_close(drawn.std.flatten(), torch.tensor([0.3]))


def test_flow_sde_at_the_first_step_takes_the_next_denominator():
    # tau = 1: sigma^2 = .6^2 / (1 - .75)
    assert step(Noise(kind="sde", level=0.6), 0).std.item() == pytest.approx(math.sqrt(0.36 / 0.25 / 4))


def test_flow_cps_by_hand():
    drawn = step(Noise(kind="cps", level=0.5), 2)
    half = math.sqrt(0.5)  # an angle of 45 degrees
    expected = 0.75 * torch.tensor([[[0.55, -0.9]]]) + 0.25 * half * torch.tensor([[[1.05, 0.1]]])
    torch.testing.assert_close(drawn.mean, expected)
    assert drawn.std.item() == pytest.approx(0.25 * half)


def test_flow_cps_draws_nothing_at_the_last_step():
    drawn = step(Noise(kind="cps", level=0.5), 3)
    assert drawn.std.item() == 0
    assert drawn.logprob(X).tolist() == [[[0.0, 0.0]]]


@pytest.mark.parametrize("index", range(4))
def test_fixed_and_learned_noise_have_the_mean_of_the_ode(index):
    std = torch.full_like(X, 0.1)
    for drawn in (
        step(Noise(kind="fixed", level=0.3), index),
        step(Noise(kind="learned"), index, std=std),
    ):
        torch.testing.assert_close(drawn.mean, flow.ode_step(X, V, num_steps=4))


@given(level=st.floats(0.05, 1.0), index=st.integers(0, 3), kind=st.sampled_from(["sde", "cps", "fixed"]))
@settings(max_examples=30, deadline=None)
def test_the_log_prob_is_that_of_torch_distributions(level, index, kind):
    drawn = step(Noise(kind=kind, level=level), index)
    if drawn.std.min() > 0:
        expected = Normal(drawn.mean, drawn.std.expand_as(drawn.mean)).log_prob(X)
        torch.testing.assert_close(drawn.logprob(X), expected)


def test_entropy_is_that_of_torch_distributions():
    std = torch.tensor([0.1, 2.0])
    torch.testing.assert_close(ActionGaussian(mean=torch.zeros(2), std=std).entropy(), Normal(0.0, std).entropy())


def test_the_gradient_of_the_log_prob_is_that_of_the_density():
    velocity = V.clone().requires_grad_()
    step(Noise(kind="fixed", level=0.3), 3, v=velocity).logprob(X).sum().backward()
    mean = X - V / 4
    torch.testing.assert_close(velocity.grad, -(X - mean) / 0.3**2 / 4)


def test_a_certain_component_has_no_gradient_and_no_nan():
    mean = torch.zeros(2, requires_grad=True)
    ActionGaussian(mean=mean, std=torch.tensor([0.0, 1.0])).logprob(torch.ones(2)).sum().backward()
    assert mean.grad.tolist() == [0.0, 1.0]


def test_half_the_squared_distance_of_whitened_means_is_the_divergence():
    a, b = (step(Noise(kind="fixed", level=0.3), 3, v=v) for v in (V, 2 * V))
    expected = torch.distributions.kl_divergence(Normal(a.mean, 0.3), Normal(b.mean, 0.3))
    torch.testing.assert_close((a.whitened() - b.whitened()).square() / 2, expected)


def test_flow_sde_keeps_the_distribution_of_the_ode():
    # data N(0, s^2): x_tau ~ N(0, tau^2 + (1 - tau)^2 s^2), and the true velocity is linear in x
    s, steps = 0.5, 400
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 1, 1, generator=generator)
    for index in range(steps // 2):  # to tau = 1/2
        tau = 1 - index / steps
        variance = tau**2 + (1 - tau) ** 2 * s**2
        velocity = x * (tau - (1 - tau) * s**2) / variance
        drawn = flow.transition(
            x,
            velocity,
            index=torch.full((len(x),), index),
            num_steps=steps,
            noise=Noise(kind="sde", level=0.3),
        )
        x = drawn.mean + drawn.std * torch.randn(x.shape, generator=generator)
    assert x.std().item() == pytest.approx(math.sqrt(0.25 + 0.25 * s**2), rel=0.03)


def test_the_learned_std_stays_between_its_bounds():
    std = flow.bounded_std(torch.tensor([-100.0, 0.0, 100.0]), noise=Noise(std_low=0.08, std_high=0.16))
    torch.testing.assert_close(std, torch.tensor([0.08, math.sqrt(0.08 * 0.16), 0.16]))


def test_supervised_times_follow_the_beta_distribution():
    tau = flow.supervised_times(torch.linspace(0, 1, 100_001))
    beta = Beta(1.5, 1.0)
    assert tau.min() == pytest.approx(0.001)
    assert tau.max() == pytest.approx(1.0)
    assert tau.mean().item() == pytest.approx(0.999 * beta.mean.item() + 0.001, abs=1e-3)
    assert tau.std().item() == pytest.approx(0.999 * beta.stddev.item(), abs=1e-3)

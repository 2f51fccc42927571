from __future__ import annotations

import asyncio
import math

import pytest
import torch
from wfm_fixtures import mock_data, pixel_model, prompt

from cosmos_rl_wfm.build import build_engine
from cosmos_rl_wfm.engines.torch import WFMTorchOptions
from cosmos_rl_wfm.objectives.formulas import noisy
from cosmos_rl_wfm.samplers.sampler import DenoisingPlan, sample
from cosmos_rl_wfm.samplers.steps import RULES, StateGaussian, step
from cosmos_rl_wfm.samplers.times import flow_times
from cosmos_rl_wfm.samplers.window import WindowChoice
from cosmos_rl_wfm.samplers.window import WindowSection as Window
from cosmos_rl_wfm.sampling import FlowSampling

stochastic_rules = pytest.mark.parametrize("rule", sorted(set(RULES) - {"ode"}))


def column(*values):
    return torch.tensor(values)


def one_step(rule, *, x, v, t, t_next, noise_level=0.5, t_first=0.9):
    """A step of one sample with one element."""
    reached = step(
        rule,
        torch.tensor([[x]]),
        torch.tensor([[v]]),
        t=column(t),
        t_next=column(t_next),
        t_first=t_first,
        noise_level=noise_level,
    )
    return reached.mean.item(), reached.std.item()


def random_step(rule, *, shape=(3, 2, 4), seed=0, noise_level=0.6):
    generator = torch.Generator().manual_seed(seed)
    x, v = (torch.randn(shape, generator=generator) for _ in range(2))
    t, t_next = torch.tensor([1.0, 0.7, 0.3]), torch.tensor([0.9, 0.5, 0.1])
    return step(rule, x, v, t=t, t_next=t_next, t_first=0.9, noise_level=noise_level), generator


# By hand, from x = 1, v = 2, t = 0.8, t_next = 0.5: clean = 1 - 1.6 = -0.6, noise = 1 + 0.4 = 1.4, dt = -0.3.


def test_an_ode_step_by_hand():
    assert one_step("ode", x=1.0, v=2.0, t=0.8, t_next=0.5) == pytest.approx((0.4, 0.0))


def test_a_flow_sde_step_by_hand():
    # sigma^2 = 0.25 * 0.8 / 0.2 = 1; mean = 1 + (2 + 1 / 1.6 * 1.4) (-0.3) = 0.1375; std = sqrt(0.3)
    assert one_step("flow_sde", x=1.0, v=2.0, t=0.8, t_next=0.5) == pytest.approx((0.1375, math.sqrt(0.3)))


def test_flow_sde_at_time_one_takes_the_second_time_of_the_schedule_in_its_denominator():
    # sigma^2 = 0.25 * 1 / (1 - 0.9) = 2.5; noise = x = 1; mean = 1 + (2 + 1.25) (-0.1) = 0.675; std = sqrt(0.25)
    assert one_step("flow_sde", x=1.0, v=2.0, t=1.0, t_next=0.9) == pytest.approx((0.675, 0.5))


def test_a_dance_sde_step_by_hand():
    # score = -1.4 / 0.8 = -1.75; mean = 1 - 0.3 (2 + 0.5 * 0.25 * 1.75) = 0.334375; std = 0.5 sqrt(0.3)
    assert one_step("dance_sde", x=1.0, v=2.0, t=0.8, t_next=0.5) == pytest.approx((0.334375, 0.5 * math.sqrt(0.3)))


def test_a_cps_step_by_hand():
    # angle = 0.5 pi / 2; mean = 0.5 (-0.6) + 0.5 cos(pi / 4) 1.4; std = 0.5 sin(pi / 4)
    root = math.sqrt(0.5)
    assert one_step("cps", x=1.0, v=2.0, t=0.8, t_next=0.5) == pytest.approx((-0.3 + 0.7 * root, 0.5 * root))


def test_cps_keeps_the_amounts_of_clean_and_noise_exactly():
    # At a noisy state of known clean and noise, with v = noise - clean.
    clean, noise = torch.tensor([[2.0]]), torch.tensor([[1.0]])
    t, t_next = column(0.7), column(0.4)
    reached = step("cps", noisy(clean, noise, t=t), noise - clean, t=t, t_next=t_next, t_first=0.9, noise_level=0.3)
    on_noise = reached.mean - (1 - t_next) * clean  # what is left of the old noise of size 1
    torch.testing.assert_close((on_noise.square() + reached.std.square()).sqrt(), torch.tensor([[0.4]]))


def test_cps_without_old_noise_samples_all_again():
    mean, std = one_step("cps", x=1.0, v=2.0, t=0.8, t_next=0.5, noise_level=1.0)
    assert (mean, std) == pytest.approx((0.5 * -0.6, 0.5))


def test_churn_is_cps_at_the_raised_times():
    # EDM by hand in its own coordinates x / (1 - t): Euler from sigma_hat to sigma_next, then churned up by eta.
    x, v, t, s_churn, steps, sigma_next = 0.3, -0.8, 0.75, 2.0, 30, 1.5
    eta, sigma_hat = s_churn / steps, t / (1 - t)
    clean = x - t * v
    euler = clean + (sigma_next / sigma_hat) * (x / (1 - t) - clean)
    raised = (1 + eta) * sigma_next
    t_next = raised / (1 + raised)
    wanted = euler * (1 - t_next), sigma_next * math.sqrt(eta**2 + 2 * eta) * (1 - t_next)
    level = 2 / math.pi * math.acos(1 / (1 + eta))
    assert one_step("cps", x=x, v=v, t=t, t_next=t_next, noise_level=level) == pytest.approx(wanted)


@stochastic_rules
def test_logprob_is_the_mean_of_torch_distributions(rule):
    reached, generator = random_step(rule)
    sampled = reached.sample(torch.randn(reached.mean.shape, generator=generator))
    density = torch.distributions.Normal(reached.mean.double(), reached.std.double()[:, None, None])
    torch.testing.assert_close(
        reached.logprob(sampled).double(), density.log_prob(sampled).mean((1, 2)), rtol=1e-5, atol=0
    )


@stochastic_rules
def test_logprob_is_the_density_of_what_sample_returns(rule):
    # Change of variables, by autograd through `sample`: log p(x') = log N(noise) - log |d x' / d noise|.
    reached, generator = random_step(rule, shape=(3, 5))
    noise = torch.randn(3, 5, generator=generator)
    jacobian = torch.autograd.functional.jacobian(reached.sample, noise)
    for i in range(3):
        normal = torch.distributions.Normal(0, 1).log_prob(noise[i]).sum()
        total = normal - torch.linalg.slogdet(jacobian[i, :, i]).logabsdet
        torch.testing.assert_close(reached.logprob(reached.sample(noise))[i], total / 5, rtol=1e-5, atol=1e-6)
        assert not jacobian[i, :, [j for j in range(3) if j != i]].any()  # samples do not meet


def test_the_gradient_of_logprob_by_the_mean_is_the_whitened_noise():
    mean = torch.zeros(1, 4, requires_grad=True)
    noise = torch.tensor([[0.5, -1.0, 2.0, 0.0]])
    reached = StateGaussian(mean=mean, std=column(0.25))
    reached.logprob(reached.sample(noise).detach()).sum().backward()
    torch.testing.assert_close(mean.grad, noise / (0.25 * 4))  # (x' - mean) / std^2, and a mean over 4 elements


def test_half_the_squared_distance_of_whitened_means_is_the_divergence():
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(2, 3, 4, generator=generator) for _ in range(2))
    std = column(0.3, 2.0)
    a, b = StateGaussian(mean=first, std=std), StateGaussian(mean=second, std=std)
    spread = std[:, None, None]
    wanted = torch.distributions.kl_divergence(
        torch.distributions.Normal(first, spread), torch.distributions.Normal(second, spread)
    )
    measured = 0.5 * (a.whitened() - b.whitened()).square().sum(1)
    torch.testing.assert_close(measured, wanted.mean((1, 2)), rtol=1e-5, atol=0)


def test_a_step_computes_in_float32_whatever_the_network_returns():
    x, v = torch.ones(1, 2), torch.full((1, 2), 1 / 3, dtype=torch.bfloat16)
    reached = step("flow_sde", x, v, t=column(0.5), t_next=column(0.4), t_first=0.9, noise_level=0.7)
    wanted = step("flow_sde", x, v.float(), t=column(0.5), t_next=column(0.4), t_first=0.9, noise_level=0.7)
    assert reached.mean.dtype == torch.float32
    assert torch.equal(reached.mean, wanted.mean)


@pytest.mark.parametrize("level", [0.0, -0.1, 1.5])
def test_a_noise_level_that_a_rule_cannot_take_is_named(level):
    with pytest.raises(ValueError, match=f"cps does not accept noise_level = {level}"):
        one_step("cps", x=1.0, v=1.0, t=0.5, t_next=0.4, noise_level=level)


def test_an_unknown_rule_is_answered_with_those_there_are():
    with pytest.raises(ValueError, match=r"'flow-sde'; there are 'flow_sde', 'dance_sde', 'cps', 'ode'"):
        one_step("flow-sde", x=1.0, v=1.0, t=0.5, t_next=0.4)


# Marginals. For x_0 ~ N(MEAN, SPREAD^2) in every element, E[noise - x_0 | x_t] is known in closed form.

MEAN, SPREAD = 1.5, 0.6


def known_velocity(x, times):
    t = times.view(-1, 1)
    variance = ((1 - t) * SPREAD) ** 2 + t**2
    centred = (x - (1 - t) * MEAN) / variance
    return t * centred - (MEAN + (1 - t) * SPREAD**2 * centred)


def end_of(rule, *, num_steps, noise_level=0.0, order=1):
    """Mean and deviation of the clean latents over 4 samples of 10,000 elements, each a scalar of its own."""
    generator = torch.Generator().manual_seed(3)
    plan = DenoisingPlan(
        times=flow_times(num_steps),
        rule=rule,
        noise_level=noise_level,
        steps=WindowChoice() if rule == "ode" else Window().choose_steps(num_steps),
        order=order,
    )
    clean = sample(known_velocity, torch.randn(4, 10_000, generator=generator), plan=plan, seeds=range(4)).clean
    return clean.mean().item(), clean.std().item()


@pytest.mark.parametrize("rule, noise_level", [("ode", 0.0), ("flow_sde", 0.7), ("dance_sde", 0.3), ("dance_sde", 0.8)])
def test_marginals_are_those_of_the_data_whatever_the_noise(rule, noise_level):
    # Standard errors: 0.003 of the mean, 0.002 of the deviation; the rest is the steps' size.
    mean, deviation = end_of(rule, num_steps=400, noise_level=noise_level)
    assert mean == pytest.approx(MEAN, abs=0.012)
    assert deviation == pytest.approx(SPREAD, abs=0.008)


def test_second_order_needs_fewer_steps():
    # The exact ODE takes noise z to MEAN + SPREAD z.
    generator = torch.Generator().manual_seed(3)
    exact = SPREAD * torch.randn(4, 10_000, generator=generator).std().item()
    error = {
        (order, steps): abs(end_of("ode", num_steps=steps, order=order)[1] - exact)
        for order in (1, 2)
        for steps in (20, 40)
    }
    assert error[1, 20] / error[1, 40] == pytest.approx(2, abs=0.2)
    assert error[2, 20] / error[2, 40] > 3
    assert error[2, 20] < error[1, 40] / 2


def test_second_order_forgets_the_velocity_before_the_noise():
    # Steps 0 and 1 add noise: step 2 is of first order again.
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(1, 6, generator=generator)
    states = []

    def watched(x, times):
        states.append(x)
        return known_velocity(x, times)

    plan = DenoisingPlan(
        times=flow_times(6),
        rule="cps",
        noise_level=0.5,
        steps=Window(window="fixed", steps=(0, 1)).choose_steps(6),
        order=2,
    )
    clean = sample(watched, noise, plan=plan, seeds=[0]).clean
    times = plan.times
    of = [known_velocity(x, t[None]) for x, t in zip(states, times)]
    torch.testing.assert_close(states[3], states[2] - of[2] / 6)
    torch.testing.assert_close(states[4], states[3] - (1.5 * of[3] - 0.5 * of[2]) / 6)
    torch.testing.assert_close(clean, states[5] - of[5] / 6)  # and the last one too


def test_a_recipe_chooses_the_order():
    assert FlowSampling().plan(shift=1.0).order == 1
    chosen = FlowSampling(solver_order=2)
    assert chosen.plan(shift=1.0).order == 2
    assert chosen.evaluation(temperature=0.0, max_terms=None).plan(shift=1.0).order == 2


def test_an_engine_of_second_order_ends_nearer_to_that_of_many_steps():
    def clean(**keys):
        engine = build_engine(pixel_model(), data=mock_data(), options=WFMTorchOptions())

        async def generate():
            sampled = await engine.generate(prompt(), num_samples=2, sampling=FlowSampling(rule="ode", **keys), seed=1)
            await engine.close()
            return torch.stack([torch.from_numpy(rollout.arrays["clean"]) for rollout in sampled[1]])

        return asyncio.run(generate())

    exact = clean(num_steps=1000)
    error = {order: (clean(num_steps=64, solver_order=order) - exact).abs().mean() for order in (1, 2)}
    assert 0 < error[2] < error[1] / 2

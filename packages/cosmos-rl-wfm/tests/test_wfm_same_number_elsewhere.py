"""flow_grpo's, DiffusionNFT's, cosmos-rl's and diffusers' formulas, beside our keys that are said to mean the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from wfm_fixtures import seeded

from cosmos_rl_core.algorithms.advantages import build_advantage, build_batch_advantage
from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.losses import gaussian_kl
from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.samplers.steps import step
from cosmos_rl_wfm.samplers.times import flow_match_euler_times, flow_times
from cosmos_rl_wfm.sampling import FlowSampling

REWARDS = (np.array([0.0, 1.0, 0.0, 1.0]), np.array([0.9, 1.0, 1.0, 0.9]), np.array([0.0, 0.0, 0.0, 1.0]))


@pytest.mark.parametrize(("num_steps", "shift"), [(10, 3.0), (20, 5.0)])
def test_exact_dt_is_the_kl_of_flow_grpos_scripts_for_images_and_exact_is_one_over_dt_times_that(num_steps, shift):
    times = flow_times(num_steps, shift=shift)
    t, t_next, level = times[:-2], times[1:-1], 0.7
    x, v, ref_v = (torch.randn(len(t), 4, 6, generator=seeded(seed)) for seed in range(3))
    of = {"t": t, "t_next": t_next, "t_first": float(times[1]), "noise_level": level}
    policy, reference = step("flow_sde", x, v, **of), step("flow_sde", x, ref_v, **of)
    outputs = {"whitened": policy.whitened(), "dt": t - t_next}
    others = {"whitened": reference.whitened()}

    distance = (policy.mean - reference.mean).double().square().mean((1, 2))
    below_one = torch.where(t == 1, times[1], t).double()
    std_dev_t = level * (t.double() / (1 - below_one)).sqrt()  # without sqrt(-dt), as the script calls it
    torch.testing.assert_close(
        gaussian_kl(outputs, others, estimator="exact_dt").double(), distance / (2 * std_dev_t**2), rtol=1e-4, atol=0
    )
    exact = gaussian_kl(outputs, others, estimator="exact")  # as its script for Wan: 2 (std_dev_t sqrt(-dt))^2
    ratio = exact / gaussian_kl(outputs, others, estimator="exact_dt")
    torch.testing.assert_close(ratio, 1 / (t - t_next))
    assert ratio.max() > 20


def test_exact_dt_is_for_steps_that_have_a_length():
    with pytest.raises(UserError, match='take "exact"'):
        gaussian_kl({"whitened": torch.zeros(1, 2)}, {"whitened": torch.zeros(1, 2)}, estimator="exact_dt")


@pytest.mark.parametrize("name", ["flow_grpo", "nft"])
def test_advantages_are_those_of_global_std(name):
    # PerPromptStatTracker(global_std=True): numpy's std over the rewards of all prompts, + 1e-4
    divisor = np.concatenate(REWARDS).std() + 1e-4
    found = build_batch_advantage(AlgorithmConfig(name=name))
    assert found is not None
    wanted = [(rewards - rewards.mean()) / divisor for rewards in REWARDS]
    np.testing.assert_allclose(found(REWARDS), wanted, rtol=1e-13)


def test_groups_that_differ_in_their_means_alone_are_muted_by_global_std_and_blown_up_by_pooled_std():
    groups = [np.array([mean - 1e-5, mean + 1e-5]) for mean in (0.0, 0.5, 1.0)]
    largest = {}
    for advantage in ("global_std", "pooled_std"):
        of_step = build_batch_advantage(AlgorithmConfig.model_validate({"advantage": advantage}))
        assert of_step is not None
        largest[advantage] = np.abs(of_step(groups)).max()
    assert largest["global_std"] < 1e-4 and largest["pooled_std"] > 0.9


@pytest.mark.parametrize("exponential", [False, True])
def test_ddrls_advantages_are_those_of_cosmos_rls_trainer(exponential):
    # torch's std + 1e-4 of the group, -exp(-A), and the clip to 5 after that
    rewards = torch.tensor([0.0, *[1.0] * 9], dtype=torch.float64)
    wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    if exponential:
        wanted = -torch.exp(-wanted)
        assert wanted.min() < -10
    wanted = wanted.clamp(-5, 5)
    config = AlgorithmConfig.model_validate({"name": "ddrl", "options": {"exponential": exponential}})
    np.testing.assert_allclose(build_advantage(config)(rewards.numpy()), wanted, rtol=1e-13)


def test_flow_grpos_row_reads_as_flow_grpos_configuration():
    config = AlgorithmConfig(name="flow_grpo")
    assert (config.kl_coef, config.kl_estimator) == (0.04, "exact_dt")
    assert (config.advantage_clip, config.clip_low, config.clip_high) == (5.0, 1e-4, 1e-4)


# Times


def test_flow_match_euler_times_by_hand():
    # linspace(1, s, 3) with s = shifted(1 / 1000), then shifted: t -> 3 t / (1 + 2 t)
    least = 3e-3 / (1 + 2e-3)
    wanted = [3 * t / (1 + 2 * t) for t in (1, (1 + least) / 2, least)]
    assert flow_match_euler_times(3, shift=3.0).tolist() == pytest.approx([*wanted, 0.0], rel=1e-6)
    assert math.isclose(wanted[-1], 0.0089, abs_tol=1e-4)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("num_steps", [1, 2, 10, 40])
def test_flow_match_euler_times_are_the_schedulers(num_steps, shift):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(num_steps)
    found = flow_match_euler_times(num_steps, shift=shift)
    torch.testing.assert_close(found, scheduler.sigmas, rtol=0, atol=2e-7)
    assert (found[0], found[-1]) == (1, 0)


def test_a_recipe_chooses_them():
    sampling = FlowSampling(num_steps=10, schedule="flow_match_euler")
    assert torch.equal(sampling.plan(shift=3.0).times, flow_match_euler_times(10, shift=3.0))
    usual = sampling.model_copy(update={"schedule": "flow"}).plan(shift=3.0)
    assert torch.equal(usual.times, flow_times(10, shift=3.0))

"""Times and windows: where the steps of a rollout lie, and which of them are trained."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wfm_fixtures import seeded

from cosmos_rl_wfm.samplers.times import edm_times, flow_times, sample_times
from cosmos_rl_wfm.samplers.window import WindowChoice
from cosmos_rl_wfm.samplers.window import WindowSection as Window

# Times


def test_flow_times_by_hand():
    assert flow_times(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    shifted = torch.tensor([1.0, 9 / 10, 3 / 4, 1 / 2, 0.0])  # 3 t / (1 + 2 t)
    torch.testing.assert_close(flow_times(4, shift=3.0), shifted)


@given(steps=st.integers(1, 60), shift=st.floats(0.1, 20))
def test_flow_times_descend_from_exactly_one_to_exactly_zero(steps, shift):
    times = flow_times(steps, shift=shift)
    assert (times[0], times[-1], len(times)) == (1.0, 0.0, steps + 1)
    assert (times.diff() < 0).all()


def test_edm_times_by_hand():
    times = edm_times(3).double()
    middle = ((200 ** (1 / 7) + 0.01 ** (1 / 7)) / 2) ** 7
    wanted = torch.tensor([200 / 201, middle / (1 + middle), 0.01 / 1.01, 0.0], dtype=torch.float64)
    torch.testing.assert_close(times, wanted, rtol=1e-6, atol=0)


def test_times_refuse_what_cannot_be():
    with pytest.raises(ValueError, match="1 denoising step or more, not 0"):
        flow_times(0)
    with pytest.raises(ValueError, match="shift of times must be above 0, not 0"):
        flow_times(4, shift=0.0)
    with pytest.raises(ValueError, match="sigma_min = 3"):
        edm_times(4, sigma_min=3.0, sigma_max=1.0)


def test_sampled_times_have_the_density():
    uniform = sample_times(20_000, generator=seeded())
    assert uniform.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist() == pytest.approx([0.25, 0.5, 0.75], abs=0.01)
    normal = sample_times(20_000, generator=seeded(), density="logit_normal", mean=-0.5, std=0.8).logit()
    assert (normal.mean().item(), normal.std().item()) == pytest.approx((-0.5, 0.8), abs=0.02)
    shifted = sample_times(20_000, generator=seeded(), shift=4.0)
    torch.testing.assert_close(shifted, 4 * uniform / (1 + 3 * uniform))


def test_sampled_times_repeat_with_the_generator():
    assert torch.equal(sample_times(5, generator=seeded(7)), sample_times(5, generator=seeded(7)))
    with pytest.raises(ValueError, match="unknown density of times 'beta'"):
        sample_times(5, generator=seeded(), density="beta")


# Windows


def test_all_steps_but_the_last():
    assert Window().choose_steps(5) == WindowChoice(stochastic=(0, 1, 2, 3), trained=(0, 1, 2, 3))


def test_fixed_steps_with_the_ode_or_noise_elsewhere():
    assert Window(window="fixed", steps=(4, 0, 2)).choose_steps(8) == WindowChoice(
        stochastic=(0, 2, 4), trained=(0, 2, 4)
    )
    everywhere = Window(window="fixed", steps=(0, 2), elsewhere="sde").choose_steps(5)
    assert everywhere == WindowChoice(stochastic=(0, 1, 2, 3), trained=(0, 2))


def test_a_sliding_window_moves_from_noise_to_clean_and_stays():
    window = Window(window="sliding", width=3, stride=2, every=10)
    at = {version: window.choose_steps(9, version=version).trained for version in (0, 9, 10, 20, 30, 1000)}
    assert at == {0: (0, 1, 2), 9: (0, 1, 2), 10: (2, 3, 4), 20: (4, 5, 6), 30: (5, 6, 7), 1000: (5, 6, 7)}


def test_a_sliding_window_starts_over_where_asked():
    window = Window(window="sliding", width=2, stride=1, every=1, low=1, high=4, restart=True)
    assert [window.choose_steps(6, version=version).trained for version in range(3)] == [(1, 2), (2, 3), (1, 2)]


@settings(max_examples=60)
@given(
    name=st.sampled_from(["random_window", "random_subset"]), seed=st.integers(0, 10**9), version=st.integers(0, 10**4)
)
def test_random_windows_stay_in_their_range_and_repeat(name, seed, version):
    window = Window(window=name, width=3, low=1, high=8)
    trained = window.choose_steps(12, version=version, seed=seed).trained
    assert trained == window.choose_steps(12, version=version, seed=seed).trained
    assert len(set(trained)) == 3
    assert trained == tuple(sorted(trained))
    assert trained[0] >= 1
    assert trained[-1] < 8
    if name == "random_window":
        assert trained[-1] - trained[0] == 2


@pytest.mark.parametrize("name, count", [("random_window", 5), ("random_subset", 35)])
def test_random_windows_visit_every_place_and_change_with_version_and_seed(name, count):
    window = Window(window=name, width=3, high=7)
    by_version = {window.choose_steps(10, version=version).trained for version in range(400)}
    by_seed = {window.choose_steps(10, seed=seed).trained for seed in range(400)}
    assert len(by_version) == len(by_seed) == count  # 5 places of 3 neighbours in 7; 7 over 3 subsets


@pytest.mark.parametrize(
    "window, steps, message",
    [
        (Window(window="fixed", steps=(0, 4)), 5, "name steps from 0 to 3"),
        (Window(window="fixed"), 5, r"steps = \[\]"),
        (Window(window="sliding", width=4), 4, "a window of 4 steps does not fit steps 0 to 2 of 4"),
        (Window(window="random_subset", width=1, high=4), 4, "the last one, 3, is never trained"),
        (Window(), 1, "2 denoising steps or more"),
    ],
)
def test_a_window_that_does_not_fit_is_named(window, steps, message):
    with pytest.raises(ValueError, match=message):
        window.choose_steps(steps)

"""Statistics of actions: there and back, files, and what does not fit."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import save_file

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.actions import FILE, ActionStats, Gripper, Spread

DEMOS = np.array([[0.0, 10.0, 1.0], [1.0, 20.0, 1.0], [2.0, 30.0, 0.0]])


def test_percentiles_become_minus_one_and_one():
    spread = replace(Spread.of(DEMOS), q01=np.array([0, 10, 0], np.float32), q99=np.array([2, 30, 1], np.float32))
    np.testing.assert_allclose(spread.normalise(DEMOS), [[-1, -1, 1], [0, 0, 1], [1, 1, -1]])


def test_mean_and_std_become_zero_and_one():
    normalised = Spread.of(DEMOS, kind="mean_std").normalise(DEMOS)
    np.testing.assert_allclose(normalised.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(normalised.std(0), 1, rtol=1e-6)


@given(arrays(np.float32, (4, 3), elements=st.floats(-100, 100, width=32)), st.sampled_from(["quantile", "mean_std"]))
def test_there_and_back_is_where_one_was(values, kind):
    spread = Spread.of(DEMOS, kind=kind, mask=np.array([True, True, False]))
    np.testing.assert_allclose(spread.unnormalise(spread.normalise(values)), values, rtol=1e-4, atol=1e-4)


def test_a_masked_dimension_goes_through():
    spread = Spread.of(DEMOS, mask=np.array([True, True, False]))
    np.testing.assert_array_equal(spread.normalise(DEMOS)[:, 2], DEMOS[:, 2])


def test_a_dimension_that_never_moved_is_not_moved():
    spread = Spread.of(np.full((5, 1), 3.0))
    np.testing.assert_allclose(spread.unnormalise(np.array([[-1.0], [1.0]])), 3.0, atol=1e-5)


def test_bounds_of_an_action_space_serve_without_demonstrations():
    spread = Spread.between(np.array([-2.0]), np.array([4.0]))
    assert spread.unnormalise(np.array([-1.0, 0.0, 1.0])[:, None])[:, 0].tolist() == [-2.0, 1.0, 4.0]


def test_the_gripper_of_openvla_is_stretched_signed_and_inverted():
    gripper = Gripper(dim=-1, unit=True, binary=True, invert=True)
    actions = np.array([[0.3, 0.9], [0.3, 0.1]], np.float32)
    np.testing.assert_allclose(gripper.apply(actions), [[0.3, -1], [0.3, 1]])
    assert actions[0, 1] == np.float32(0.9)  # what came in stays


def test_a_file_gives_back_what_was_saved(tmp_path):
    stats = ActionStats(
        action=Spread.of(DEMOS, mask=np.array([True, True, False])),
        state=Spread.of(DEMOS, kind="mean_std"),
        gripper=Gripper(dim=2, binary=True),
    )
    stats.save(tmp_path)
    loaded = ActionStats.load(tmp_path)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    np.testing.assert_array_equal(loaded.unnormalise(x), stats.unnormalise(x))
    np.testing.assert_array_equal(loaded.normalise_state(x), stats.normalise_state(x))


def test_the_file_of_openpi_is_read(tmp_path):
    held = {"norm_stats": {"actions": {"mean": [0.0], "std": [2.0], "q01": [-3.0], "q99": [5.0]}}}
    (tmp_path / "norm_stats.json").write_text(json.dumps(held))
    stats = ActionStats.load(tmp_path / "norm_stats.json")
    assert stats.unnormalise(np.array([-1.0, 1.0])[:, None])[:, 0] == pytest.approx([-3.0, 5.0 + 1e-6], abs=1e-7)


def test_pi0_takes_mean_and_std_of_the_file_of_openpi_and_no_percentiles(tmp_path):
    held = {"norm_stats": {"actions": {"mean": [1.0], "std": [2.0], "q01": [-3.0], "q99": [5.0]}}}
    (tmp_path / "norm_stats.json").write_text(json.dumps(held))
    assert ActionStats.load(tmp_path / "norm_stats.json", family="pi0").unnormalise(
        np.ones((1, 1))
    ).item() == pytest.approx(3, abs=1e-5)
    assert ActionStats.load(tmp_path / "norm_stats.json", family="pi05").unnormalise(
        np.ones((1, 1))
    ).item() == pytest.approx(5, abs=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.7, 300.0])
def test_a_dimension_that_never_moved_is_minus_one_as_openpi_and_lerobot_trained_it(tmp_path, value):
    held = {"norm_stats": {"actions": {name: [value] for name in ("mean", "std", "q01", "q99")}}}
    (tmp_path / "norm_stats.json").write_text(json.dumps(held))
    numbers = {f"action.{name}": [value] for name in ("q01", "q99")}
    save_lerobot(tmp_path, norm_map={"ACTION": "QUANTILES"}, numbers=numbers)
    for place in (tmp_path, tmp_path / "norm_stats.json"):
        assert ActionStats.load(place).normalise(np.array([[value]], np.float32)) == pytest.approx(-1, abs=0.05)


def test_the_file_of_openpi_without_percentiles_is_mean_and_std(tmp_path):
    held = {"norm_stats": {"actions": {"mean": [1.0], "std": [2.0], "q01": None, "q99": None}}}
    (tmp_path / "norm_stats.json").write_text(json.dumps(held))
    found = ActionStats.load(tmp_path / "norm_stats.json").unnormalise(np.array([[1.0]])).item()
    assert found == pytest.approx(3.0 + 1e-6, abs=3e-7)  # openpi adds 1e-6 to a deviation


def save_lerobot(directory, *, norm_map, numbers):
    step = {"registry_name": "normalizer_processor", "config": {"norm_map": norm_map}, "state_file": "s.safetensors"}
    (directory / "policy_preprocessor.json").write_text(json.dumps({"steps": [{"registry_name": "other"}, step]}))
    save_file({name: np.array(x, np.float32) for name, x in numbers.items()}, directory / "s.safetensors")


def test_the_statistics_of_a_lerobot_policy_are_read(tmp_path):
    save_lerobot(
        tmp_path,
        norm_map={"ACTION": "QUANTILES", "STATE": "MEAN_STD", "VISUAL": "IDENTITY"},
        numbers={"action.q01": [-3], "action.q99": [5], "observation.state.mean": [1], "observation.state.std": [2]},
    )
    stats = ActionStats.load(tmp_path)
    assert stats.unnormalise(np.array([-1.0, 1.0])[:, None])[:, 0].tolist() == [-3.0, 5.0]
    assert stats.normalise_state(np.array([[5.0]])).item() == 2.0


def test_a_lerobot_policy_without_the_numbers_of_its_mode_says_which(tmp_path):
    save_lerobot(tmp_path, norm_map={"ACTION": "QUANTILES"}, numbers={"action.mean": [0]})
    with pytest.raises(UserError, match=r"no action\.q01, which mode QUANTILES needs"):
        ActionStats.load(tmp_path)


def test_a_lerobot_base_whose_processor_names_no_numbers_has_no_statistics(tmp_path):
    step = {"registry_name": "normalizer_processor", "config": {"norm_map": {"ACTION": "QUANTILES"}}}
    (tmp_path / "policy_preprocessor.json").write_text(json.dumps({"steps": [step]}))
    assert ActionStats.beside(tmp_path) is None
    with pytest.raises(UserError, match="names no statistics; measure those of demonstrations"):
        ActionStats.load(tmp_path)


def test_statistics_of_another_robot_are_refused():
    stats = ActionStats(action=Spread.of(DEMOS), state=Spread.of(DEMOS))
    with pytest.raises(UserError, match="3-dimensional actions, a simulator of 4"):
        stats.check(action_dim=4, state_dim=3)
    with pytest.raises(UserError, match="3-dimensional states, a simulator of 5"):
        stats.check(action_dim=3, state_dim=5)
    with pytest.raises(UserError, match=r"gripper\.dim 3"):
        replace(stats, gripper=Gripper(dim=3)).check(action_dim=3, state_dim=3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold an object"),
        ('{"action": {"kind": "quantile"}}', "no q01"),
        ('{"action": {"kind": "max", "q01": [0], "q99": [1], "mean": [0], "std": [1]}}', "kind 'max'"),
        ('{"action": {"kind": "quantile", "q01": [0, 0], "q99": [1], "mean": [0], "std": [1]}}', "unequal"),
        ('{"action": {"kind": "quantile", "q01": [NaN], "q99": [1], "mean": [0], "std": [1]}}', "finite"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path, text, said):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        ActionStats.load(tmp_path)
    assert FILE in str(caught.value)


def test_an_unknown_key_of_the_gripper_is_named(tmp_path):
    held = {"action": Spread.of(DEMOS).to_json(), "gripper": {"dim": 0, "flip": True}}
    (tmp_path / FILE).write_text(json.dumps(held))
    with pytest.raises(UserError, match="flip"):
        ActionStats.load(tmp_path)


def test_a_missing_file_says_who_writes_it(tmp_path):
    with pytest.raises(UserError, match="SFT writes it"):
        ActionStats.load(tmp_path)


def test_demonstrations_with_nan_have_no_statistics():
    with pytest.raises(ValueError, match="NaN"):
        Spread.of(np.array([[np.nan]]))

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


CONVENTIONS = [
    Gripper(dim=-1, unit=unit, binary=binary, invert=invert)
    for unit in (False, True)
    for binary in (False, True)
    for invert in (False, True)
]


@pytest.mark.parametrize("gripper", CONVENTIONS, ids=str)
@given(arrays(np.float32, (4, 3), elements=st.floats(-1, 1, width=32)), st.sampled_from(["quantile", "mean_std"]))
def test_demonstrated_actions_come_back_by_every_convention_of_a_gripper(gripper, actions, kind):
    if gripper.binary:
        actions[:, -1] = np.where(actions[:, -1] >= 0, 1, -1)
    stats = ActionStats(action=Spread.of(DEMOS, kind=kind, mask=np.array([True, True, False])), gripper=gripper)
    np.testing.assert_allclose(stats.unnormalise(stats.normalise(actions)), actions, rtol=1e-4, atol=1e-4)


def test_the_target_of_an_open_gripper_is_that_of_the_published_demonstrations():
    stats = ActionStats(action=Spread.of(DEMOS, mask=np.array([True, True, False])), gripper=CONVENTIONS[-1])
    opens, closes = stats.normalise(np.array([[0, 10, -1], [0, 10, 1]]))[:, 2]
    assert (opens, closes) == (1, 0)  # LIBERO's simulator opens at -1, the published demonstrations at 1


def test_demonstrations_in_the_units_of_the_published_ones_are_refused():
    stats = ActionStats(action=Spread.of(DEMOS, mask=np.array([True, True, False])), gripper=CONVENTIONS[-1])
    stats.check_demonstrated(np.array([0, 10, -1]), np.array([2, 30, 1]), origin="demos")
    stats.check_demonstrated(np.array([0, 10, 1]), np.array([2, 30, 1]), origin="demos")  # closed throughout
    with pytest.raises(UserError, match=r"demos: dimension 2 of the actions.*0 to 1.*-1 to 1"):
        stats.check_demonstrated(np.array([0, 10, 0]), np.array([2, 30, 1]), origin="demos")


RARE = np.array([[0.0, 0.3]] * 399 + [[1.0, 0.3]] * 3)
"""A button that is pressed in 0.75 % of the frames, and a dimension that never moves."""


def test_a_dimension_that_hardly_moves_is_normalised_by_its_range(caplog):
    spread = Spread.of(RARE, name="column 'action'")
    np.testing.assert_allclose(spread.normalise(np.array([[0, 0.3], [1, 0.3]]))[:, 0], [-1, 1])
    np.testing.assert_allclose(spread.unnormalise(np.array([[3.0, 0.0]]))[:, 0], 2.0)
    assert "column 'action': dimension 0 moves in less than 2 %" in caplog.text


def test_rare_values_beside_noise_are_named(caplog):
    noise = np.random.default_rng(0).normal(scale=1e-4, size=(402, 1))
    Spread.of(RARE[:, :1] + noise, name="column 'touch'")
    assert "column 'touch': dimension 0 is normalised to up to" in caplog.text
    caplog.clear()
    Spread.of(noise)
    assert not caplog.text


def openpi_file(path, **numbers):
    path.write_text(json.dumps({"norm_stats": {"actions": numbers}}))
    return ActionStats.load(path)


def own_file(path, **numbers):
    path.write_text(json.dumps({"action": {"kind": "quantile", **numbers}}))
    return ActionStats.load(path)


@pytest.mark.parametrize(("load", "image"), [(openpi_file, -1), (own_file, 0)])
def test_published_statistics_of_a_dimension_that_hardly_moves_use_its_deviation(tmp_path, caplog, load, image):
    numbers = {"mean": [0.0075, 0.3], "std": [0.086, 0.0], "q01": [0.0, 0.3], "q99": [0.0, 0.3]}
    stats = load(tmp_path / "stats.json", **numbers)
    normalised = stats.normalise(np.array([[0, 0.3], [1, 0.3]]))
    np.testing.assert_allclose(normalised[:, 0], [image, image + 1 / 0.086], rtol=1e-4)
    np.testing.assert_allclose(normalised[:, 1], image, atol=0.05)
    assert "stats.json" in caplog.text and "dimension 0" in caplog.text and "dimension 1" not in caplog.text


@pytest.mark.parametrize("numbers", [{"min": [0.0], "max": [1.0]}, {"std": [0.5]}], ids=["range", "deviation"])
def test_lerobot_statistics_of_a_dimension_that_hardly_moves(tmp_path, numbers):
    numbers = {f"action.{name}": value for name, value in {"q01": [0], "q99": [0], **numbers}.items()}
    save_lerobot(tmp_path, norm_map={"ACTION": "QUANTILES"}, numbers=numbers)
    np.testing.assert_allclose(ActionStats.load(tmp_path).normalise(np.array([[0.0], [1.0]]))[:, 0], [-1, 1])


def test_actions_that_move_where_the_statistics_do_not_are_refused():
    stats = ActionStats(action=Spread.of(np.full((5, 2), 3.0)))
    stats.check_demonstrated(np.array([3.0, 3.0]), np.array([3.0, 3.0]), origin="demos")
    with pytest.raises(
        UserError, match="demos: dimension 1 of the actions is 3 throughout the model's statistics, and"
    ):
        stats.check_demonstrated(np.array([3.0, 2.0]), np.array([3.0, 3.0]), origin="demos")


def test_a_state_that_moves_where_the_statistics_do_not_is_as_in_training():
    stats = ActionStats(action=Spread.of(DEMOS), state=Spread.of(np.full((5, 1), 3.0)))
    assert stats.normalise_state(np.array([[3.0], [2.0]])).tolist() == [[0.0], [0.0]]


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

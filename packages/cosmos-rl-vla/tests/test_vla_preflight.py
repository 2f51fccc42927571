"""Mistakes of a robot recipe that the checks before a run find: the key, and the text."""

import json
from importlib.resources import files

import numpy as np
import pytest
from safetensors.numpy import save_file

from cosmos_rl_core.launch.check import check
from cosmos_rl_core.recipe.load import load
from cosmos_rl_core.settings.base import ConfigError

RECIPE = files("cosmos_rl_vla") / "recipe.toml"


def said(tmp_path, *overrides):
    with pytest.raises(ConfigError) as refused:
        check(load(str(RECIPE), [f"run.output_dir={tmp_path / 'run'}", *overrides]), deep=True)
    return "\n".join(map(str, refused.value.problems))


def notes(tmp_path, *overrides):
    return check(load(str(RECIPE), [f"run.output_dir={tmp_path / 'run'}", *overrides]), deep=True).notes


def folder(tmp_path, config=None, **tensors):
    path = tmp_path / "model"
    path.mkdir()
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file({name.replace("__", "."): value for name, value in tensors.items()}, path / "model.safetensors")
    return path


def test_the_starter_recipe_has_no_problem(tmp_path):
    assert notes(tmp_path) == ()


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("model.path=nowhere", 'model.path = "nowhere": is not a directory'),
        ("model.stats=nowhere.json", 'model.stats = "nowhere.json": no such file'),
        ("model.action_dim=5", "model.action_dim = 5: does not fit reach, which has 2; set it to 2"),
        ("model.state_dim=9", "model.state_dim = 9: does not fit reach, which has 2; set it to 2"),
        ("rollout.options.slots=0", "rollout.options.slots = 0: must be greater than or equal to 1"),
        ("rollout.options.python=/nowhere/python", "is no program that can be started"),
        ("data.simulator=metaword", "no simulator is called 'metaword'; did you mean 'metaworld'?"),
        ('data.tasks=["rd"]', "simulator reach has no task 'rd'; tasks: red, green"),
    ],
)
def test_a_mistake_is_named(tmp_path, override, text):
    assert text in said(tmp_path, override)


def test_one_ratio_cannot_have_several_advantages(tmp_path):
    text = said(tmp_path, "rollout.sampling.steps=action", "rollout.sampling.terms=chunk")
    assert "one ratio cannot have several advantages" in text


@pytest.mark.parametrize(
    ("config", "tensors", "text"),
    [
        (None, {}, "config.json is not there"),
        ({"model_type": "bert"}, {}, "has a config.json of no model that is known here"),
        ({"model_type": "cosmos_rl_pi"}, {}, "has no weights in *model*.safetensors"),
    ],
)
def test_the_folder_of_a_model_is_read(tmp_path, config, tensors, text):
    assert text in said(tmp_path, f"model.path={folder(tmp_path, config, **tensors)}")


def test_other_cameras_than_those_of_training_are_a_note(tmp_path):
    views = {f"observation.images.{name}": {"type": "VISUAL"} for name in ("top", "wrist")}
    path = folder(tmp_path, {"type": "pi05", "input_features": views}, a__weight=np.zeros((2, 2), np.float32))
    (note,) = notes(tmp_path, f"model.path={path}")
    assert "was trained on 2 cameras (observation.images.top, observation.images.wrist), and reach has 1" in note

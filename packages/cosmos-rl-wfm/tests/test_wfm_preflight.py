"""Mistakes of a world model's recipe that the checks before a run find: the key, and the text."""

import json
from importlib.resources import files

import numpy as np
import pytest
from safetensors.numpy import save_file

from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.launch.check import check
from cosmos_rl_core.recipe.load import load
from cosmos_rl_core.settings.base import ConfigError
from cosmos_rl_core.storage import hub

RECIPE = files("cosmos_rl_wfm") / "recipe.toml"
PIPELINE = {
    "_class_name": "WanPipeline",
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5Tokenizer"],
}
REWARDS = """
def one(group):
    return 1.0

def of_other_media(group):
    return [rollout.media["picture"].mean() for rollout in group.rollouts]

def of_clips(group):
    return [float(rollout.media["video"].mean()) for rollout in group.rollouts]
"""


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Problems of the starter recipe with overrides, a line each; "" without any."""
    (tmp_path / "clip_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def call(*overrides):
        try:
            check(load(str(RECIPE), [f"run.output_dir={tmp_path / 'run'}", *overrides]), deep=True)
        except ConfigError as refused:
            return "\n".join(map(str, refused.problems))
        return ""

    return call


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("algorithm.name=ppo", "a world model's rollouts have none"),
        ("rollout.options.samples_at_once=0", "samples_at_once = 0: must be greater than or equal to 1"),
        ("data.size.frames=6", "takes 1 frame and multiples of 4 more; set it to 5"),
        ("data.size.height=33", "data.size.height = 33: is not divisible by the 8 pixels"),
        ('model.lora={target_modules=["to_kk"]}', "no layer's name ends in to_kk; the network's layers end in"),
        ('reward.functions=[{name="aesthetic",options={head="no.safetensors"}}]', "there is no such file"),
        ('reward.functions=[{name="clip_rewards:one"}]', "returned float; it must return one number per rollout"),
        ('reward.functions=[{name="clip_rewards:of_other_media"}]', "raised KeyError: 'picture'"),
    ],
)
def test_a_mistake_is_named(checked, override, text):
    assert text in checked(override)


@pytest.mark.parametrize("override", ["run.seed=1", 'reward.functions=[{name="clip_rewards:of_clips"}]'])
def test_a_sound_recipe_has_no_problem(checked, override):
    assert checked(override) == ""


def test_a_reader_of_texts_that_is_not_installed_is_named(checked):
    text = checked('reward.functions=[{name="ocr",options={reader="paddleocr"}}]')
    install = pip_install("paddleocr", "paddlepaddle")
    assert f'"ocr": needs a package that is not installed; {install}' in text


@pytest.mark.parametrize("path", ["nowhere", "./owner/name", "a/b/c"])
def test_a_path_that_is_neither_a_folder_nor_an_id_of_a_hub_is_named(checked, path):
    text = checked("model.tiny=false", "model.family=auto", "model.text.encoder=model", f"model.path={path}")
    assert f'model.path = "{path}": is not a directory; give one that diffusers' in text


def test_every_part_that_a_pipeline_lacks_is_named(checked, tmp_path):
    pipeline = tmp_path / "pipeline"
    (pipeline / "transformer").mkdir(parents=True)
    (pipeline / "model_index.json").write_text(json.dumps(PIPELINE))
    (pipeline / "transformer" / "config.json").write_text('{"_class_name": "WanTransformer3DModel"}')
    overrides = ("model.tiny=false", "model.family=auto", "model.text.encoder=model", f"model.path={pipeline}")
    text = checked(*overrides)
    for part in ("has no vae", "has no safetensors of the transformer", "has no tokenizer", "has no text_encoder"):
        assert text.count(part) == 1
    (pipeline / "vae").mkdir()
    save_file({"a": np.zeros(1, np.float32)}, pipeline / "vae" / "model.safetensors")
    assert "has no vae" not in checked(*overrides)


def test_a_model_on_a_hub_that_does_not_answer_is_named_before_the_run(checked, monkeypatch):
    monkeypatch.setattr(hub, "silence", lambda: "the hub does not answer (timed out)")
    text = checked('model={path="nobody/has-this"}')
    assert "is no folder here and not in the cache, and the hub does not answer" in text

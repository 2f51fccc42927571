"""The recipes for GPUs, each as it is shipped but for the sizes: the same classes, tiny, end to end on a CPU."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import av
import numpy as np
import pytest

from cosmos_rl_core import run
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_wfm.data.mock import mock_clip
from cosmos_rl_wfm.rewards import REWARDS

COOKBOOK = Path(__file__).parents[3] / "cookbook"
pytestmark = pytest.mark.skipif(not COOKBOOK.is_dir(), reason="the wheel comes without the cookbook")

FAMILIES = {
    "wfm_cosmos_predict2_5_grpo": "cosmos",
    "wfm_cosmos_predict2_5_ddrl": "cosmos",
    "wfm_cosmos_predict2_5_grpo_mock_data": "cosmos",
    "wfm_wan2_1": "wan",
}
LOCAL_REWARD = 'reward.functions=[{name="brightness"}]'


def tiny(name, output, *more):
    """Overrides that bring a recipe down to one process and a second a step."""
    overrides = [
        f"run.output_dir={output}",
        "run.placement=inline",
        "run.max_steps=2",
        "model.path=",
        f"model.family={FAMILIES[name]}",
        "model.tiny=true",
        "model.dtype=float32",
        "model.codec_dtype=float32",
        "model.text.encoder=words",
        "data.size={frames=5, height=32, width=32}",
        "policy.prompts_per_step=2",
        "policy.microbatch_terms=4",
        "policy.schedule.warmup_steps=0",
        "policy.parallel={}",
        "sync.dtype=float32",
        "rollout.replicas=1",
        "rollout.group_size=2",
        "logging.media_every=1",
        "checkpoint.every_steps=0",
    ]
    return [*overrides, *more]


def train(name, directory, *more):
    """Run a recipe, tiny; return the lines of its metrics."""
    recipe, output = load_raw(name), directory / "out"
    result = run(recipe, tiny(name, output, *more))
    assert result.steps == 2
    return list(result.metrics)


def load_raw(name):
    recipe = tomllib.loads((COOKBOOK / name / "run.toml").read_text(encoding="utf-8"))
    recipe["model"].pop("revision", None)  # of the hub's model, which is not asked for here
    return recipe


@pytest.fixture
def clips(tmp_path):
    """Six mp4 files of 12 frames, with captions."""
    folder = tmp_path / "clips"
    (folder / "videos").mkdir(parents=True)
    (folder / "metas").mkdir()
    for index in range(6):
        write_clip(folder / "videos" / f"{index}.mp4", mock_clip(index, frames=12, height=48, width=64))
        (folder / "metas" / f"{index}.txt").write_text(f"gradient {index}, seen by a camera that stands still")
    return folder


def write_clip(path, frames):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=16)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        for image in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")))
        container.mux(stream.encode())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_recipe_for_gpus_is_strict_toml(name):
    config = load_config(COOKBOOK / name / "run.toml")
    assert config.run.name == name
    for function in config.reward.functions:
        assert function.name in REWARDS or function.name == "remote"


def test_flow_grpo_of_cosmos_goes_on_from_the_first_frame_of_real_clips(tmp_path, clips):
    metrics = train("wfm_cosmos_predict2_5_grpo", tmp_path, f"data.path={clips}", LOCAL_REWARD)
    assert metrics[0]["terms"] == 2 * 2 * 8  # eight of ten steps are trained
    assert metrics[0]["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics[0]["kl"] == 0.0
    assert metrics[1]["kl"] > 0.0
    assert metrics[0]["grad_norm"] > 0.0
    assert list((tmp_path / "out/media").glob("step_000000/*.mp4"))


def test_ddrl_of_cosmos_learns_from_rollouts_and_from_real_clips(tmp_path, clips):
    metrics = train(
        "wfm_cosmos_predict2_5_ddrl",
        tmp_path,
        f"data.path={clips}",
        "data_regularization.rows_per_step=3",
        LOCAL_REWARD,
    )
    assert metrics[0]["terms"] == 2 * 2 * 10
    assert metrics[0]["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics[0]["loss_data_term"] > 0.0
    assert "kl" not in metrics[0]


VARIATIONS = {
    "as it is": [],
    "ddrl": ["algorithm.name=ddrl", "data_regularization.coef=0.01", "data_regularization.rows_per_step=4"],
    "nft": ["algorithm.name=nft", "rollout.sampling.rule=ode", "rollout.sampling.old_decay=slow"],
    "nft of adapters": [
        "algorithm.name=nft",
        "rollout.sampling.rule=ode",
        "rollout.sampling.old_decay=slow",
        "model.lora.rank=4",
        "model.lora.alpha=8.0",
    ],
}


@pytest.mark.parametrize("overrides", VARIATIONS.values(), ids=VARIATIONS)
def test_the_mock_recipe_needs_nothing_at_all(tmp_path, overrides):
    metrics = train("wfm_cosmos_predict2_5_grpo_mock_data", tmp_path, *overrides)
    assert all(line["reward_std"] > 0.0 and line["grad_norm"] > 0.0 for line in metrics)
    assert metrics[0].get("ratio_mean", 1.0) == pytest.approx(1, abs=1e-5)


def test_flow_grpo_of_wan_trains_adapters_alone(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('a sign that says "OPEN"\na cake with "42" on it\n')
    rewards = LOCAL_REWARD[:-1] + ', {name="flicker", weight=0.0}]'
    metrics = train("wfm_wan2_1", tmp_path, f"data.path={prompts}", rewards)
    assert metrics[0]["terms"] == 2 * 2 * 2  # two of twenty steps are trained
    assert metrics[0]["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert "reward/flicker" in metrics[0]
    policy = tmp_path / "out/checkpoints/step_2/policy"
    config = json.loads((policy / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (32, 64.0)
    assert (policy / "adapter_model.safetensors").is_file()


def test_adapters_of_cosmos_with_given_frames(tmp_path, clips):
    lora = ["model.lora={rank=4, alpha=8.0}", "algorithm.clip_low=1e-4", "algorithm.clip_high=1e-4"]
    metrics = train("wfm_cosmos_predict2_5_grpo", tmp_path, f"data.path={clips}", LOCAL_REWARD, *lora)
    assert metrics[0]["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics[1]["kl"] > 0.0  # to the network without adapters

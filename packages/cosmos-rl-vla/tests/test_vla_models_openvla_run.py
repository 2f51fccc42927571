"""OpenVLA-OFT from a recipe to an exported directory: episodes in a simulator, GRPO, adapters on top of the result."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tomli_w
from safetensors.torch import load_file

from cosmos_rl_core import run
from cosmos_rl_core.checkpoint.export import export
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.config import VLAModelConfig
from cosmos_rl_vla.models.families import load

pytestmark = [pytest.mark.ci, pytest.mark.xdist_group("openvla_run")]  # one process makes what they share

COMMAND = [sys.executable, "-c", "from cosmos_rl_core.cli.main import main; main()"]


def recipe(output, model, **run):
    return {
        "run": {"domain": "vla", "name": "oft", "output_dir": str(output), "max_steps": 2, **run},
        "model": model,
        "data": {"simulator": "reach", "tasks": ["red", "green"], "options": {"image_size": 32, "max_steps": 12}},
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 2, "threads": 1, "optimizer": {"learning_rate": 1e-3}},
        "rollout": {
            "group_size": 4,
            "threads": 1,
            "sampling": {"terms": "token", "max_steps": 12},
            "options": {"processes": 1, "slots": 4},
        },
        "reward": {"functions": [{"name": "simulator"}]},
        "logging": {"sinks": ["jsonl"]},
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run, made by the command as a user calls it."""
    directory = tmp_path_factory.mktemp("oft")
    ActionStats.unit(2).save(directory)
    model = {
        "family": "openvla_oft",
        "action_dim": 2,
        "state_dim": 2,
        "horizon": 4,
        "temperature": 1.6,
        "words": ["reach the red green square"],
        "stats": str(directory / "action_stats.json"),
    }
    path = directory / "run.toml"
    path.write_text(tomli_w.dumps(recipe(directory / "run", model)))
    done = subprocess.run([*COMMAND, "run", str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    export(str(directory / "run"), directory / "model")
    return directory


def metrics_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_grpo_trains_it_in_a_simulator(trained):
    first, second = metrics_of(trained / "run")
    assert first["ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert (first["policy_version"], second["policy_version"]) == (1, 2)
    assert first["grad_norm"] > 0 and first["terms"] > 0


def test_what_is_exported_has_public_names_and_loads(trained):
    names = load_file(trained / "model" / "model.safetensors")
    assert "vision_backbone.fused_featurizer.blocks.0.attn.qkv.weight" in names
    loaded = load(VLAModelConfig(path=str(trained / "model")))
    assert loaded.model.config.temperature == 1.6
    assert np.array_equal(loaded.stats.action.q99, [1, 1])


def test_adapters_are_trained_on_top_of_it(trained, tmp_path):
    pytest.importorskip("peft", reason="an extra of the package")
    model = {"path": str(trained / "model"), "lora": {"rank": 2, "target_modules": ["q_proj", "v_proj"]}}
    tables = recipe(tmp_path / "run", model, placement="inline")
    result = run({**tables, "algorithm": {"name": "grpo", "kl_coef": 0.1}})
    first, second = result.metrics
    assert first["ratio_mean"] == pytest.approx(1, abs=1e-4) and first["kl"] == 0.0
    assert second["kl"] > 0.0

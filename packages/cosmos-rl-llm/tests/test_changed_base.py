"""Adapters whose base model has changed since they were trained: named before anything is trained, judged or merged."""

import pytest
import torch

from cosmos_rl_core import Request, evaluate, run
from cosmos_rl_core.checkpoint.export import export
from cosmos_rl_core.errors import UserError
from cosmos_rl_llm.model.causal_lm import load_model
from cosmos_rl_llm.tiny import write_sums, write_tiny_model

pytest.importorskip("peft", reason="the extra cosmos-rl-llm[lora] is not installed")

CHANGED = r"the base model of the adapters in .*step_1 has changed .*: model\.safetensors of model\.path = "


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """The recipe of a finished run of one step. Its base model is then trained further, in place."""
    folder = tmp_path_factory.mktemp("run")
    base = write_tiny_model(folder / "base", num_layers=1)
    train, test = write_sums(folder / "data")
    recipe = {
        "run": {"domain": "llm", "output_dir": str(folder / "run"), "max_steps": 1, "placement": "inline"},
        "model": {"path": str(base), "lora": {"rank": 4}},
        "data": {"path": str(train), "chat_template": "none"},
        "algorithm": {"name": "sft"},
        "policy": {"prompts_per_step": 4, "threads": 1},
        "eval": {"data": {"path": str(test), "chat_template": "none"}, "limit": 4},
        "logging": {"sinks": ["jsonl"]},
    }
    run(recipe)
    evaluate(recipe, request=Request(checkpoint=recipe["run"]["output_dir"], out=folder / "judged"))
    model = load_model(base, dtype=torch.float32)
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.q_proj.weight").add_(0.01)
    model.save_pretrained(base)
    return recipe


def test_a_run_does_not_go_on(recipe):
    with pytest.raises(UserError, match=CHANGED):
        run(recipe, ["run.max_steps=2"], resume="auto")


def test_they_are_not_evaluated(recipe, tmp_path):
    with pytest.raises(UserError, match=CHANGED):
        evaluate(recipe, request=Request(checkpoint=recipe["run"]["output_dir"], out=tmp_path))


def test_they_are_not_merged_and_are_exported_alone(recipe, tmp_path):
    source = recipe["run"]["output_dir"]
    with pytest.raises(UserError, match=CHANGED):
        export(source, tmp_path / "merged")
    assert export(source, tmp_path / "adapters", merge_adapters=False).num_tensors > 0

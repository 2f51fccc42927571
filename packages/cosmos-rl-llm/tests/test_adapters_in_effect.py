"""A run ends if its engine samples from the model without the adapters that the policy trains."""

from pathlib import Path

import pytest

from cosmos_rl_core import run
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.lora import ADAPTER
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.tiny import write_sums, write_tiny_model

pytest.importorskip("peft", reason="the extra cosmos-rl-llm[lora] is not installed")


def base_alone(model, *, data, options):
    """An engine that receives adapters and does not apply them."""
    engine = LLM.build_engine(model, data=data, name="torch", options=options)
    for layer in (layer for layer in engine._model.modules() if hasattr(layer, "set_scale")):
        layer.set_scale(ADAPTER, 0.0)
    return engine


def recipe(folder, *, engine, max_staleness=0):
    model = write_tiny_model(folder / "model", num_layers=2, initializer_range=0.1)
    train, _ = write_sums(folder / "data")
    return {
        "run": {"domain": "llm", "output_dir": str(folder / "run"), "max_steps": 4, "placement": "inline"},
        "model": {"path": str(model), "lora": {"rank": 4, "rank_pattern": {"v_proj": 8}}},
        "data": {"path": str(train), "chat_template": "none"},
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 4, "threads": 1, "optimizer": {"learning_rate": 1e-2}},
        "rollout": {"engine": engine, "group_size": 4, "threads": 1, "sampling": {"max_tokens": 4}},
        "reward": {"functions": [{"name": "length", "options": {"max_tokens": 1, "slack_tokens": 3}}]},
        "sync": {"max_staleness": max_staleness},
        "logging": {"sinks": ["jsonl"]},
    }


@pytest.mark.parametrize(("max_staleness", "step"), [(0, 1), (2, 3)])
def test_an_engine_without_them_ends_the_run(tmp_path, max_staleness, step):
    with pytest.raises(UserError, match=f"step {step}: the adapters are not in effect in the engine"):
        run(recipe(tmp_path, engine=f"{__name__}:base_alone", max_staleness=max_staleness))


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_an_engine_with_them_is_not_suspected_at_any_staleness(tmp_path, max_staleness):
    assert len(run(recipe(tmp_path, engine="torch", max_staleness=max_staleness)).metrics) == 4


@pytest.mark.ci
def test_each_of_two_policy_replicas_looks_at_its_own_rollouts(tmp_path):
    settings = recipe(tmp_path, engine=f"{__name__}:base_alone")
    settings["run"]["share_gpus"] = True
    del settings["run"]["placement"]
    settings["policy"]["replicas"] = 2
    with pytest.raises(UserError, match="step 1: the adapters are not in effect in the engine"):
        run(settings, python_path=[str(Path(__file__).parent)])

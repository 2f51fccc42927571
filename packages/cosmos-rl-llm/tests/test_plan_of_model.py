"""`cosmos-rl plan` and `check` of a recipe with a language model: read from its files, nothing is loaded."""

import json

import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.check import check
from cosmos_rl_core.plan.memory import parse_bytes
from cosmos_rl_core.plan.run_plan import plan
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_llm.tiny import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "2"}) + "\n")
    return write_tiny_model(folder)


def recipe(folder, **parallel):
    return load_config(
        {
            "run": {"domain": "llm", "max_steps": 1},
            "model": {"path": str(folder)},
            "data": {"path": str(folder / "train.jsonl"), "chat_template": "none"},
            "algorithm": {"name": "sft"},
            "policy": {"prompts_per_step": 1, "parallel": parallel},
        }
    )


def test_the_ranks_and_what_each_holds_are_shown(folder):
    planned = plan(recipe(folder, tp=2, dp_shard=2))
    text = str(planned)
    assert "4 ranks, dp_shard 2 x tp 2" in text
    assert "RANK  DP_SHARD  TP" in text
    assert next(role.processes for role in planned.roles if role.role == "policy") == 4
    assert planned.memory is not None and planned.weights is not None
    assert planned.memory.rank.parameters == pytest.approx(planned.weights.policy_bytes / 4, rel=0.01)
    assert json.loads(json.dumps(planned.as_json()))["memory"]["fits"] is None


def test_what_does_not_fit_is_told_with_what_would(folder):
    planned = plan(recipe(folder), memory=parse_bytes("200MiB"))
    assert planned.memory is not None and planned.memory.fits is False
    assert "a policy rank would with one of\n  policy.memory.activation_checkpointing=" in str(planned)
    assert "what is counted fits into 4,096 MiB, with" in str(plan(recipe(folder), memory=parse_bytes("4GiB")))
    assert "nor after any change" in str(plan(recipe(folder), memory=parse_bytes("1MiB")))


def test_a_model_that_cannot_be_spread_is_refused_before_anything_starts(folder):
    with pytest.raises(UserError, match=r"(?s)8 stages, but the model has 4 layers.*tp = 4: .* 2 key-value heads"):
        plan(recipe(folder, pp=8, tp=4))
    with pytest.raises(UserError, match=r"ep = 2: does not divide dp_shard x cp"):
        check(recipe(folder, ep=2))

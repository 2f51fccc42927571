"""Runs with a teacher: beside rewards, alone, on rows and on rollouts, over ranks, and resumed."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from cosmos_rl_core import run
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.check import check
from cosmos_rl_core.plan.run_plan import plan
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.settings.base import ConfigError

ON_POLICY = {"run__placement": "inline", "sync__max_staleness": 0}


@pytest.fixture(scope="module")
def teacher(qwen, tmp_path_factory):
    """Another model, wider than the policy, with its tokenizer."""
    from cosmos_rl_llm.model.causal_lm import load_tokenizer, make_model

    directory = tmp_path_factory.mktemp("teacher")
    load_tokenizer(qwen).save_pretrained(directory)
    shape = {
        "model_type": "qwen3",
        "vocab_size": 14,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    make_model(shape, dtype=torch.float32, seed=3).save_pretrained(directory)
    return directory


@pytest.fixture
def taught(sums, teacher):
    """A recipe with [teacher]: `taught(directory, {"beta": 0.5}, run__max_steps=3)`."""

    def recipe(directory, keys, **changes):
        tables = sums(directory, rollout__options={"batch_invariant": True}, **changes)
        return {**tables, "teacher": {"path": str(teacher), **keys}}

    return recipe


def weights(result):
    return load_file(result.checkpoint / "policy" / "model.safetensors")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "keys",
    [{"beta": 0.5}, pytest.param({"loss": "advantage", "discount": 0.5}, marks=pytest.mark.ci)],
    ids=["divergence", "advantage"],
)
def test_a_resumed_run_has_the_same_weights_and_holds_no_teacher(tmp_path, taught, keys, qwen):
    whole = run(taught(tmp_path / "whole", keys, **ON_POLICY, run__max_steps=4))
    first = run(taught(tmp_path / "parts", keys, **ON_POLICY, run__max_steps=2))
    second = run(taught(tmp_path / "parts", keys, **ON_POLICY, run__max_steps=4), resume="auto")
    assert second.metrics[-1]["step"] == whole.metrics[-1]["step"]
    assert all(torch.equal(tensor, weights(second)[name]) for name, tensor in weights(whole).items())
    assert any(not torch.equal(tensor, weights(first)[name]) for name, tensor in weights(whole).items())
    assert weights(whole).keys() == load_file(qwen / "model.safetensors").keys()
    line = whole.metrics[-1]
    assert line["teacher_kl"] != 0 and 0 <= line["teacher_agreement"] <= 1
    assert ("loss_teacher" in line) == (keys.get("loss") != "advantage")


@pytest.mark.usefixtures("one_thread")
def test_a_policy_comes_near_its_teacher_on_rows(tmp_path, taught):
    changes = {
        "run__placement": "inline",
        "run__max_steps": 30,
        "algorithm__name": "sft",
        "policy__prompts_per_step": 16,
    }
    tables = taught(tmp_path / "run", {"task_coef": 0.0}, **changes, data__response_column="answer")
    del tables["rollout"], tables["reward"]
    lines = run(tables).metrics
    assert lines[-1]["teacher_kl"] < 0.4 * lines[0]["teacher_kl"]
    assert lines[-1]["teacher_agreement"] > lines[0]["teacher_agreement"] + 0.3
    assert lines[-1]["loss"] == pytest.approx(lines[-1]["teacher_kl"])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("advantage", ["group_std", "global_std", "leave_one_out"])
def test_alone_a_group_may_be_one_rollout(tmp_path, taught, advantage):
    changes = {**ON_POLICY, "run__max_steps": 1, "rollout__group_size": 1, "algorithm__advantage": advantage}
    result = run(taught(tmp_path / "run", {"task_coef": 0.0, "loss": "advantage"}, **changes))
    assert result.steps == 1 and result.metrics[0]["grad_norm"] > 0
    assert "reward/length" in result.metrics[0]


@pytest.mark.ci
def test_a_policy_of_two_ranks_comes_near_its_teacher_without_rewards(tmp_path, taught):
    changes = {"run__max_steps": 12, "policy__prompts_per_step": 16, "policy__parallel": {"dp_shard": 2}}
    tables = taught(tmp_path / "run", {"task_coef": 0.0, "top_k": 4}, **changes, rollout__group_size=2)
    del tables["reward"]
    lines = run(tables).metrics
    first, last = (sum(line["teacher_kl"] for line in part) / 3 for part in (lines[:3], lines[-3:]))
    assert last < 0.9 * first


def test_a_plan_counts_the_teacher(tmp_path, taught, teacher):
    memory = plan(load_config(taught(tmp_path, {}))).memory
    assert memory is not None
    names = {part.name: part.bytes for part in memory.policy.parts}
    assert names["teacher"] == 4 * sum(tensor.numel() for tensor in load_file(teacher / "model.safetensors").values())
    assert names["teacher's hidden states of the step"] == 4 * 4 * 4 * 48 * 4


def test_a_teacher_with_another_tokenizer_is_refused_with_the_first_difference(tmp_path, taught, teacher):
    other = shutil.copytree(teacher, tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    assert '"7": 9' in text and '"8": 10' in text
    (other / "tokenizer.json").write_text(text.replace('"7": 9', '"7": 10').replace('"8": 10', '"8": 9'))
    message = "token 9 is '7' in the model's and '8' in the teacher's"
    config = load_config(taught(tmp_path / "run", {"path": str(other)}))
    with pytest.raises((UserError, ConfigError), match=message):
        check(config)
    with pytest.raises(UserError, match=message):
        run(config)


def test_a_teacher_that_is_not_there_is_refused_before_the_run(tmp_path, taught):
    with pytest.raises(ConfigError, match=r'teacher\.path = "/nowhere/teacher": is not a directory'):
        check(load_config(taught(tmp_path, {"path": "/nowhere/teacher"})))


def test_a_teacher_with_a_shorter_context_is_refused_before_the_run(tmp_path, taught, teacher):
    other = shutil.copytree(teacher, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    with pytest.raises(ConfigError, match=r"reads up to 16 tokens, and the model .*; set model\.max_length = 16"):
        check(load_config(taught(tmp_path / "run", {"path": str(other)})))


def test_a_domain_without_teachers_says_so(tmp_path, bandit):
    with pytest.raises(ConfigError, match=r"\[teacher\]: the tiny domain has no teachers"):
        check(load_config({**bandit(tmp_path), "teacher": {"path": "t"}}))

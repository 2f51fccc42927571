"""`cosmos-rl plan` counts all parts on a card, also from config.json alone; a run that does not fit is exit code 1."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from cosmos_rl_core.cli.app import app
from cosmos_rl_core.plan.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES
from cosmos_rl_core.plan.run_plan import plan
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.weight_sync import GPU_BUCKET_BYTES
from cosmos_rl_llm.tiny import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    rows = [json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) for number in range(4)]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    return write_tiny_model(folder)


def tables(folder, *, dtype="bfloat16", **parallel):
    return {
        "run": {"domain": "llm", "max_steps": 1},
        "model": {"path": str(folder), "dtype": dtype},
        "data": {"path": str(folder / "train.jsonl"), "chat_template": "none"},
        "algorithm": {"name": "grpo", "kl_coef": 0.1},
        "rollout": {"group_size": 2},
        "reward": {"functions": [{"name": "math"}]},
        "policy": {"prompts_per_step": 2, "parallel": parallel},
    }


def parts_of(needs):
    return {part.name: part.bytes for part in needs.parts}


def test_reference_root_and_the_engine_are_counted(folder):
    memory = plan(load_config(tables(folder, dp_shard=2)), gpu=False).memory
    assert memory is not None and memory.rollout is not None
    policy, rollout = parts_of(memory.policy), parts_of(memory.rollout)
    assert policy["reference of the KL term"] == policy["parameters"] / 2  # bfloat16 beside float32 masters
    assert policy["embedding and head, gathered, with gradients"] > 0
    assert rollout["keys and values"] and rollout["logits and probabilities"]
    assert not memory.unknown


def test_an_engines_own_dtype_is_that_of_its_weights_and_of_what_it_receives(folder):
    config = load_config(tables(folder))
    engine = {"engine": "vllm", "options": {"dtype": "float16", "cache_bytes": 2**20}}
    half = load_config(tables(folder, dtype="float32") | {"rollout": {"group_size": 2, **engine}})
    found, expected = plan(half, gpu=False), plan(config, gpu=False)
    assert found.memory is not None and found.memory.rollout is not None and found.weights is not None
    assert expected.memory is not None and expected.memory.rollout is not None and expected.weights is not None
    for name in ("weights", "next version, staged"):
        assert parts_of(found.memory.rollout)[name] == parts_of(expected.memory.rollout)[name]
    assert found.weights.engine_bytes == 4 * found.weights.parameters  # live and staged
    assert found.weights.sync is not None and found.weights.sync.received_bytes == 2 * found.weights.parameters


@pytest.mark.parametrize(("given", "fits"), [(80 * 2**30, True), (2**20, False)])
def test_vllm_fills_its_share_of_a_card(folder, given, fits):
    """A share that the weights alone are larger than does not fit; without the card's size nothing is said."""
    engine = {"engine": "vllm", "options": {"gpu_memory_utilization": 0.5}}
    config = load_config(tables(folder) | {"rollout": {"group_size": 2, **engine}})
    without = plan(config, gpu=True).memory
    memory = plan(config, memory=given, gpu=True).memory
    assert without is not None and memory is not None and memory.rollout is not None
    parts = {part.name: part for part in memory.rollout.parts}
    assert any("vLLM" in name for name in without.unknown) and not memory.unknown
    [(name, rest)] = [(name, part) for name, part in parts.items() if "vLLM" in name]
    filled = (parts["weights"].bytes or 0) + (rest.bytes or 0)
    assert filled == 0.5 * given if fits else filled > given, name


def test_a_gpu_has_a_context_and_communicators(folder):
    config = load_config(tables(folder, dp_shard=2, tp=2))
    plain, on_gpu = (plan(config, gpu=gpu).memory for gpu in (False, True))
    assert plain is not None and on_gpu is not None and on_gpu.rollout is not None
    slots = 2 * GPU_BUCKET_BYTES  # of a path to the engine's GPU
    assert on_gpu.policy.device - plain.policy.device == CONTEXT_BYTES + 3 * COMMUNICATOR_BYTES + slots
    assert parts_of(on_gpu.policy)["3 NCCL communicators"] == 3 * COMMUNICATOR_BYTES  # the replica, dp_shard, tp
    assert parts_of(on_gpu.rollout)["CUDA context"] == CONTEXT_BYTES


def test_config_json_alone_is_enough(folder, tmp_path):
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path / file.name)
    found, expected = (plan(load_config(tables(path, dp_shard=2))) for path in (tmp_path, folder))
    assert found.memory is not None and found.memory == expected.memory
    assert found.weights is not None and expected.weights is not None
    assert found.weights.parameters == expected.weights.parameters


def test_a_run_that_does_not_fit_is_exit_code_1(folder, tmp_path):
    recipe = tmp_path / "run.toml"
    sections = {key: value for key, value in tables(folder).items() if key not in ("reward", "policy")}
    lines = [f"{name}.{key} = {json.dumps(value)}" for name, keys in sections.items() for key, value in keys.items()]
    recipe.write_text("\n".join([*lines, "policy.prompts_per_step = 2", '[[reward.functions]]\nname = "math"\n']))
    results = {
        size: CliRunner().invoke(app, ["plan", str(recipe), "--memory", size, "--no-gpu"]) for size in ("1MiB", "80GiB")
    }
    assert {size: result.exit_code for size, result in results.items()} == {"1MiB": 1, "80GiB": 0}, results
    assert "does not fit into 1.0 MiB" in results["1MiB"].output

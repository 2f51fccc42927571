"""Vision-language policies spread over ranks train as one process does: losses, gradients and weights, to 1e-5."""

from functools import cache

import llm_parity as parity
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from cosmos_rl_core.checkpoint.saver import files_beside
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import ParallelSection, PolicySection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import local_part, whole
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.plan.estimate import estimate
from cosmos_rl_core.plan.traffic import traffic
from cosmos_rl_core.types import Share
from cosmos_rl_llm.config import LLMDataConfig, LLMModelConfig
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.model.checkpoint import read_shape
from cosmos_rl_llm.model.vision_parts import freeze
from doubles.fake_ranks import Collectives
from doubles.ranks import run_ranks

pytest.importorskip("PIL")

from tiny_vision import make, write_processing

STEPS = 3
SEQUENCE = {"sequence_parallel": True}
INTERLEAVED = {"pipeline_schedule": "interleaved_1f1b", "stages_per_rank": 2}
DATA = LLMDataConfig(path="unused.jsonl")


@cache
def alone(family, **options):
    return parity.train(family, num_steps=STEPS, **options)


def check(family, dims, *, parallel=None, memory=None, **options):
    world_size = ParallelDims(**dims).world_size
    spread = {"family": family, "dims": dims, "parallel": parallel, "memory": memory, "num_steps": STEPS}
    parity.assert_equal(alone(family, **options), run_ranks(parity.train_rank, world_size, **spread, **options))


def test_fsdp():
    check("qwen3_vl", {"dp_shard": 2}, packed=False)


def test_pairs_with_pictures_over_fsdp():
    check("qwen2_5_vl", {"dp_shard": 2}, algorithm="dpo")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "dims", "parallel", "options"),
    [
        ("qwen2_5_vl", {"dp_replicate": 2, "dp_shard": 2}, None, {"packed": False}),
        ("qwen3_vl", {"tp": 2}, SEQUENCE, {}),
        ("qwen3_vl", {"cp": 2}, None, {}),
        ("qwen3_vl", {"pp": 2}, None, {}),
    ],
)
def test_each_axis(family, dims, parallel, options):
    check(family, dims, parallel=parallel, **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    ("dims", "parallel", "options"),
    [
        ({"dp_shard": 2}, None, {}),
        ({"dp_replicate": 2}, None, {"algorithm": "sft"}),
        ({"dp_shard": 4}, {"reshard_after_forward": False}, {"packed": False}),
        ({"dp_replicate": 2, "dp_shard": 2}, {"reduce_once": True}, {}),
        ({"tp": 2}, None, {}),
        ({"cp": 2}, None, {"packed": False}),
        ({"dp_shard": 2, "tp": 2}, SEQUENCE, {"packed": False}),
        ({"dp_shard": 2, "cp": 2}, None, {}),
        ({"cp": 2, "tp": 2}, SEQUENCE, {}),
        ({"pp": 2, "dp_shard": 2}, None, {"packed": False}),
        ({"pp": 2, "cp": 2}, None, {}),
        ({"pp": 2, "tp": 2}, SEQUENCE, {}),
        ({"pp": 2}, INTERLEAVED, {"num_layers": 4}),
    ],
)
def test_axes_together(family, dims, parallel, options):
    check(family, dims, parallel=parallel, **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl_moe", "idefics3", "smolvlm", "internvl", "llava", "gemma3"])
@pytest.mark.parametrize(
    ("dims", "parallel"), [({"dp_shard": 2}, None), ({"tp": 2}, SEQUENCE), ({"cp": 2}, None), ({"pp": 2}, None)]
)
def test_other_families(family, dims, parallel):
    check(family, dims, parallel=parallel)


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective", "activation_offload": True},
        {"parameter_offload": True},
    ],
)
def test_options_of_memory_change_nothing(memory):
    check("qwen3_vl", {"dp_shard": 2}, memory=memory)


@pytest.mark.ci
def test_frozen_parts():
    check("qwen3_vl", {"dp_shard": 2}, frozen=("tower", "language_model"))


def write(directory):
    make("qwen3_vl").save_pretrained(directory)
    write_processing(directory)


def build(path, *, dims=None, **model):
    mesh = ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu")) if dims else None
    setup = ModelSetup(mesh=mesh, parallel=ParallelSection(**dims or {}))
    return LLM.build_policy(LLMModelConfig(path=str(path), **model), data=DATA, sampling=None, seed=0, setup=setup)


def built(rank, world_size, *, path, dims, **model):
    policy = build(path, dims=dims, **model)
    shown = parity.vision_of(policy.module.causal_lm)
    microbatch = parity.make_batch(0, share=Share(), supervised=True, microbatch_terms=1000, vision=shown)
    with torch.no_grad():
        found = {"logprobs": policy.forward(microbatch.microbatches[0]).logprobs}
    found |= {name: whole(tensor) for name, tensor in policy.weights().items()}
    return {name: tensor.numpy().copy() for name, tensor in found.items()}


@pytest.mark.ci
def test_a_checkpoint_is_read_by_parts(tmp_path):
    write(tmp_path)
    expected = built(0, 1, path=str(tmp_path), dims=None)
    for found in run_ranks(built, 2, path=str(tmp_path), dims={"dp_shard": 2}):
        assert set(found) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5 * (name == "logprobs"), err_msg=name)


@pytest.mark.ci
@pytest.mark.parametrize("dims", [{"dp_shard": 2}, {"tp": 2}])
def test_a_projector_beside_adapters_is_sharded_and_saved(tmp_path, dims):
    pytest.importorskip("peft")
    write(tmp_path)
    beside = {"freeze": ("tower",), "lora": {"rank": 2, "whole": ("projector",)}}
    expected = built(0, 1, path=str(tmp_path), dims=None, **beside)
    assert any("merger" in name for name in expected) and any("lora_B" in name for name in expected)
    for found in run_ranks(built, 2, path=str(tmp_path), dims=dims, **beside):
        assert set(found) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5 * (name == "logprobs"), err_msg=name)


def test_a_pipeline_with_a_projector_beside_adapters_is_refused(tmp_path):
    pytest.importorskip("peft")
    write(tmp_path)
    setup = ModelSetup(parallel=ParallelSection(pp=2))
    section = LLMModelConfig(path=str(tmp_path), lora={"rank": 2, "whole": ("projector",)})
    with pytest.raises(UserError, match=r"model\.lora\.whole; set pp = 1"):
        LLM.build_policy(section, data=DATA, sampling=None, seed=0, setup=setup)


def saved(rank, world_size, *, path, dims):
    policy = build(path, dims=dims)
    weights = {name: whole(tensor).numpy().copy() for name, tensor in policy.weights().items()}
    files = {f"files/{name}": np.frombuffer(data, np.uint8) for name, data in files_beside(policy).items()}
    return weights | (files if rank == 0 else {})


@pytest.mark.ci
@pytest.mark.parametrize("dims", [{"dp_shard": 2}, {"pp": 2}])
def test_a_checkpoint_of_ranks_loads_as_the_model_it_came_from(tmp_path, dims):
    write(tmp_path)
    ranks = run_ranks(saved, 2, path=str(tmp_path), dims=dims)
    found = {name: value for rank in ranks for name, value in rank.items()}
    (tmp_path / "saved").mkdir()
    for name in [name for name in found if name.startswith("files/")]:
        (tmp_path / "saved" / name.removeprefix("files/")).write_bytes(found.pop(name).tobytes())
    save_file(found, tmp_path / "saved/model.safetensors", metadata={"format": "pt"})
    loaded, original = build(tmp_path / "saved"), build(tmp_path)
    weights = original.weights()
    assert loaded.weights().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in loaded.weights().items())
    assert loaded.chat.vision.family.files == original.chat.vision.family.files != {}


def test_frozen_parts_stay_and_are_not_sent(tmp_path):
    write(tmp_path)
    policy = build(tmp_path, freeze=["tower", "language_model"])
    projector = {name for name in policy.weights() if "merger" in name}
    assert {name for name, each in policy.module.named_parameters() if each.requires_grad} == projector
    assert policy.rollout_weights().keys() == projector
    engine = LLM.build_engine(
        LLMModelConfig(path=str(tmp_path), freeze=["tower", "language_model"]), data=DATA, name="torch", options={}
    )
    assert engine.weights().keys() == projector
    with pytest.raises(UserError, match="no tower"):
        freeze(parity.make_tiny("qwen3"), ["tower"])


def held_and_sent(rank, world_size, *, path, dims):
    policy = build(path, dims=dims)
    parameters = [local_part(parameter) for parameter in policy.module.parameters()]
    found = {"parameters": sum(each.numel() * each.element_size() for each in parameters)}
    if "dp_shard" in dims:
        shown = parity.vision_of(policy.module.causal_lm)
        batch = parity.make_batch(1, share=Share(), supervised=True, microbatch_terms=1000, vision=shown)
        with Collectives(policy.module.mesh) as seen:
            policy.forward(batch.microbatches[0]).logprobs.sum().backward()
        for kind in ("all-gather", "reduce-scatter"):
            found[f"{kind} calls"], found[f"{kind} bytes"] = seen.found["fsdp", kind]
    return found


@pytest.mark.ci
@pytest.mark.parametrize("dims", [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}])
def test_a_rank_holds_and_sends_what_is_planned(tmp_path, dims):
    write(tmp_path)
    shape = read_shape(tmp_path, LLMModelConfig(path=str(tmp_path)))
    policy, sizes = PolicySection(parallel=ParallelSection(**dims)), ParallelDims(**dims)
    planned = {"parameters": estimate(shape, dims=sizes, policy=policy, tokens=100).parameters}
    if "dp_shard" in dims:
        for one in traffic(shape, dims=sizes, policy=policy, tokens=100):
            for name, number in ((f"{one.kind} calls", one.calls), (f"{one.kind} bytes", one.bytes)):
                planned[name] = planned.get(name, 0) + number
    ranks = run_ranks(held_and_sent, 2, path=str(tmp_path), dims=dims)
    assert {name: max(int(found[name]) for found in ranks) for name in planned} == planned

"""Models over ranks are built on meta: every rank holds its shards and at most one block, and the values are right."""

from pathlib import Path

import llm_parity as parity
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cosmos_rl_core.parallel.config import ParallelSection, PolicySection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import whole
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.plan.estimate import estimate
from cosmos_rl_core.plan.live_bytes import LiveBytes
from cosmos_rl_core.plan.needs import START
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.types import Share
from cosmos_rl_llm import build
from cosmos_rl_llm.config import LLMDataConfig, LLMModelConfig
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.model.causal_lm import empty_model, load_model
from cosmos_rl_llm.model.checkpoint import read_shape
from cosmos_rl_llm.model.weights import find_weights
from cosmos_rl_llm.tiny import write_tokenizer
from doubles.ranks import run_ranks

LAYERS = 6


def write(directory, family, **sizes):
    parity.make_tiny(family, **sizes).save_pretrained(directory)
    write_tokenizer(directory)


def build_policy(path, *, dims=None, lora=None, dtype="float32", frozen=False):
    mesh = ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu")) if dims else None
    setup = ModelSetup(mesh=mesh, parallel=ParallelSection(**dims or {}), frozen=frozen)
    model = LLMModelConfig.model_validate({"path": path, "lora": lora, "dtype": dtype})
    data = LLMDataConfig(path="unused.jsonl", chat_template="none")
    return LLM.build_policy(model, data=data, sampling=None, seed=0, setup=setup)


def values(path, *, dims=None, lora=None):
    """Log-probabilities, whole parameters and all buffers."""
    policy = build_policy(path, dims=dims, lora=lora)
    microbatch = parity.make_batch(0, share=Share(), supervised=True, microbatch_terms=1000).microbatches[0]
    with torch.no_grad():
        found = {"logprobs": policy.forward(microbatch).logprobs}
        found |= {name: whole(tensor) for name, tensor in policy.module.named_parameters()}
    found |= {name: buffer for name, buffer in policy.module.named_buffers()}
    assert not any(tensor.is_meta for tensor in found.values())
    return {name: tensor.numpy().copy() for name, tensor in found.items()}


def rank_values(rank, world_size, *, in_parts=True, **options):
    if not in_parts:
        build.find_weights = lambda *_: None
    return values(**options)


@pytest.mark.parametrize(
    ("family", "dims", "lora", "in_parts"),
    [
        ("gemma3_text", {"dp_shard": 2}, None, True),  # tied; a buffer that scales embeddings
        ("qwen3", {"tp": 2}, {"rank": 4}, True),
        ("qwen3-moe", {"dp_shard": 2, "tp": 2, "ep": 2}, None, True),
        ("qwen3-moe", {"dp_shard": 2}, None, False),
    ],
)
def test_parameters_buffers_and_adapters_are_those_of_one_process(tmp_path, family, dims, lora, in_parts):
    if lora:
        pytest.importorskip("peft")
    write(tmp_path, family)
    expected = values(str(tmp_path), lora=lora)
    options = {"path": str(tmp_path), "dims": dims, "lora": lora, "in_parts": in_parts}
    for found in run_ranks(rank_values, ParallelDims(**dims).world_size, **options):
        assert set(found) == set(expected)
        for name, value in expected.items():
            tolerance = 1e-5 if name == "logprobs" else 0
            np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("family", parity.FAMILIES)
def test_every_family_is_read_by_boxes(tmp_path, family):
    write(tmp_path, family)
    empty = empty_model(tmp_path, dtype=torch.float32)
    assert all(parameter.is_meta for parameter in empty.parameters())
    weights = find_weights(empty, str(tmp_path))
    assert weights is not None
    loaded = load_model(tmp_path, dtype=torch.float32)
    with build.open_weights(str(tmp_path)) as reader:
        for name, tensor in loaded.state_dict().items():
            box = tuple(slice(size // 3, size) for size in tensor.shape)
            assert torch.equal(reader(weights[name])(box), tensor[box]), name
            assert torch.equal(reader(weights[name])(...), tensor), name
    buffers = dict(loaded.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in empty.named_buffers())


def reference_beside_policy(rank, world_size, *, path, dims):
    found = {}
    for name, frozen in (("policy", False), ("reference", True)):
        policy = build_policy(path, dims=dims, dtype="bfloat16", frozen=frozen)
        microbatch = parity.make_batch(0, share=Share(), supervised=True, microbatch_terms=1000).microbatches[0]
        with torch.no_grad():
            found[name] = policy.forward(microbatch).logprobs.numpy()
        dtypes = {parameter.dtype for parameter in policy.module.parameters()}
        assert dtypes == {torch.bfloat16 if frozen else torch.float32}
    return found


@pytest.mark.parametrize(
    ("family", "dims"),
    [
        ("qwen3", {"tp": 2}),
        ("gemma3_text", {"dp_shard": 2}),
        ("qwen3-moe", {"dp_shard": 2, "ep": 2}),
        ("llama", {"pp": 2}),
    ],
)
def test_a_reference_without_masters_computes_the_same_bits(tmp_path, family, dims):
    write(tmp_path, family)
    for found in run_ranks(reference_beside_policy, 2, path=str(tmp_path), dims=dims):
        assert np.array_equal(found["policy"], found["reference"])


def held_while_building(rank, world_size, *, path, dims):
    model = empty_model(path, dtype=torch.float32)
    build_policy(path, dims=dims)  # the check of the family on a small model is cached from here on
    blocks = [*model.base_model.layers, model.get_input_embeddings(), model.get_output_embeddings()]
    with LiveBytes(inputs=True) as held:
        policy = build_policy(path, dims=dims)
    tensors = [*policy.module.parameters(), *policy.module.buffers()]
    return {
        "peak": held.peak,
        "part": sum(num_bytes(tensor) for tensor in tensors),
        "block": max(sum(num_bytes(parameter) for parameter in block.parameters()) for block in blocks),
        "whole": sum(num_bytes(parameter) for parameter in model.parameters()),
        "mapped": max(num_bytes(parameter) for parameter in model.parameters()),  # a file's weight counts as a whole
        "planned": planned(path, dims),
    }


def planned(path, dims):
    """Bytes of a rank at the start according to `cosmos-rl plan`."""
    shape = read_shape(Path(path), LLMModelConfig(path=path))
    assert shape is not None
    policy = PolicySection(parallel=ParallelSection(**dims))
    rank = estimate(shape, dims=ParallelDims(**dims), policy=policy, tokens=100)
    config = load_config(
        {
            "run": {"domain": "llm", "max_steps": 1},
            "model": {"path": path},
            "data": {"path": "unused.jsonl", "chat_template": "none"},
            "algorithm": {"name": "sft"},
            "policy": {"parallel": dims},
        }
    )
    return sum(part.bytes or 0 for part in LLM.held_by_policy(config, rank) if START in part.at)


def num_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


@pytest.mark.parametrize(
    ("family", "dims"),
    [("llama", {"dp_shard": 2, "tp": 2}), ("qwen3-moe", {"dp_shard": 4, "ep": 2}), ("llama", {"pp": 2, "dp_shard": 2})],
)
def test_a_rank_holds_its_part_and_one_block_while_building(tmp_path, family, dims):
    write(tmp_path, family, num_layers=LAYERS)
    for found in run_ranks(held_while_building, 4, path=str(tmp_path), dims=dims):
        assert found["part"] <= found["peak"] <= found["part"] + found["block"] < 0.6 * found["whole"], found
        assert found["peak"] <= found["planned"] + found["mapped"], found
        assert found["part"] <= found["planned"] <= 1.01 * (found["part"] + found["block"]), found

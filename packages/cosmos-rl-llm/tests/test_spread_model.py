"""Building a policy over ranks: reading each rank's part of a checkpoint, types, and what cannot be spread."""

import llm_parity as parity
import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import ParallelSection, PrecisionSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Share
from cosmos_rl_llm.config import LLMDataConfig, LLMModelConfig
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.model.causal_lm import make_model
from cosmos_rl_llm.policy.parallelize import check_sizes
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.tiny import write_tokenizer
from doubles.ranks import run_ranks


def write(directory, family):
    model = parity.make_tiny(family)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return model


def setup_of(dims, *, precision=None, **parallel):
    mesh = ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu"))
    section = ParallelSection(**dims, **parallel)
    return ModelSetup(mesh=mesh, parallel=section, precision=PrecisionSection(**(precision or {})))


def built(rank, world_size, *, path, dims, dtype="float32", precision=None):
    """Log-probabilities of a batch and the whole weights of a policy that the domain builds over ranks."""
    data = LLMDataConfig(path="unused.jsonl", chat_template="none")
    model = LLMModelConfig(path=path, dtype=dtype)
    setup = setup_of(dims, precision=precision)
    policy = LLM.build_policy(model, data=data, sampling=None, seed=0, setup=setup)
    with torch.no_grad():
        logprobs = policy.forward(microbatch()).logprobs
    weights = {name: tensor.full_tensor().float().numpy() for name, tensor in policy.weights().items()}
    placed = {placement for tensor in policy.weights().values() for placement in tensor.placements}
    assert all(placement.is_replicate() or type(placement) is Shard for placement in placed)
    kinds = {str(tensor.dtype) for tensor in policy.weights().values()}
    assert kinds == {f"torch.{(precision or {}).get('parameters', 'float32')}"}
    return {"logprobs": logprobs.numpy(), **weights}


def microbatch():
    return parity.make_batch(0, share=Share(), supervised=True, microbatch_terms=1000).microbatches[0]


@pytest.mark.parametrize(
    ("family", "dims"),
    [("qwen3", {"dp_shard": 2, "tp": 2}), ("llama", {"pp": 2, "dp_shard": 2}), ("qwen3-moe", {"dp_shard": 2, "ep": 2})],
)
def test_a_checkpoint_is_read_into_ranks(tmp_path, family, dims):
    whole = write(tmp_path, family)
    expected = {name: tensor.detach().numpy() for name, tensor in whole.named_parameters()}
    ranks = run_ranks(built, ParallelDims(**dims).world_size, path=str(tmp_path), dims=dims)
    for name, array in expected.items():
        found = [metrics[name] for metrics in ranks if name in metrics]
        assert found and all(np.array_equal(array, other) for other in found), name
    with torch.no_grad():
        logprobs = CausalLMPolicy(whole).forward(microbatch()).logprobs
    last = [metrics["logprobs"] for metrics in ranks if metrics["logprobs"].any()]
    assert all(np.allclose(found, logprobs.numpy(), rtol=1e-5, atol=1e-5) for found in last) and last


@pytest.mark.parametrize("precision", [{}, {"parameters": "bfloat16"}])
def test_bfloat16_computes_close_to_float32(tmp_path, precision):
    whole = write(tmp_path, "llama")
    options = {"path": str(tmp_path), "dims": {"dp_shard": 2}, "dtype": "bfloat16", "precision": precision}
    found = run_ranks(built, 2, **options)[0]["logprobs"]
    with torch.no_grad():
        exact = CausalLMPolicy(whole).forward(microbatch()).logprobs.numpy()
    assert found.dtype == np.float32
    assert 0 < np.abs(found - exact).mean() < 0.02


def test_bfloat16_parameters_want_bfloat16_products(tmp_path):
    write(tmp_path, "llama")
    model = LLMModelConfig(path=str(tmp_path))
    setup = ModelSetup(precision=PrecisionSection(parameters="bfloat16"))
    data = LLMDataConfig(path="unused.jsonl", chat_template="none")
    with pytest.raises(UserError, match=r'parameters = "bfloat16".*model\.dtype = "bfloat16"'):
        LLM.build_policy(model, data=data, sampling=None, seed=0, setup=setup)


@pytest.mark.parametrize(
    ("tp", "message"),
    [
        (3, "tp = 3 does not divide the model's 8 attention heads"),
        (8, "tp = 8 does not divide the model's 4 key-value heads"),
    ],
)
def test_heads_that_tp_does_not_divide_are_named(tp, message):
    config = parity.make_tiny("llama").config
    with pytest.raises(UserError, match=message):
        check_sizes(config, tp=tp)


def refuses(rank, world_size):
    gpt2 = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    model = make_model({**gpt2, "bos_token_id": 1, "eos_token_id": 1}, dtype=torch.float32, seed=0)
    with pytest.raises(UserError, match=r"GPT2LMHeadModel has no supported plan.*set tp = 1"):
        CausalLMPolicy(model, setup=setup_of({"tp": 2}))


def test_a_family_without_a_plan_is_named():
    run_ranks(refuses, 2)


def evaluates(rank, world_size):
    policy = CausalLMPolicy(parity.make_tiny("qwen3"), setup=setup_of({"dp_shard": 2}, reshard_after_forward=False))
    with torch.no_grad():
        policy.forward(microbatch())
    assert all(isinstance(tensor, DTensor) for tensor in policy.weights().values())
    assert all(isinstance(parameter, DTensor) for parameter in policy.module.parameters())


def test_a_pass_without_gradient_leaves_the_weights_sharded():
    run_ranks(evaluates, 2)


def test_a_policy_alone_is_named_like_its_checkpoint():
    model = parity.make_tiny("qwen3")
    names = [name for name, _ in model.named_parameters()]
    policy = CausalLMPolicy(model)
    assert [name for name, _ in policy.module.named_parameters()] == names
    assert list(policy.weights()) == names

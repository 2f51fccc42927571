"""Rotary embeddings that depend on the length: each sequence of a row has its own, as it would alone."""

import asyncio

import numpy as np
import pytest
import torch
from small_families import gradients, one_at_a_time, packed, sample, small
from tiny_engine import TokenChat
from torch import nn
from transformers import AutoConfig

from cosmos_rl_core.errors import PromptError, UserError
from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Prompt, Sampling
from cosmos_rl_llm.config import LLMTorchOptions
from cosmos_rl_llm.data.chat import Encoded
from cosmos_rl_llm.engines.torch.engine import TorchEngine, check_generation
from cosmos_rl_llm.engines.vllm.start import check_rope
from cosmos_rl_llm.model.miniature import VOCABULARY
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.rank_probe import check_ranks
from doubles.ranks import run_ranks

ORIGINAL = 18
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 4096,
}


def longrope(pairs, **values):
    factors = {"short_factor": [1.0] * pairs, "long_factor": [2.0 + i for i in range(pairs)]}
    return {**LONGROPE, **factors, **values}


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
PHI3 = {"original_max_position_embeddings": 4096, "max_position_embeddings": 131_072, "rope_parameters": longrope(48)}
KINDS = {
    "phi3": PHI3,
    "phimoe": {"rope_parameters": longrope(64, long_mscale=1.2, short_mscale=1.1)},
    "qwen3": {"rope_parameters": DYNAMIC},
}


def short_and_long():
    """One prompt with responses on both sides of the original length, and a longer prompt."""
    rng = np.random.default_rng(0)
    prompt, other = (rng.integers(20, VOCABULARY, size, dtype=np.int32) for size in (6, 21))
    sizes = [(prompt, 5), (prompt, 30), (prompt, 9), (other, 4), (other, 25)]
    return [sample(before, rng.integers(20, VOCABULARY, size, dtype=np.int32)) for before, size in sizes]


@pytest.mark.parametrize("kind", KINDS)
def test_short_sequences_beside_long_ones_are_those_of_transformers(kind):
    model, reference, given = small(kind, **KINDS[kind]), small(kind, **KINDS[kind]), short_and_long()
    policy = CausalLMPolicy(model)
    assert not policy.module.unpacked
    found = policy.forward(packed(given)).logprobs
    # dynamic NTK keeps the factors of the longest sequence so far: each sequence has a fresh model
    each = [one_at_a_time(small(kind, **KINDS[kind]), [one]) for one in given] if kind == "qwen3" else None
    wanted = one_at_a_time(reference, given)
    torch.testing.assert_close(found, wanted if each is None else torch.cat(each), rtol=0, atol=2e-5)
    if each is None:
        right, mine = gradients(reference, wanted), gradients(model, found)
        largest = max(gradient.abs().max().item() for gradient in right.values())
        for name, gradient in right.items():
            torch.testing.assert_close(mine[name], gradient, rtol=0, atol=1e-4 * largest, msg=name)


def over_ranks(rank, world_size, *, dims):
    mesh = ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu"))
    setup = ModelSetup(mesh=mesh, parallel=ParallelSection.model_validate(dims))
    check_ranks(small("phi3", **PHI3), setup)


@pytest.mark.parametrize("axis", ["cp", "pp"])
def test_a_part_of_a_row_knows_the_length_of_its_sequences(axis):
    run_ranks(over_ranks, 2, dims={axis: 2})


def engine_of(model: nn.Module, prompts: dict[int, np.ndarray]) -> TorchEngine:
    chat = TokenChat(encoded=lambda row: Encoded(tokens=prompts[row["number"]], text=""))
    return TorchEngine(model, chat, LLMTorchOptions())  # pyright: ignore[reportArgumentType]


def test_the_torch_engine_generates_short_and_long_sequences_beside_each_other():
    check_generation(small("phi3", **PHI3))
    check_generation(small("qwen3", **KINDS["qwen3"]))


def test_a_response_that_could_grow_past_the_original_length_is_refused():
    prompts = {0: np.arange(20, 30, dtype=np.int32), 1: np.arange(20, 42, dtype=np.int32)}

    async def generate(sample_id, most):
        engine = engine_of(small("phi3", **PHI3), prompts)
        try:
            prompt = Prompt(sample_id=sample_id, row={"number": sample_id})
            await engine.generate(prompt, num_samples=1, sampling=Sampling(max_terms=most), seed=0)
        finally:
            await engine.close()

    asyncio.run(generate(0, ORIGINAL - 9))
    asyncio.run(generate(1, 20))
    with pytest.raises(PromptError, match=r"10 tokens and with up to 10 new ones exceeds 18.*max_tokens to at most 9,"):
        asyncio.run(generate(0, ORIGINAL - 8))


def test_vllm_with_its_one_set_of_factors_is_refused_above_the_original_length():
    config = AutoConfig.for_model("phi3", **PHI3)
    check_rope(config, 4096)
    check_rope(AutoConfig.for_model("llama"), None)
    with pytest.raises(UserError, match=r"vllm.*above 4096 tokens.*set model.max_length = 4096"):
        check_rope(config, 8192)

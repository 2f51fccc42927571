"""Sequences cut over ranks: log-probabilities and gradients against one process, through the real policy."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import whole
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup, Share
from cosmos_rl_llm.data.collate import collate
from cosmos_rl_llm.model.causal_lm import make_model
from cosmos_rl_llm.policy.context import check_heads
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.token_model import TermOptions
from cosmos_rl_llm.policy.truncation import Truncation
from doubles.ranks import run_ranks

VOCAB = 37
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": {**BASE, "model_type": "llama"},
    "qwen3": {**BASE, "model_type": "qwen3", "num_attention_heads": 12, "num_key_value_heads": 3},
    "gemma3": {**BASE, **WINDOWS, "model_type": "gemma3_text", "query_pre_attn_scalar": 16, "num_key_value_heads": 1},
    "gpt_oss": {**BASE, **WINDOWS, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **{key: value for key, value in BASE.items() if key != "head_dim"},
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}
"""With 4 ranks: as many heads as ranks, fewer key-value heads than ranks, and numbers that do not divide each other."""


def tiny(family):
    model = make_model(FAMILIES[family], dtype=torch.float32, seed=0)
    with torch.no_grad():  # sinks start at zero
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(-1, 2, len(parameter)))
    return model


def ragged_microbatch():
    """Two groups of rollouts that share their prompts, of 41 rows: no multiple of the ranks."""
    rng = np.random.default_rng(3)
    groups = []
    for number, lengths in enumerate([(9, 1, 4), (2, 11)]):
        prompt = rng.integers(0, VOCAB, 6 + 3 * number, dtype=np.int32)
        rollouts = tuple(rollout_of(prompt, rng.integers(0, VOCAB, length, dtype=np.int32)) for length in lengths)
        groups.append(RolloutGroup(prompt=Prompt(sample_id=number, row={}), rollouts=rollouts))
    (microbatch,) = collate(groups, microbatch_terms=10**6, share=Share()).microbatches
    return microbatch


def rollout_of(prompt, tokens):
    return Rollout(
        arrays={"prompt_tokens": prompt, "tokens": tokens},
        rollout_logprobs=np.zeros(len(tokens), dtype=np.float32),
        versions=np.zeros(len(tokens), dtype=np.int32),
        loss_mask=np.ones(len(tokens), dtype=bool),
    )


def metrics_of(family, setup, truncation=None):
    """Log-probabilities, entropies and whole gradients of one microbatch."""
    policy = CausalLMPolicy(tiny(family), TermOptions(truncation=truncation), setup=setup)
    outputs = policy.forward(ragged_microbatch(), with_entropy=True)
    slopes = torch.linspace(-1, 1, len(outputs.logprobs))
    assert outputs.entropy is not None
    (outputs.logprobs * slopes + 0.1 * outputs.entropy * slopes.flip(0)).sum().backward()
    metrics = {"logprobs": outputs.logprobs, "entropy": outputs.entropy}
    for name, parameter in policy.module.named_parameters():
        assert parameter.grad is not None, name
        metrics[name] = whole(parameter.grad)
    return {name: tensor.detach().numpy() for name, tensor in metrics.items()}


def all_figures(rank, world_size, **sizes):
    mesh = ReplicaMesh.build(ParallelDims(**sizes), device=torch.device("cpu"))
    return every_metric(ModelSetup(mesh=mesh))


def every_metric(setup):
    of_ranks = {family: metrics_of(family, setup) for family in FAMILIES}
    of_ranks["penalised"] = metrics_of(next(iter(FAMILIES)), setup, Truncation(top_k=9, repetition_penalty=1.5))
    return {f"{family}/{name}": value for family, metrics in of_ranks.items() for name, value in metrics.items()}


@pytest.fixture(scope="module")
def alone():
    return every_metric(ModelSetup())


@pytest.mark.parametrize("sizes", [{"cp": 2}, {"cp": 4}], ids=str)
def test_logprobs_entropies_and_gradients_equal_those_of_one_process(alone, sizes):
    for found in run_ranks(all_figures, sizes["cp"], **sizes):
        for name, wanted in alone.items():
            scale = max(1.0, float(np.abs(wanted).max()))
            np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-5 * scale, err_msg=name)


def test_heads_that_cannot_be_cut_are_told_with_all_numbers():
    config = AutoConfig.for_model("llama", num_attention_heads=12, num_key_value_heads=4, hidden_size=48)
    check_heads(config, tp=2, cp=6)
    with pytest.raises(UserError, match=r"tp x cp = 2 x 4 = 8 does not divide the model's 12 attention heads"):
        check_heads(config, tp=2, cp=4)

"""Families of models: packed log-probs and gradients against transformers one sequence at a time, and the engine."""

import asyncio
import copy

import numpy as np
import pytest
import torch
from tiny_engine import TokenChat

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import Microbatch, Prompt, Rollout, RolloutGroup, Sampling, Share
from cosmos_rl_llm.config import LLMTorchOptions
from cosmos_rl_llm.data.collate import collate
from cosmos_rl_llm.engines.torch.engine import TorchEngine
from cosmos_rl_llm.model.causal_lm import make_model
from cosmos_rl_llm.policy.policy import CausalLMPolicy

VOCAB = 64
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "llama": {**BASE, "model_type": "llama"},
    "qwen2": {**BASE, "model_type": "qwen2"},
    "qwen3": {**BASE, "model_type": "qwen3"},
    "qwen3_moe": {**BASE, **EXPERTS, "model_type": "qwen3_moe", "norm_topk_prob": True},
    "mistral": {**BASE, "model_type": "mistral", "sliding_window": 6},
    "gemma2": {**BASE, **WINDOWS, "model_type": "gemma2", "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "gemma3": {**BASE, **WINDOWS, "model_type": "gemma3_text", "query_pre_attn_scalar": 16},
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
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}

SPARSE = ("qwen3_moe", "gpt_oss", "deepseek_v3")
"""Families with experts."""


def tiny(family):
    model = make_model(FAMILIES[family], dtype=torch.float32, seed=0)
    with torch.no_grad():  # what starts at zero, such as biases and sinks, must count too
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1 and not name.endswith("norm.weight"):
                parameter.copy_(torch.linspace(-0.5, 0.7, len(parameter)))
    return model


def groups_of(*lengths, prompt=5, seed=0):
    """Groups of two rollouts each, of `lengths` and half of them, with prompts of different lengths."""
    rng = np.random.default_rng(seed)
    groups = []
    for number, length in enumerate(lengths):
        tokens = rng.integers(2, VOCAB, prompt + number).astype(np.int32)
        rollouts = tuple(rollout_of(tokens, rng.integers(2, VOCAB, size)) for size in (length, 1 + length // 2))
        groups.append(RolloutGroup(prompt=Prompt(sample_id=number, row={}), rollouts=rollouts))
    return groups


def rollout_of(prompt, tokens):
    count = len(tokens)
    return Rollout(
        arrays={"prompt_tokens": prompt, "tokens": tokens.astype(np.int32)},
        rollout_logprobs=np.zeros(count, dtype=np.float32),
        versions=np.zeros(count, dtype=np.int32),
        loss_mask=np.ones(count, dtype=bool),
    )


def packed(groups) -> Microbatch:
    (microbatch,) = collate(groups, microbatch_terms=10**6, share=Share()).microbatches
    return microbatch


def one_at_a_time(model, groups):
    """Log-probabilities [T] by the model's own eager attention, each sequence alone."""
    model.set_attn_implementation("eager")
    parts = []
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        prompt, tokens = (torch.from_numpy(rollout.arrays[name]).long() for name in ("prompt_tokens", "tokens"))
        logits = model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
        parts.append(torch.log_softmax(logits.float(), -1).gather(1, tokens[:, None])[:, 0])
    return torch.cat(parts)


def gradients(model, logprobs):
    slopes = torch.linspace(-1, 1, len(logprobs))
    logprobs.mul(slopes).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_and_gradients_equal_each_sequence_alone(family):
    reference, model, groups = tiny(family), tiny(family), groups_of(9, 22, 3, 14)
    wanted = one_at_a_time(reference, groups)
    found = CausalLMPolicy(model).forward(packed(groups)).logprobs
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    right = gradients(reference, wanted)
    for name, gradient in gradients(model, found).items():
        scale = right[name].abs().max().item()
        torch.testing.assert_close(gradient, right[name], rtol=1e-4, atol=1e-5 * max(1.0, scale), msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_draws_from_the_policys_distribution(family):
    model, prompts = tiny(family), prompts_of(7, 2, 19)
    reference = copy.deepcopy(model)
    groups = generate(model, prompts, sampling=Sampling(max_terms=12))
    found = np.concatenate([rollout.rollout_logprobs for group in groups for rollout in group.rollouts])
    wanted = CausalLMPolicy(reference).forward(packed(groups)).logprobs.detach().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SPARSE])
def test_a_rollout_has_the_same_bits_alone_and_beside_others(family, threads):
    prompts, before = prompts_of(5, 1, 30, 13), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together, *alone = (
            generate(tiny(family), chosen, sampling=Sampling(max_terms=6), batch_invariant=True)
            for chosen in (prompts, *[[prompt] for prompt in prompts])
        )
    finally:
        torch.set_num_threads(before)
    for left, right in zip(together, [group for (group,) in alone], strict=True):
        for one, other in zip(left.rollouts, right.rollouts, strict=True):
            assert np.array_equal(one.arrays["tokens"], other.arrays["tokens"])
            assert np.array_equal(one.rollout_logprobs, other.rollout_logprobs)


@pytest.mark.parametrize("family", SPARSE)
def test_experts_are_refused_where_bits_must_not_depend_on_the_batch(family):
    with pytest.raises(UserError, match=r"rollout\.options\.batch_invariant: .* has experts"):
        generate(tiny(family), prompts_of(5), sampling=Sampling(max_terms=2), batch_invariant=True)


def prompts_of(*lengths):
    rng = np.random.default_rng(1)
    return [Prompt(sample_id=i, row={"tokens": rng.integers(2, VOCAB, length)}) for i, length in enumerate(lengths)]


def generate(model, prompts, *, sampling, batch_invariant=False):
    async def whole():
        options = LLMTorchOptions(max_sequences=16, batch_invariant=batch_invariant)
        engine = TorchEngine(model, TokenChat(end_ids=frozenset({1})), options)
        try:
            calls = (engine.generate(p, num_samples=2, sampling=sampling, seed=p.sample_id) for p in prompts)
            return [rollouts for _, rollouts in await asyncio.gather(*calls)]
        finally:
            await engine.close()

    answers = asyncio.run(asyncio.wait_for(whole(), timeout=60))
    return [RolloutGroup(prompt=p, rollouts=tuple(rollouts)) for p, rollouts in zip(prompts, answers, strict=True)]

"""The policy's log-probabilities, entropies and gradients against a plain forward pass of each sequence."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import MemorySection
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Microbatch, TermBatch
from cosmos_rl_llm.model.causal_lm import load_model, load_tokenizer, make_model, named_weights
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.token_model import TermOptions

VOCAB = 70
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
CONFIGS = {
    "qwen3": {**BASE, "model_type": "qwen3", "tie_word_embeddings": True},
    "llama": {**BASE, "model_type": "llama", "tie_word_embeddings": False},
    "gemma3": {
        **BASE,
        "model_type": "gemma3_text",
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,  # and dropout of 0.1 by default
    },
}


def tiny(kind="qwen3"):
    return make_model(CONFIGS[kind], dtype=torch.float32, seed=0)


def sequences(sizes, seed=0):
    """Random (prompt, response) pairs for (prompt length, response length) pairs."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, VOCAB, p), rng.integers(0, VOCAB, t)) for p, t in sizes]


def group():
    """Rollouts of two prompts, some with a common beginning, two of them equal."""
    (first, a), (second, b), (_, c) = sequences([(9, 6), (20, 4), (1, 8)], seed=3)
    branch = np.concatenate([a[:3], c])
    return [(first, a), (first, branch), (first, c), (second, b), (second, b), (second, b[:2]), (first, a)]


SIZES = [(3, 5), (1, 9), (60, 4), (7, 1), (2, 40)]


def packed(pairs):
    starts = np.cumsum([0, *(len(p) + len(t) for p, t in pairs)])
    rows = {
        "tokens": [x for pair in pairs for x in pair],
        "positions": [np.arange(len(p) + len(t)) for p, t in pairs],
        "sequence_index": [np.full(len(p) + len(t), i) for i, (p, t) in enumerate(pairs)],
        "logit_index": [start + len(p) - 1 + np.arange(len(t)) for start, (p, t) in zip(starts, pairs)],
        "labels": [t for _, t in pairs],
    }
    inputs = {name: torch.from_numpy(np.concatenate(parts)).long() for name, parts in rows.items()}
    zeros = torch.zeros(len(inputs["labels"]))
    terms = TermBatch(
        rollout_logprobs=zeros,
        advantages=zeros,
        loss_mask=zeros + 1,
        rollout_index=zeros.long(),
        num_rollouts=len(pairs),
    )
    return Microbatch(inputs=inputs, terms=terms)


def plain(model, pairs, temperature=1.0):
    """Log-probabilities [T] and entropies [T], one unpacked sequence at a time."""
    logprobs, entropies = [], []
    for prompt, response in pairs:
        row = torch.from_numpy(np.concatenate([prompt, response]))[None]
        logits = model(row, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
        table = torch.log_softmax(logits, -1)
        logprobs.append(table[torch.arange(len(response)), torch.from_numpy(response)])
        entropies.append(-(table.exp() * table).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weighted(logprobs, entropy):
    """A loss that gives every term another slope."""
    slopes = torch.linspace(-1, 2, len(logprobs))
    return (slopes * logprobs).sum() + (slopes.flip(0) * entropy).sum()


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("further", [[], [(3, 4)]], ids=["132 tokens", "139 tokens and one of padding"])
def test_packed_sequences_equal_separate_ones(kind, further):
    model, pairs = tiny(kind), sequences(SIZES + further)
    expected = plain(copy.deepcopy(model).eval(), pairs, 0.8)
    outputs = CausalLMPolicy(model, TermOptions(temperature=0.8)).forward(packed(pairs), with_entropy=True)
    torch.testing.assert_close(outputs.logprobs, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs.entropy, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_gradients_equal_those_of_separate_sequences(kind):
    model, pairs = tiny(kind), sequences(SIZES)
    reference = copy.deepcopy(model).eval()
    weighted(*plain(reference, pairs, 1.3)).backward()
    outputs = CausalLMPolicy(model, TermOptions(temperature=1.3)).forward(packed(pairs), with_entropy=True)
    weighted(outputs.logprobs, outputs.entropy).backward()
    expected, found = gradients(reference), gradients(model)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("kind", CONFIGS)
def test_shared_prompts_change_neither_logprobs_nor_gradients(kind):
    model = tiny(kind)
    reference = copy.deepcopy(model).eval()
    expected = plain(reference, group())
    weighted(*expected).backward()
    outputs = CausalLMPolicy(model).forward(packed(group()), with_entropy=True)
    weighted(outputs.logprobs, outputs.entropy).backward()
    torch.testing.assert_close(outputs.logprobs, expected[0], rtol=1e-5, atol=1e-5)
    for name, grad in gradients(reference).items():
        torch.testing.assert_close(gradients(model)[name], grad, rtol=1e-3, atol=2e-4, msg=name)


def test_shared_prompts_run_through_the_decoder_once():
    model, rows = tiny(), []
    policy = CausalLMPolicy(model)
    model.base_model.layers[0].register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[1]))
    policy.forward(packed(group()))
    assert rows == [9 + 6 + 8 + 8 + 20 + 4 + 9 + 6]  # a group again later in the row counts again


EXPERTS = {**BASE, "model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_chunks_of_terms_change_nothing(kind, with_entropy):
    results = []
    for terms_at_a_time in (1000, 7, 1):
        model = tiny(kind)
        policy = CausalLMPolicy(model, TermOptions(logits_bytes=4 * VOCAB * terms_at_a_time))
        outputs = policy.forward(packed(sequences(SIZES)), with_entropy=with_entropy)
        entropy = outputs.entropy if with_entropy else torch.zeros(1)
        weighted(outputs.logprobs, entropy.expand_as(outputs.logprobs)).backward()
        results.append((outputs.logprobs.detach(), gradients(model)))
    for logprobs, grads in results[1:]:
        torch.testing.assert_close(logprobs, results[0][0], rtol=1e-5, atol=1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, results[0][1][name], rtol=1e-4, atol=1e-4, msg=name)


def test_entropy_alone_has_a_gradient():
    model = tiny()
    entropy = CausalLMPolicy(model).forward(packed(sequences(SIZES)), with_entropy=True).entropy
    entropy.sum().backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


def test_activation_checkpointing_changes_no_gradient():
    results = []
    for checkpointing in (False, True):
        model = tiny()
        memory = MemorySection(activation_checkpointing="full" if checkpointing else "none")
        policy = CausalLMPolicy(model, setup=ModelSetup(memory=memory))
        policy.forward(packed(sequences(SIZES))).logprobs.sum().backward()
        results.append(gradients(model))
    for name, grad in results[0].items():
        torch.testing.assert_close(results[1][name], grad)


def test_a_sequence_does_not_see_its_neighbours():
    policy, pairs = CausalLMPolicy(tiny()), sequences(SIZES)
    before = policy.forward(packed(pairs)).logprobs
    pairs[2] = (pairs[2][0][::-1].copy(), pairs[2][1][::-1].copy())
    after = policy.forward(packed(pairs)).logprobs
    others = torch.ones(len(before), dtype=torch.bool)
    others[14:18] = False
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before, after)


def test_compute_dtype_runs_in_bfloat16_and_trains_float32_weights():
    model, pairs = tiny(), sequences(SIZES)
    exact = CausalLMPolicy(copy.deepcopy(model)).forward(packed(pairs)).logprobs
    outputs = CausalLMPolicy(model, TermOptions(compute_dtype=torch.bfloat16)).forward(packed(pairs))
    outputs.logprobs.sum().backward()
    assert outputs.logprobs.dtype == torch.float32
    assert model.get_input_embeddings().weight.grad.dtype == torch.float32
    error = (outputs.logprobs - exact).abs()
    assert 0 < error.mean() < 0.2


def test_bfloat16_weights_give_float32_logprobs():
    model = make_model(CONFIGS["llama"], dtype=torch.bfloat16, seed=0)
    logprobs = CausalLMPolicy(model).forward(packed(sequences(SIZES))).logprobs
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32 and logprobs.isfinite().all()


def test_weights_are_live_and_name_tied_tensors_once():
    policy = CausalLMPolicy(tiny("qwen3"))
    weights = policy.weights()
    assert "model.embed_tokens.weight" in weights and "lm_head.weight" not in weights
    assert "lm_head.weight" in CausalLMPolicy(tiny("llama")).weights()
    weights["model.norm.weight"].fill_(3.0)
    assert policy.module.causal_lm.base_model.norm.weight[0].item() == 3.0


def test_a_saved_policy_loads_again(tmp_path):
    policy = CausalLMPolicy(tiny("llama"))
    policy.save_config(tmp_path)
    save_file(policy.weights(), tmp_path / "model.safetensors")
    loaded = named_weights(load_model(tmp_path, dtype=torch.float32))
    assert loaded.keys() == policy.weights().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in policy.weights().items())


def test_the_same_seed_makes_the_same_model_and_leaves_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = named_weights(tiny()), named_weights(tiny())
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(UserError, match=r"model\.path = '.*nowhere'.*config\.json"):
        load_model(tmp_path / "nowhere", dtype=torch.float32)


def test_a_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model(tmp_path, dtype=torch.float32)


def test_a_directory_without_weights_is_named(tmp_path):
    tiny().config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model\.path.*safetensors"):
        load_model(tmp_path, dtype=torch.float32)


def test_weights_that_do_not_belong_to_the_config_are_named(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    config = tiny("llama").config
    config.num_hidden_layers = 3
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"lacks 9 weights.*model\.layers\.2"):
        load_model(tmp_path, dtype=torch.float32)


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    tiny().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no tokenizer; add one of tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_an_unknown_model_type_is_named():
    with pytest.raises(UserError, match="qwen33"):
        make_model({"model_type": "qwen33"}, dtype=torch.float32, seed=0)


def test_a_config_value_of_the_wrong_type_is_named():
    with pytest.raises(UserError, match="hidden_size"):
        make_model({"model_type": "qwen3", "hidden_size": "wide"}, dtype=torch.float32, seed=0)

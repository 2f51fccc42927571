"""Top-k and top-p: the engine's log-probabilities are the policy's, so that the first ratio is 1."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from cosmos_rl_core.parallel.axes.tensor import TensorAxis
from cosmos_rl_core.types import Prompt, RolloutGroup, Sampling, Share
from cosmos_rl_llm.config import LLMTorchOptions
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.data.collate import collate, collate_sft
from cosmos_rl_llm.engines.torch.engine import TorchEngine
from cosmos_rl_llm.model.causal_lm import load_model, load_tokenizer
from cosmos_rl_llm.model.output_head import OutputHead, Vocabulary
from cosmos_rl_llm.policy.logprobs import term_logprobs
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.token_model import TermOptions
from cosmos_rl_llm.policy.truncation import Repeats, Truncation
from cosmos_rl_llm.tiny import write_tiny_model
from doubles.ranks import run_ranks

SAMPLINGS = [
    Sampling(max_terms=12, temperature=0.7),
    Sampling(max_terms=12, temperature=0.7, top_k=4),
    Sampling(max_terms=12, top_p=0.6),
    Sampling(max_terms=12, temperature=1.3, top_k=6, top_p=0.8),
    Sampling(max_terms=12, temperature=0.7, repetition_penalty=1.5),
    Sampling(max_terms=12, top_k=6, top_p=0.8, repetition_penalty=0.6),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose next tokens differ in probability."""
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=2, hidden_size=32, initializer_range=0.3)


def build(folder, sampling):
    chat = Chat(tokenizer=load_tokenizer(folder), end_ids=frozenset({1}))
    options = TermOptions(temperature=sampling.temperature, truncation=Truncation.of(sampling))
    return CausalLMPolicy(load_model(folder, dtype=torch.float32), options, chat=chat)


def generate(folder, sampling):
    chat = Chat(tokenizer=load_tokenizer(folder), end_ids=frozenset({1}))

    async def rollouts():
        engine = TorchEngine(load_model(folder, dtype=torch.float32), chat, LLMTorchOptions())
        prompt = Prompt(sample_id=0, row={"prompt": "12+34="})
        _, found = await engine.generate(prompt, num_samples=16, sampling=sampling, seed=3)
        await engine.close()
        return found

    return asyncio.run(rollouts())


def evaluate(policy, samples):
    """Log-probabilities of rollouts by the policy, in order."""
    group = RolloutGroup(prompt=Prompt(sample_id=0, row={}), rollouts=tuple(samples))
    (microbatch,) = collate([group], microbatch_terms=10_000, share=Share()).microbatches
    logprobs, *_ = policy.module(None, policy.module.row(microbatch.inputs))
    return logprobs.detach(), microbatch.terms.rollout_logprobs


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_first_ratio_is_one(folder, sampling, renormalise):
    sampling = replace(sampling, renormalise=renormalise)
    found, of_engine = evaluate(build(folder, sampling), generate(folder, sampling))
    torch.testing.assert_close((found - of_engine).exp(), torch.ones_like(found), rtol=0, atol=1e-4)
    if sampling.repetition_penalty != 1:
        other, _ = evaluate(build(folder, replace(sampling, repetition_penalty=1.0)), generate(folder, sampling))
        assert (other - found).abs().mean() > 0.05
    if sampling.top_k or sampling.top_p < 1:
        other, _ = evaluate(build(folder, replace(sampling, renormalise=not renormalise)), generate(folder, sampling))
        assert (other - found).abs().mean() > 0.05


def test_rows_of_supervised_training_are_among_all_tokens(folder):
    plain, truncated = (build(folder, Sampling(max_terms=1, top_k=k)) for k in (0, 2))
    prompts = [Prompt(sample_id=0, row={"prompt": "12+34=", "response": "46"})]
    (microbatch,) = collate_sft(prompts, chat=plain.chat, microbatch_terms=100, share=Share()).microbatches
    found = [policy.module(None, policy.module.row(microbatch.inputs))[0] for policy in (plain, truncated)]
    assert torch.equal(*found)


def reference(logits, labels, truncation):
    """Log-probabilities and entropies by the definition, a row at a time."""
    results = []
    for row, label in zip(logits, labels.tolist(), strict=True):
        order = row.argsort(descending=True)[: truncation.top_k or len(row)]
        mass = row[order].softmax(-1)
        kept = order[(mass.cumsum(-1) - mass) < truncation.top_p].tolist()
        kept = torch.tensor(sorted({*kept, label}))
        of_kept = row[kept].log_softmax(-1)
        results.append((of_kept[(kept == label).nonzero()[0, 0]], -(of_kept.exp() * of_kept).sum()))
    return tuple(torch.stack(each) for each in zip(*results, strict=True))


@pytest.mark.parametrize("truncation", [Truncation(top_k=3), Truncation(top_p=0.7), Truncation(top_k=9, top_p=0.5)])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("logits_bytes", [10**9, 4 * 300 * 2])
def test_values_and_gradients_are_those_of_the_kept_tokens(truncation, softcap, logits_bytes):
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(300, 8, requires_grad=True)
    labels = torch.tensor([0, 17, 299, 5, 5])
    head = OutputHead(weight, None, softcap, 1.0)
    found = term_logprobs(
        hidden, head, labels, temperature=0.8, truncation=truncation, with_entropy=True, logits_bytes=logits_bytes
    )
    expected = reference(head.logits(hidden) / 0.8, labels, truncation)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    scale = torch.linspace(1, 2, 5)
    assert found[1] is not None
    gradients = [
        torch.autograd.grad((logprobs * scale + entropy).sum(), [hidden, weight], retain_graph=True)
        for logprobs, entropy in ((found[0], found[1]), expected)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def part(rank, world_size):
    axis = TensorAxis(init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)))
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 8), torch.randn(301, 8)
    labels, truncation = torch.tensor([0, 17, 300, 5, 5, 150]), Truncation(top_k=40, top_p=0.9)
    vocabulary = Vocabulary.part(301, axis)
    head = vocabulary.rows(OutputHead(weight, None, None, 1.0))
    found, _ = term_logprobs(hidden, head, labels, truncation=truncation, logits_bytes=10**9, vocabulary=vocabulary)
    whole, _ = term_logprobs(
        hidden, OutputHead(weight, None, None, 1.0), labels, truncation=truncation, logits_bytes=10**9
    )
    return {"found": found.numpy(), "whole": whole.numpy()}


def test_a_cut_vocabulary_keeps_the_same_tokens():
    for of_rank in run_ranks(part, 2):
        np.testing.assert_allclose(of_rank["found"], of_rank["whole"], rtol=1e-5, atol=1e-5)


TOKENS = torch.tensor([3, 17, 3, 299, 0, 5, 17, 17, 8, 5, 3])
"""Of two sequences, 6 and 5 tokens long."""
TERMS = torch.tensor([2, 3, 4, 6, 8, 9])


def penalised(logits):
    """By the definition, a term at a time."""
    rows = []
    for row, last in zip(logits, TERMS.tolist(), strict=True):
        seen = torch.zeros(len(row), dtype=torch.bool)
        seen[TOKENS[0 if last < 6 else 6 : last + 1]] = True
        rows.append(torch.where(seen, torch.where(row > 0, row / 1.4, row * 1.4), row))
    return torch.stack(rows)


def repeats():
    return Repeats.of({"tokens": TOKENS, "logit_index": TERMS}, [6, 5], penalty=1.4)


@pytest.mark.parametrize("truncation", [None, Truncation(top_k=9, top_p=0.5)])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("logits_bytes", [10**9, 4 * 300 * 4])
def test_values_and_gradients_are_those_with_the_penalty(truncation, softcap, logits_bytes):
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(300, 8, requires_grad=True)
    labels, head = TOKENS[TERMS + 1], OutputHead(weight, None, softcap, 1.0)
    options = {"temperature": 0.8, "truncation": truncation, "repeats": repeats(), "logits_bytes": logits_bytes}
    found, entropy = term_logprobs(hidden, head, labels, with_entropy=True, **options)
    assert entropy is not None
    expected = reference(penalised(head.logits(hidden)) / 0.8, labels, truncation or Truncation())
    torch.testing.assert_close(found, expected[0])
    torch.testing.assert_close(entropy, expected[1])
    gradients = [
        torch.autograd.grad((logprobs * torch.linspace(1, 2, 6) + spread).sum(), [hidden, weight], retain_graph=True)
        for logprobs, spread in ((found, entropy), expected)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def penalised_part(rank, world_size):
    axis = TensorAxis(init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)))
    torch.manual_seed(0)
    vocabulary, whole = Vocabulary.part(300, axis), OutputHead(torch.randn(300, 8), None, None, 1.0)
    hidden, labels = torch.randn(6, 8), TOKENS[TERMS + 1]
    options = {"repeats": repeats(), "logits_bytes": 10**9}
    found, _ = term_logprobs(hidden, vocabulary.rows(whole), labels, vocabulary=vocabulary, **options)
    return {"found": found.numpy(), "whole": term_logprobs(hidden, whole, labels, **options)[0].numpy()}


def test_a_cut_vocabulary_is_penalised_the_same():
    for of_rank in run_ranks(penalised_part, 2):
        np.testing.assert_allclose(of_rank["found"], of_rank["whole"], rtol=1e-5, atol=1e-5)

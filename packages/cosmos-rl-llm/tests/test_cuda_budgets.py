"""Budgets on a pretend CUDA device: synchronisations of a microbatch, of a decode step and of a layer of experts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.hardware_log import log_choice
from cosmos_rl_core.parallel.axes import expert
from cosmos_rl_core.parallel.axes.expert import grouped_linear
from cosmos_rl_core.parallel.config import MemorySection, ParallelSection
from cosmos_rl_core.parallel.device import to_device
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.plan.estimate import logits_budget
from cosmos_rl_core.types import Sampling, Share
from cosmos_rl_llm.config import LLMTorchOptions
from cosmos_rl_llm.data.collate import pack_batch
from cosmos_rl_llm.engines.torch.batch import GenerationRequest, RunningBatch
from cosmos_rl_llm.model.miniature import miniature
from cosmos_rl_llm.policy import probe
from cosmos_rl_llm.policy.parallelize import parallelize
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.probe import probe_samples
from cosmos_rl_llm.policy.token_model import TermModel, TermOptions
from doubles.pretend_cuda import pretend_cuda
from doubles.pretend_record import Record

pytestmark = pytest.mark.cuda_dry


def small(kind, **values):
    config = type(AutoConfig.for_model(kind))(**values)
    return miniature(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def one_microbatch():
    (microbatch,) = pack_batch(probe_samples(), microbatch_terms=10**6, share=Share(), metrics={}).microbatches
    return microbatch


def trained(policy, microbatch):
    """The gradient of one microbatch as the trainer adds it, on the CPU afterwards."""
    outputs = policy.forward(microbatch, with_entropy=True)
    terms = to_device(microbatch.terms, outputs.logprobs.device)
    loss = ((outputs.logprobs - terms.rollout_logprobs) * terms.loss_mask + 0.1 * outputs.entropy).sum()
    loss.backward()
    return [p.grad for p in policy.module.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", ["qwen3", "falcon_h1", "qwen3_moe", "gpt_oss"])
def test_a_microbatch_waits_for_nothing(kind):
    """Packed, unpacked and with experts: two copies to the GPU, both from pinned memory, none back."""
    values = {"sliding_window": 4096} if kind == "gpt_oss" else {}
    with pretend_cuda() as record, pytest.MonkeyPatch.context() as patch:
        patch.setattr("cosmos_rl_llm.policy.kernels.available", lambda device: {"flash"})
        policy = CausalLMPolicy(small(kind, **values).to("cuda"))
        policy.forward(one_microbatch())
        record.clear()
        gradients = trained(policy, one_microbatch())
    waits = [place for place in record.synchronisations if "_grouped_mm in torch.float32" not in place]
    assert not waits, record  # products of experts have a kernel in bfloat16 alone
    assert not record.uploads, record
    assert not record.mismatches, record
    assert record.streams == {"to the GPU, default stream, MainThread": 2}
    wanted = trained(CausalLMPolicy(small(kind, **values)), one_microbatch())
    for mine, right in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine.held, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_mixed_precision_computes_in_bfloat16(kind, monkeypatch):
    """Attention and experts too, which autocast does not cover on CUDA."""
    monkeypatch.setattr("cosmos_rl_llm.policy.kernels.available", lambda device: {"flash"})
    multiplied, grouped_mm = set(), F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda a, b, offs: multiplied.add(a.dtype) or grouped_mm(a, b, offs=offs))
    with pretend_cuda() as record:
        policy = CausalLMPolicy(small(kind).to("cuda"), TermOptions(compute_dtype=torch.bfloat16))
        multiplied.clear()
        record.clear()
        gradients = trained(policy, one_microbatch())
    assert not record.mismatches and not record.math_attention and not record.synchronisations, record
    assert multiplied == (set() if kind == "qwen3" else {torch.bfloat16})
    layers = policy.module.config.num_hidden_layers
    assert record.varlen.total() == (0 if kind == "gpt_oss" else layers), record  # one call a layer, none with sinks
    wanted = trained(CausalLMPolicy(small(kind), TermOptions(compute_dtype=torch.bfloat16)), one_microbatch())
    for mine, right in zip(gradients, wanted, strict=True):
        assert mine.dtype == torch.float32
        assert (mine.held - right).norm() <= 0.2 * right.norm() + 1e-3  # experts round on the GPU alone


@pytest.mark.parametrize(
    ("dtype", "capability", "line"),
    [
        (torch.bfloat16, (9, 0), ""),
        (
            torch.float32,
            (9, 0),
            "experts: a product for each, the host waits for the GPU (float32, compute capability 9.0)",
        ),
        (
            torch.bfloat16,
            (8, 0),
            "experts: a product for each, the host waits for the GPU (bfloat16, compute capability 8.0)",
        ),
    ],
)
def test_products_of_experts_that_wait_are_logged(dtype, capability, line, monkeypatch, capfd):
    log_choice.cache_clear()
    rows, weight, ends = torch.randn(6, 8), torch.randn(2, 8, 16), torch.tensor([2, 6], dtype=torch.int32)
    with pretend_cuda() as record:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        given = rows.to("cuda", dtype), weight.to("cuda", dtype), ends.to("cuda")
        record.clear()
        for _ in range(2):
            grouped_linear(*given)
        assert record.synchronisations.total() == (2 if line else 0), record
    assert [each for each in capfd.readouterr().err.splitlines() if each.startswith("experts")] == (
        [line] if line else []
    )


@pytest.mark.parametrize("bias", [None, torch.ones(4, 16)])
def test_experts_multiply_in_bfloat16_under_autocast_on_a_gpu(bias):
    rows, weight, ends = torch.randn(6, 8), torch.randn(4, 8, 16), torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    with pretend_cuda() as record:
        given = [
            None if x is None else x.to("cuda").requires_grad_(x.is_floating_point()) for x in (rows, weight, bias)
        ]
        record.clear()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found = grouped_linear(given[0], given[1], ends.to("cuda"), bias=given[2])
        found.float().sum().backward()
        assert not record.synchronisations and not record.mismatches
    assert found.dtype == torch.bfloat16 and given[1].grad.dtype == torch.float32
    wanted = grouped_linear(rows, weight, ends, bias=bias)
    assert wanted.dtype == torch.float32
    torch.testing.assert_close(found.held.float(), wanted, rtol=0.02, atol=0.1)


def test_a_dispatch_over_ranks_waits_once_for_its_splits(monkeypatch):
    """One host copy for each layer of experts and pass: the rows for and from each rank."""
    monkeypatch.setattr(expert, "_all_to_all", lambda rows, came, left, axis: rows.clone())
    alone = SimpleNamespace(size=lambda: 1, get_group=lambda: None)
    hidden, gates = torch.randn(5, 8), torch.rand(5, 2)
    chosen = torch.tensor([[0, 3], [1, 2], [3, 0], [2, 1], [1, 3]])
    wanted = (hidden[:, None] * gates[..., None]).sum(1)
    with pretend_cuda() as record:
        on_gpu = [x.to("cuda") for x in (hidden, chosen, gates)]
        record.clear()
        rows, ends, exchange = expert.dispatch(on_gpu[0], on_gpu[1], num_experts=4, axis=alone)
        found = expert.combine(rows, on_gpu[2], exchange)
        assert record.synchronisations.total() == 1, record
        assert not record.uploads and not record.mismatches
    torch.testing.assert_close(found.held, wanted)
    assert ends.held.tolist() == [2, 5, 7, 10]


def engine_requests(**sampling):
    return [
        GenerationRequest(
            prompt_tokens=np.concatenate([each.prompt_tokens, each.tokens]),
            num_samples=2,
            first_sample=0,
            sampling=Sampling(max_terms=6, **sampling),
            seed=seed,
        )
        for seed, each in enumerate(probe_samples())
    ]


def generated(device, record, *, sampling, budget):
    """Sampled tokens and their log-probabilities; each pass keeps to its budget and sends from pinned memory alone."""
    model = small("qwen3").to(device)
    batch = RunningBatch(model, LLMTorchOptions(max_sequences=8))
    requests = engine_requests(**sampling)
    record.clear()
    batch.admit(requests, version=0)
    assert record.synchronisations.total() <= budget, record
    while batch.sequences:
        record.clear()
        batch.step(version=0)
        assert record.synchronisations.total() <= budget, record
        assert not record.uploads, record
        assert not record.mismatches and not record.math_attention, record
    return [(s.tokens, s.logprobs) for request in requests for s in request.sequences]


@pytest.mark.parametrize(("sampling", "budget"), [({}, 1), ({"temperature": 0.0}, 1), ({"top_p": 0.9}, 2)])
def test_a_decode_step_waits_once(sampling, budget):
    """Tokens and log-probabilities come in one copy; the nucleus of top-p has a size that the host must know."""
    with torch.inference_mode():
        with pretend_cuda() as record:
            found = generated("cuda", record, sampling=sampling, budget=budget)
        wanted = generated("cpu", Record(), sampling=sampling, budget=0)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    np.testing.assert_allclose([x for _, x in found], [x for _, x in wanted], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("gib", "mib"), [(None, 256), (8, 256), (24, 384), (80, 1280), (141, 2048), (192, 2048)])
def test_logits_take_a_part_of_the_memory_of_the_device(gib, mib):
    assert logits_budget(None if gib is None else gib * 2**30) == mib * 2**20


def test_a_policy_takes_the_logits_budget_of_its_gpu():
    with pretend_cuda():
        policy = CausalLMPolicy(small("qwen3").to("cuda"))
    assert policy.module.logits_bytes == logits_budget(80 * 2**30)
    assert CausalLMPolicy(small("qwen3")).module.logits_bytes == logits_budget(None)


@pytest.mark.parametrize(
    ("kind", "parallel", "reason"),
    [
        ("qwen3_moe", {}, "experts"),
        ("qwen3", {"tp": 2}, "tp = 2"),
        ("qwen3", {"cp": 2}, "cp = 2"),
        ("qwen3", {}, None),
    ],
)
def test_a_policy_that_compilation_is_unproven_for_is_not_compiled(monkeypatch, capfd, kind, parallel, reason):
    """The policy and its reference log it once."""
    log_choice.cache_clear()
    monkeypatch.setattr("cosmos_rl_core.parallel.remat._missing_toolchain", lambda: "")
    compiled = []
    monkeypatch.setattr("cosmos_rl_core.parallel.remat.compile_blocks", lambda blocks: compiled.extend(blocks))
    with pretend_cuda():
        for frozen in (False, True):
            setup = ModelSetup(parallel=ParallelSection(**parallel), frozen=frozen)
            parallelize(TermModel(small(kind).to("cuda")), setup)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("compile:")]
    assert lines == ["compile: each block" if reason is None else f"compile: off ({reason})"]
    assert bool(compiled) is (reason is None)


def test_experts_in_float32_are_not_compiled_on_a_gpu():
    setup = ModelSetup(memory=MemorySection(compile=True))
    with (
        pretend_cuda(),
        pytest.raises(UserError, match=r'experts in float32 .* dtype = "bfloat16", or compile = false'),
    ):
        parallelize(TermModel(small("qwen3_moe").to("cuda")), setup)


def test_the_load_of_experts_is_read_at_once():
    with pretend_cuda() as record:
        policy = CausalLMPolicy(small("qwen3_moe").to("cuda"), TermOptions(compute_dtype=torch.bfloat16))
        trained(policy, one_microbatch())
        record.clear()
        assert policy.metrics()["expert_load_max"] >= 1
        assert record.synchronisations.total() == 1, record


def test_a_family_is_checked_without_tf32(monkeypatch):
    """Products of TF32 differ by as much as the check allows."""
    seen = []
    monkeypatch.setattr(
        probe, "compare", lambda model: seen.append(torch.backends.cuda.matmul.allow_tf32) or (0.0, 0.0)
    )
    with pretend_cuda():  # restores the setting
        torch.backends.cuda.matmul.allow_tf32 = True
        probe._verdict.__wrapped__(*probe.describe(small("qwen3")), "cpu")
        assert seen == [False] and torch.backends.cuda.matmul.allow_tf32

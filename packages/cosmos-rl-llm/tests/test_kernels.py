"""Attention on CUDA: the kernel of each layer, and its result where a fake replaces what needs a GPU."""

import sys
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cosmos_rl_core.parallel.remat import _KEPT, checkpoint_activations
from cosmos_rl_core.types import Share
from cosmos_rl_llm.data.collate import pack_batch
from cosmos_rl_llm.model.miniature import miniature
from cosmos_rl_llm.policy import kernels
from cosmos_rl_llm.policy.attention import Scoring, causal_attention
from cosmos_rl_llm.policy.kernels import Ragged
from cosmos_rl_llm.policy.packing import PackedLayout
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.probe import probe_samples
from doubles.pretend_cuda import pretend_cuda

EVERYTHING = {"flash", "flash_attn", "flex"}
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
FAMILIES = {
    "gemma2": {},
    "mistral": {"sliding_window": 4096},
    "gpt_oss": {},
}


def inputs(length=300, *, dim=16, heads=4, kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, heads, length, dim), (2, kv_heads, length, dim), (2, kv_heads, length, dim)]
    return [torch.randn(size, generator=generator) for size in sizes]


@pytest.mark.parametrize(
    ("scoring", "dtype", "head_dim", "available", "kernel"),
    [
        ({}, torch.bfloat16, 128, EVERYTHING, "flash"),
        ({}, torch.float32, 128, EVERYTHING, "efficient"),
        ({}, torch.bfloat16, 512, EVERYTHING, "efficient"),
        ({}, torch.bfloat16, 128, set(), "efficient"),
        ({"sinks": SINKS}, torch.bfloat16, 64, EVERYTHING, "flash"),
        ({"sinks": SINKS}, torch.bfloat16, 256, EVERYTHING, "efficient"),
        ({"window": 128}, torch.bfloat16, 128, EVERYTHING, "flash"),
        ({"window": 128}, torch.float32, 128, EVERYTHING, "flex"),
        ({"window": 128}, torch.float32, 128, set(), "efficient"),
        ({"window": 128}, torch.bfloat16, 512, EVERYTHING, "flex"),
        ({"window": 128, "sinks": SINKS}, torch.bfloat16, 64, EVERYTHING, "flex"),
        ({"window": 128, "sinks": SINKS}, torch.bfloat16, 64, {"flash"}, "efficient"),
        ({"softcap": 50.0}, torch.bfloat16, 256, EVERYTHING, "flash_attn"),
        ({"softcap": 50.0, "window": 128}, torch.bfloat16, 256, EVERYTHING, "flash_attn"),
        ({"softcap": 50.0}, torch.bfloat16, 256, {"flash", "flex"}, "flex"),
        ({"softcap": 50.0}, torch.float32, 256, EVERYTHING, "flex"),
        ({"softcap": 50.0}, torch.bfloat16, 256, {"flash"}, "plain"),
    ],
)
def test_a_layer_gets_the_best_kernel_there_is(scoring, dtype, head_dim, available, kernel):
    found = kernels.choose(Scoring(scale=1.0, **scoring), dtype=dtype, head_dim=head_dim, available=available)
    assert found == kernel


@pytest.mark.parametrize("length", [1, 127, 128, 300, 640])
@pytest.mark.parametrize("window", [None, 1, 100, 128, 257, 500])
def test_a_block_mask_is_that_of_torch_without_a_dense_mask(length, window):
    device = torch.device("cpu")
    found = kernels.block_mask(length, window, device)
    wanted = flex.create_block_mask(found.mask_mod, None, None, length, length, device="cpu")
    assert found.shape == wanted.shape
    assert torch.equal(found.to_dense(), wanted.to_dense())
    for blocks in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, blocks), getattr(wanted, blocks)), blocks
    for side in ("kv", "full_kv", "q", "full_q"):
        assert listed(found, side) == listed(wanted, side)


def listed(mask, side):
    """The numbers of the blocks of each row: of queries for "kv", of keys for "q"."""
    counts, indices = getattr(mask, f"{side}_num_blocks"), getattr(mask, f"{side}_indices")
    return [sorted(row[:count]) for count, row in zip(counts.flatten().tolist(), indices.flatten(0, 2).tolist())]


@pytest.mark.cuda_dry
@pytest.mark.parametrize("window", [None, 200])
def test_a_block_mask_is_made_on_the_gpu_without_a_wait(window):
    with pretend_cuda() as record:
        mask = kernels.block_mask.__wrapped__(1000, window, torch.device("cuda", 0))  # not kept for other tests
    assert mask.q_indices.is_cuda and mask.full_kv_indices.is_cuda
    assert not record.uploads and not record.synchronisations and not record.mismatches


@pytest.mark.parametrize(
    "scoring",
    [{}, {"window": 70}, {"softcap": 2.0}, {"softcap": 2.0, "window": 70}, {"sinks": SINKS, "window": 70}],
)
def test_flex_attention_scores_like_plain_attention(scoring, monkeypatch):
    monkeypatch.setattr(kernels, "_flex_attention", lambda: flex.flex_attention)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    scoring = Scoring(scale=0.3, **scoring)
    with torch.no_grad():
        found = kernels.RUN["flex"](*inputs(), scoring)
        wanted = causal_attention(*inputs(), scoring)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def fake_varlen(query, key, value, ends_q, ends_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """torch's kernel for packed sequences, by plain attention of each sequence."""
    assert ends_q.dtype == ends_k.dtype == torch.int32 and torch.equal(ends_q, ends_k) and enable_gqa
    assert query.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    assert window_size[1] == 0 and max_q == max_k == int(ends_q.diff().max())
    outputs = []
    for start, end in zip(ends_q[:-1].tolist(), ends_q[1:].tolist()):
        one = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        outputs.append(causal_attention(*one, Scoring(scale=scale, window=window_size[0] + 1))[0].transpose(0, 1))
    return torch.cat(outputs)


def fake_flash_attn(query, key, value, *, softmax_scale, causal, window_size, softcap):
    """flash-attn's function for sequences of one length."""
    assert causal and window_size[1] == 0 and query.shape[-1] == value.shape[-1]
    window = None if window_size[0] < 0 else window_size[0] + 1
    scoring = Scoring(scale=softmax_scale, window=window, softcap=softcap or None)
    return causal_attention(*(x.transpose(1, 2) for x in (query, key, value)), scoring).transpose(1, 2)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    ("kernel", "scoring"),
    [
        ("flash", {}),
        ("flash", {"window": 9}),
        ("flash", {"sinks": SINKS}),
        ("flash_attn", {"softcap": 2.0}),
        ("flash_attn", {"softcap": 2.0, "window": 9}),
        ("flash_attn", {"window": 9}),
        ("efficient", {}),
        ("efficient", {"window": 9}),
        ("efficient", {"sinks": SINKS}),
        ("efficient", {"sinks": SINKS, "window": 9}),
    ],
)
def test_a_kernel_gets_the_arguments_of_the_layer(kernel, scoring, narrow, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fake_varlen)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=fake_flash_attn))
    scoring = Scoring(scale=0.3, **scoring)
    results = []
    for run in (kernels.RUN[kernel], causal_attention):
        given = [x.requires_grad_() for x in inputs(20, dim=12)]
        output = run(given[0], given[1], given[2][..., :10] if narrow else given[2], scoring)
        output.mul(torch.linspace(-1, 1, output.shape[2])[:, None]).sum().backward()
        results.append([output, *(x.grad for x in given)])
    for found, wanted in zip(*results):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


SHARED = (
    [0, 1, 2, 3, 4, 5],
    [0, 1, 2, 3, 6, 7, 8, 9],
    [0, 1, 2, 3, 6, 7, 8, 10],
    [0, 1, 2, 3, 6, 7, 8, 10],
    [11, 12, 13],
    [11, 12, 13, 14, 15, 16],
)
ROWS = {
    "end to end": ([5, 40, 1, 17], None),
    "shared prompts": ([len(rows) for rows in SHARED], np.concatenate(SHARED)),
}


@pytest.mark.cuda_dry
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("scoring", "available"),
    [
        ({}, {"flash"}),
        ({"window": 4}, {"flash"}),
        ({"window": 100}, {"flash"}),
        ({"softcap": 2.0}, {"flash_attn"}),
        ({"softcap": 2.0, "window": 4}, {"flash_attn"}),
    ],
)
def test_a_packed_row_is_one_call_without_padding(rows, scoring, available, monkeypatch):
    lengths, places = ROWS[rows]
    num_rows = sum(lengths) if places is None else places.max() + 1
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, heads, num_rows, 16, generator=generator).bfloat16() for heads in (4, 2, 2)]
    given[2] = given[2][..., :10]
    scoring = Scoring(scale=0.3, **scoring)
    weights = torch.linspace(-1, 1, num_rows)[:, None, None]

    def run(layout, given):
        given = [x.requires_grad_() for x in given]
        output = layout.attend(*given, scoring)
        (output.float() * weights.to(output.device)).sum().backward()
        return [output, *(x.grad for x in given)]

    calls = []
    with pretend_cuda() as record:
        monkeypatch.setattr(kernels, "available", lambda device: available)
        flash_attn = SimpleNamespace(flash_attn_varlen_func=partial(fake_flash_attn_varlen, calls))
        monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
        layout = PackedLayout.of(lengths, rows=places, device="cuda")
        on_gpu = [x.to("cuda") for x in given]
        record.clear()
        found = run(layout, on_gpu)
        assert record.varlen.total() + len(calls) == 1
        assert not record.mismatches and not record.synchronisations, record
    wanted = run(PackedLayout.of(lengths, rows=places), [x.float() for x in given])
    for mine, right in zip(found, wanted, strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == right.shape
        torch.testing.assert_close(mine.held.float(), right, rtol=0.02, atol=0.02)


def fake_flash_attn_varlen(calls, query, key, value, ends_q, ends_k, max_q, max_k, **options):
    """flash-attn's function for sequences of different lengths, by plain attention of each sequence's last queries."""
    assert options.pop("causal") and max_k == int(ends_k.held.diff().max()) and max_q == int(ends_q.held.diff().max())
    calls.append(options)
    outputs, window = [], options["window_size"][0]
    scoring = Scoring(
        scale=options["softmax_scale"], window=None if window < 0 else window + 1, softcap=options["softcap"] or None
    )
    for (q0, q1), (k0, k1) in zip(pairwise(ends_q.held.tolist()), pairwise(ends_k.held.tolist())):
        whole = F.pad(query[q0:q1], (0, 0, 0, 0, k1 - k0 - (q1 - q0), 0))  # the queries of a prefix are not used
        one = (x.transpose(0, 1)[None] for x in (whole, key[k0:k1], value[k0:k1]))
        outputs.append(causal_attention(*one, scoring)[0].transpose(0, 1)[k1 - k0 - (q1 - q0) :])
    return torch.cat(outputs)


SHOWN = [-1, 0, 0, 0, 0, -1, -1, 1, 1, 1, 1, 2, 2, -1, -1], [-1, 0, 0, 0, 0, -1, -1], [0, 0, 0, 0], [-1, -1]
"""Pictures of four sequences; the second shares the rows of the first one's beginning."""


@pytest.mark.parametrize(
    "scoring",
    [{}, {"window": 1}, {"window": 3}, {"window": 6}, {"window": 100}, {"softcap": 2.0, "window": 3}, {"sinks": SINKS}],
    ids=str,
)
def test_tokens_of_a_picture_attend_in_both_directions(scoring):
    lengths, generator = [len(each) for each in SHOWN], torch.Generator().manual_seed(0)
    rows = np.concatenate([np.arange(15), np.arange(7), np.arange(6) + 15])
    given = [torch.randn(1, heads, 21, 16, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    scoring = Scoring(scale=0.3, **scoring)
    output = PackedLayout.of(lengths, rows=rows, shown=np.concatenate(SHOWN)).attend(*given, scoring)
    for end, numbers in zip(np.cumsum(lengths), SHOWN):
        places = torch.from_numpy(rows[end - len(numbers) : end])
        query, key, value = (x[:, :, places] for x in given)
        shown, distance = torch.tensor(numbers), torch.arange(len(numbers))[:, None] - torch.arange(len(numbers))
        seen = (distance >= 0) | (shown[:, None] == shown) & (shown >= 0)
        seen = seen & (distance < (scoring.window or 100))
        scores = query.unflatten(1, (2, 2)) * 0.3 @ key[:, :, None].transpose(-1, -2)
        mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
        wanted = (scoring.weights(scores, mask) @ value[:, :, None]).flatten(1, 2).transpose(1, 2)
        torch.testing.assert_close(output[:, places], wanted, rtol=0, atol=1e-6)
        for found, right in zip(
            torch.autograd.grad(output[:, places].sum(), given, retain_graph=True),
            torch.autograd.grad(wanted.sum(), given, retain_graph=True),
        ):
            torch.testing.assert_close(found, right, rtol=0, atol=1e-5)


def test_queries_that_are_not_the_end_of_their_sequence_stay_in_blocks():
    assert Ragged.of([3, 3], np.array([0, 1, 2, 3, 1, 2])) is None
    assert Ragged.of([2, 2], np.array([2, 3, 0, 1])) is None
    assert PackedLayout.of([3, 3], padding=False).ragged is None


class Attention(nn.Module):
    """A matrix product and an operator of attention, which counts its calls."""

    def __init__(self, operator):
        super().__init__()
        self.linear, self.operator = nn.Linear(4, 4), operator

    def forward(self, hidden):
        return self.operator(self.linear(hidden).tanh()).tanh()


@pytest.mark.parametrize(
    ("name", "passes"),
    [("_flash_attn_forward", 1), ("_flash_attn_varlen_forward", 1), ("another", 2)],
)
def test_selective_recomputation_keeps_the_attention_of_flash_attn(name, passes):
    calls = []
    with torch.library._scoped_library("flash_attn", "FRAGMENT") as library:  # as the package registers its operators
        library.define(f"{name}(Tensor given) -> Tensor")
        library.impl(name, lambda given: calls.append(1) or given.clone(), "CPU")
        operator = getattr(torch.ops.flash_attn, name)
        library.impl(name, through_clone(operator), "Autograd")
        block = Attention(operator)
        checkpoint_activations([block], "selective")
        block(torch.ones(2, 4)).sum().backward()
    assert len(calls) == passes


def through_clone(operator):
    class Cloned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given):
            with torch._C._AutoDispatchBelowAutograd():
                return operator(given)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return Cloned.apply


def test_selective_recomputation_keeps_the_attention_of_windows():
    from torch.nn.attention import varlen  # noqa: F401  registers its operator

    assert torch.ops.torch_attn._varlen_attn.default.name() in _KEPT


def fake_flex(query, key, value, scoring):
    """flex_attention by the kernels of the CPU."""
    group = query.shape[1] // key.shape[1]
    return causal_attention(query, *(x.repeat_interleave(group, dim=1) for x in (key, value)), scoring)


def small(kind, **values):
    config = type(AutoConfig.for_model(kind))(**values)
    return miniature(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


@pytest.mark.cuda_dry
@pytest.mark.parametrize("available", [set(), EVERYTHING], ids=["torch alone", "with flex"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_no_layer_falls_to_the_math_kernel(kind, available, monkeypatch):
    def train(device):
        policy = CausalLMPolicy(small(kind, **FAMILIES[kind]).to(device))
        (microbatch,) = pack_batch(probe_samples(), microbatch_terms=10**6, share=Share(), metrics={}).microbatches
        record.clear()
        logprobs = policy.forward(microbatch).logprobs
        logprobs.mul(torch.linspace(-1, 1, len(logprobs)).to(device)).sum().backward()
        gradients = [p.grad for p in policy.module.parameters() if p.grad is not None]
        return [tensor.cpu() for tensor in (logprobs.detach(), *gradients)]

    monkeypatch.setattr(kernels, "available", lambda device: available)
    monkeypatch.setattr(kernels, "RUN", {**kernels.RUN, "flex": fake_flex})
    with pretend_cuda() as record:
        found = train("cuda")
        math, mismatches = record.math_attention.copy(), record.mismatches.copy()
        wanted = train("cpu")
    assert not math, math
    assert not mismatches, mismatches
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("mistral", "attention: flash, window 6: 4 layers (cuda:0, bfloat16, head dim 16)"),
        ("gpt_oss", "flex, window 6, sinks: 2 layers; flash, sinks: 2 layers"),
        ("gemma2", "flash_attn, window 6, soft cap 50.0: 2 layers"),
    ],
)
def test_the_choice_is_described_for_a_gpu(kind, line, monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda device: EVERYTHING)
    found = kernels.describe(small(kind, **FAMILIES[kind]), device=torch.device("cuda", 0), dtype=torch.bfloat16)
    assert line in found


def test_the_choice_is_logged_once_for_a_gpu(monkeypatch, capfd):
    monkeypatch.setattr(kernels, "available", lambda device: set())
    for device in ("cpu", "cuda:0", "cuda:0"):
        kernels.log_kernels(small("gemma2"), device=torch.device(device), dtype=torch.bfloat16)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("attention: plain, window 6") and "install flash-attn, or Triton" in line


def test_flex_attention_is_compiled_for_every_scoring_and_not_for_every_length(monkeypatch):
    """Past torch's limit of eight versions it would run uncompiled, with its scores in memory."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    kernels._flex_attention.cache_clear()

    def run(lengths):
        for dtype in (torch.float32, torch.bfloat16):
            for window in (None, 32, 64, 96):
                for softcap in (None, 20.0, 50.0):
                    scoring = Scoring(scale=0.25, window=window, softcap=softcap)
                    for length in lengths:
                        rows = torch.zeros(1, 2, length, 16, dtype=dtype)
                        kernels.RUN["flex"](rows, rows, rows, kernels._within(scoring, length))
        return counters["stats"]["unique_graphs"]

    compiled = run((130, 257, 300))
    assert 8 < compiled <= 24
    assert run((411, 640, 1000)) == compiled
    kernels._flex_attention.cache_clear()
    torch._dynamo.reset()

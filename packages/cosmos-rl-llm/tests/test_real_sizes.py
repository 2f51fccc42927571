"""Real models on fake ranks: bytes of parameters and collectives of a rank are those of `cosmos-rl plan`.

One process takes the place of one rank, parameters are on meta, and nothing is sent. The quick cases have few layers.
"""

from collections import Counter
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from cosmos_rl_core.parallel import mesh as meshes
from cosmos_rl_core.parallel.config import MemorySection, ParallelSection, PolicySection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import parameters_on_meta
from cosmos_rl_core.parallel.estimate import estimate, traffic
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Share
from cosmos_rl_llm.config import LLMModelConfig
from cosmos_rl_llm.data.collate import Sample, pack_batch
from cosmos_rl_llm.model.checkpoint import read_shape
from cosmos_rl_llm.model.weights import specs_of_config
from cosmos_rl_llm.policy.pipelined import PipelinedPolicy
from cosmos_rl_llm.policy.policy import CausalLMPolicy

COMMON = {"max_position_embeddings": 8192, "tie_word_embeddings": False}
SIZES = {
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "llama-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "qwen3-235b": {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "norm_topk_prob": True,
    },
}
LAYOUTS = {
    "qwen2.5-7b": {"dp_shard": 4},
    "llama-70b": {"dp_shard": 8, "tp": 8},
    "qwen3-235b": {"dp_shard": 512, "ep": 64},
}
TOKENS = 512


@contextmanager
def fake_rank(monkeypatch, dims, *, rank=0):
    """The mesh of one rank of `dims`, without the others."""
    monkeypatch.setattr(meshes, "_set_timeouts", lambda *_, **__: None)  # a fake group has none
    dist.init_process_group("fake", rank=rank, world_size=dims.world_size, store=FakeStore())
    try:
        yield ReplicaMesh.build(dims, device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def policy_of(name, mesh, *, layers=None, checkpointing="full"):
    """The policy of one rank, on meta, with matrix products in bfloat16."""
    values = {**COMMON, **SIZES[name], **({"num_hidden_layers": layers} if layers else {})}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with no_init_weights(), parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    section = ParallelSection(**{**dict(mesh.dims), "ep": mesh.dims.ep})
    setup = ModelSetup(mesh=mesh, parallel=section, memory=MemorySection(activation_checkpointing=checkpointing))
    kind = PipelinedPolicy if mesh.dims.pp > 1 else CausalLMPolicy
    return kind(model, compute_dtype=torch.bfloat16, setup=setup), config


def planned(config, folder, dims):
    config.save_pretrained(folder)
    shape = read_shape(folder, LLMModelConfig(path=str(folder), dtype="bfloat16"), specs_of_config(folder))
    assert shape is not None
    section = PolicySection(parallel=ParallelSection(**{**dict(dims), "ep": dims.ep}))
    return shape, estimate(shape, dims=dims, policy=section, tokens=TOKENS)


def local_bytes(policy):
    parameters = list(policy.module.parameters())
    assert all(isinstance(parameter, DTensor) and parameter.is_meta for parameter in parameters)
    return sum(parameter.to_local().nbytes for parameter in parameters)


def check_bytes(monkeypatch, folder, name, dims, *, layers=None):
    dims, found = ParallelDims(**dims), []
    last = dims.world_size - 1
    for rank in (0, last) if dims.pp > 1 else (0,):
        with fake_rank(monkeypatch, dims, rank=rank) as mesh:
            policy, config = policy_of(name, mesh, layers=layers)
            found.append(local_bytes(policy))
    assert max(found) == pytest.approx(planned(config, folder, dims)[1].parameters, rel=1e-4)


QUICK = [
    ("qwen2.5-7b", {"dp_shard": 4}),
    ("llama-70b", {"dp_shard": 8, "tp": 8}),
    ("qwen3-235b", {"dp_shard": 128, "ep": 64}),
    ("llama-70b", {"dp_shard": 4, "pp": 2}),
    ("qwen2.5-7b", {"dp_shard": 2, "cp": 4}),
]


@pytest.mark.parametrize(("name", "dims"), QUICK)
def test_a_rank_holds_the_planned_bytes_of_parameters(monkeypatch, tmp_path, name, dims):
    check_bytes(monkeypatch, tmp_path, name, dims, layers=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_rank_of_a_whole_model_holds_the_planned_bytes(monkeypatch, tmp_path, name):
    check_bytes(monkeypatch, tmp_path, name, LAYOUTS[name])


class Collectives(TorchDispatchMode):
    """Calls and bytes of each kind of collective; bytes are those of the largest tensor of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if "c10d" in name and "wait_tensor" not in name:
            kind = next((kind for kind in ("gather", "reduce_scatter", "all_to_all") if kind in name), "all_reduce")
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            self.calls[kind] += 1
            self.bytes[kind] += max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)
        return result


def one_microbatch():
    rng = np.random.default_rng(0)
    sample = Sample(
        prompt_tokens=rng.integers(0, 1000, 16).astype(np.int32),
        tokens=rng.integers(0, 1000, TOKENS - 16).astype(np.int32),
        logprobs=np.zeros(TOKENS - 16, np.float32),
        loss_mask=np.ones(TOKENS - 16, bool),
        advantage=1.0,
    )
    return pack_batch([sample], microbatch_terms=TOKENS, share=Share(), metrics={}).microbatches[0]


def faked(value, mode):
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    if isinstance(value, tuple):
        return tuple(faked(item, mode) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: faked(getattr(value, field.name), mode) for field in fields(value)})
    return value


@pytest.mark.parametrize(
    ("name", "dims", "checkpointing"),
    [
        ("qwen2.5-7b", {"dp_shard": 4}, "full"),
        ("qwen2.5-7b", {"dp_shard": 2, "cp": 4}, "full"),
        *(("llama-70b", {"dp_shard": 8, "tp": 8}, mode) for mode in ("none", "selective", "full")),
    ],
)
def test_a_pass_gathers_and_reduces_the_planned_bytes(monkeypatch, tmp_path, name, dims, checkpointing):
    dims = ParallelDims(**dims)
    with fake_rank(monkeypatch, dims) as mesh:
        policy, config = policy_of(name, mesh, layers=2, checkpointing=checkpointing)
        row = policy.module.row(one_microbatch().inputs)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            policy.module.to_empty(device="cpu")
        with mode, Collectives() as seen:
            logprobs, _ = policy.module(None, faked(row, mode), False)
            logprobs.sum().backward()
    section = PolicySection(
        parallel=ParallelSection(**{**dict(dims), "ep": dims.ep}),
        memory=MemorySection(activation_checkpointing=checkpointing),
    )
    expected = traffic(planned(config, tmp_path, dims)[0], dims=dims, policy=section, tokens=TOKENS)
    assert (seen.calls["gather"], seen.calls["reduce_scatter"]) == (expected.gathers, expected.reductions)
    assert seen.bytes["gather"] == pytest.approx(expected.gathered_bytes, rel=1e-3)
    assert seen.bytes["reduce_scatter"] == pytest.approx(expected.reduced_bytes, rel=1e-3)
    if dims.cp == 1:  # cp exchanges heads
        assert seen.calls["all_reduce"] == expected.sums
        assert seen.bytes["all_reduce"] == pytest.approx(expected.summed_bytes, rel=5e-3)  # the prompt has no terms

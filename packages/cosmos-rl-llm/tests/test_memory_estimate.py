"""What `cosmos-rl plan` says a rank will hold, beside the bytes that are alive while one really trains."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from llm_parity import FAMILIES, make_tiny
from torch import Tensor
from torch.distributed.tensor import DTensor

from cosmos_rl_core.parallel.config import MemorySection, ParallelSection, PolicySection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.plan.estimate import estimate
from cosmos_rl_core.plan.live_bytes import LiveBytes
from cosmos_rl_core.train.optimizers.build import build_optimizer
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup, Share
from cosmos_rl_llm.config import LLMLoraSection, LLMModelConfig
from cosmos_rl_llm.data.collate import collate
from cosmos_rl_llm.model.checkpoint import read_shape
from cosmos_rl_llm.policy.lora import add_adapters
from cosmos_rl_llm.policy.pipelined import PipelinedPolicy
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.token_model import TermOptions
from doubles.ranks import run_ranks

LAYERS = 2
LENGTH = 400
"""Tokens of a microbatch: enough that activations are the greater part, as they are in earnest."""


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_bytes(tensors) -> int:
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def make_microbatch(length: int = LENGTH):
    """Two rollouts of one token of prompt, which differs, so that no token is shared."""
    rollouts = []
    for token in (1, 2):
        terms = length // 2
        rollout = Rollout(
            arrays={"prompt_tokens": np.array([token], np.int32), "tokens": np.arange(terms, dtype=np.int32) % 50},
            rollout_logprobs=np.zeros(terms, np.float32),
            versions=np.zeros(terms, np.int32),
            loss_mask=np.ones(terms, bool),
        )
        rollouts.append(rollout)
    group = RolloutGroup(prompt=Prompt(sample_id=0, row={}), rollouts=tuple(rollouts))
    return collate([group], microbatch_terms=10 * length, share=Share()).microbatches[0]


def measure(
    rank: int,
    world_size: int,
    *,
    family: str,
    dims: Mapping[str, int] | None = None,
    parallel: Mapping[str, Any] | None = None,
    memory: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    lora: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """Bytes of this rank: of its weights, after the forward pass of a microbatch, and at the peak of two."""
    mesh = ReplicaMesh.build(ParallelDims(**dims or {}), device=torch.device("cpu")) if world_size > 1 else None
    section = ParallelSection.model_validate({**(dims or {}), **(parallel or {})})
    setup = ModelSetup(mesh=mesh, parallel=section, memory=MemorySection.model_validate(memory or {}))
    model = make_tiny(family, num_layers=LAYERS)
    if lora:
        add_adapters(model, LLMLoraSection.model_validate(lora), base=family)
    kind = PipelinedPolicy if section.pp > 1 else CausalLMPolicy
    policy = kind(model, TermOptions(compute_dtype=torch.bfloat16 if dtype == "bfloat16" else None), setup=setup)
    optimizer = build_optimizer(
        "adamw", policy.module, learning_rate=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0
    )
    batch = [make_microbatch()] * max(2, 2 * section.pp)

    def loss(outputs, microbatch):
        return -outputs.logprobs.mean()

    policy.forward_backward(batch, loss=loss, with_entropy=False)
    optimizer.step()
    found = {
        "parameters": num_bytes(policy.module.parameters()),
        "gradients": num_bytes(p.grad for p in policy.module.parameters() if p.grad is not None),
        "optimizer": num_bytes(value for state in optimizer.state.values() for value in state.values()),
    }
    optimizer.zero_grad(set_to_none=True)
    live = LiveBytes(without=[*policy.module.parameters(), *policy.module.buffers()])
    with live:
        if section.pp == 1:
            outputs = policy.forward(batch[0])
            found["forward"] = live.now()
            del outputs
        policy.forward_backward(batch, loss=loss, with_entropy=False)
    found["total"] = live.peak + found["parameters"] + found["optimizer"]
    return found


def planned(folder, family: str, *, dims=None, parallel=None, memory=None, dtype="float32", lora=None):
    """What plan would say of the same."""
    make_tiny(family, num_layers=LAYERS).save_pretrained(folder)
    model = LLMModelConfig.model_validate({"path": str(folder), "dtype": dtype, "lora": lora})
    shape = read_shape(folder, model)
    assert shape is not None
    policy = PolicySection(
        parallel=ParallelSection.model_validate({**(dims or {}), **(parallel or {})}),
        memory=MemorySection.model_validate(memory or {}),
    )
    return estimate(shape, dims=ParallelDims(**dims or {}), policy=policy, tokens=LENGTH)


def check(expected, found: Mapping[str, Any], *, still_gathered: bool = False) -> None:
    """Weights to the byte (Adam's counters apart), the rest within ten per cent."""
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(expected, name) == pytest.approx(float(found[name]), rel=0.003), name
    if "forward" in found:
        waiting = expected.activations + expected.logits + (expected.gathered if still_gathered else 0)
        assert waiting == pytest.approx(float(found["forward"]), rel=0.1)
    assert expected.total == pytest.approx(float(found["total"]), rel=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process(tmp_path, family):
    check(planned(tmp_path, family), measure(0, 1, family=family))


@pytest.mark.parametrize(
    ("family", "mode", "dtype"),
    [
        ("llama", "selective", "float32"),
        ("qwen3", "full", "float32"),
        ("qwen3-moe", "full", "float32"),
        ("llama", "none", "bfloat16"),
        ("qwen3-moe", "none", "bfloat16"),
    ],
)
def test_recomputation_and_bfloat16(tmp_path, family, mode, dtype):
    options = {"family": family, "memory": {"activation_checkpointing": mode}, "dtype": dtype}
    check(planned(tmp_path, **options), measure(0, 1, **options))


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_adapters(tmp_path, targets):
    pytest.importorskip("peft")
    lora = {"rank": 4, "target_modules": targets}
    check(planned(tmp_path, "qwen3", lora=lora), measure(0, 1, family="qwen3", lora=lora))


SPREADS = [
    ({"dp_shard": 2}, {}, {}, "float32"),
    ({"dp_shard": 2}, {}, {}, "bfloat16"),
    ({"dp_shard": 2}, {"reshard_after_forward": False}, {"activation_checkpointing": "full"}, "float32"),
    ({"tp": 2}, {"sequence_parallel": True}, {}, "float32"),
    ({"dp_replicate": 2, "cp": 2}, {}, {}, "float32"),
    ({"pp": 2}, {"pipeline_schedule": "1f1b"}, {}, "float32"),
]


@pytest.mark.parametrize(("dims", "parallel", "memory", "dtype"), SPREADS)
def test_a_rank_of_several(tmp_path, dims, parallel, memory, dtype):
    options = {"family": "qwen3", "dims": dims, "parallel": parallel, "memory": memory, "dtype": dtype}
    ranks = run_ranks(measure, int(np.prod(list(dims.values()))), **options)
    fullest = max(ranks, key=lambda rank: float(rank["total"]))
    check(planned(tmp_path, **options), fullest, still_gathered=not parallel.get("reshard_after_forward", True))


@pytest.mark.parametrize("dims", [{"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "ep": 2}])
def test_a_rank_with_experts_has_its_part_on_average(tmp_path, dims):
    ranks = run_ranks(measure, 2, family="qwen3-moe", dims=dims)
    mean = {name: float(np.mean([rank[name] for rank in ranks])) for name in ranks[0]}
    check(planned(tmp_path, "qwen3-moe", dims=dims), mean)

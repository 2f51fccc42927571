"""Spread experts give what one process gives: losses, gradients of every parameter, and load metrics."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import MemorySection, ParallelSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Microbatch, PolicyOutputs, TermBatch
from cosmos_rl_llm.model.causal_lm import make_model
from cosmos_rl_llm.policy.experts import is_experts, spread_experts
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from doubles.ranks import run_ranks

COMMON = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}
FAMILIES = {
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "layer_types": ["full_attention"] * 2},
    "deepseek_v3": {
        "num_local_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}


def tiny(family: str) -> PreTrainedModel:
    return make_model({"model_type": family, **COMMON, **FAMILIES[family]}, dtype=torch.float32, seed=3)


def microbatch(share: int, *, replayed: bool) -> Microbatch:
    """Sequences of 9 and 7 tokens with random advantages, and where replayed with random experts."""
    random = torch.Generator().manual_seed(share)
    lengths = torch.tensor([9, 7])
    index = torch.tensor([3, 4, 5, 6, 7, 8, 11, 12, 13, 14, 15])
    inputs = {
        "tokens": torch.randint(32, (16,), generator=random),
        "positions": torch.cat([torch.arange(9), torch.arange(7)]),
        "sequence_index": torch.arange(2).repeat_interleave(lengths),
        "logit_index": index,
        "labels": torch.randint(32, index.shape, generator=random),
    }
    if replayed:
        inputs["routes"] = torch.rand(16, 2, 8, generator=random).topk(2).indices
    terms = TermBatch(
        rollout_logprobs=torch.zeros(len(index)),
        advantages=torch.randn(len(index), generator=random),
        loss_mask=torch.ones(len(index)),
        rollout_index=(index >= 9).long(),
        num_rollouts=2,
    )
    return Microbatch(inputs=inputs, terms=terms)


def train(policy: CausalLMPolicy, share: int, *, replayed: bool) -> float:
    """Add the gradients of a share's loss and return it."""
    losses = []

    def loss(outputs: PolicyOutputs, microbatch: Microbatch) -> torch.Tensor:
        losses.append((outputs.logprobs * microbatch.terms.advantages).sum())
        return losses[-1]

    policy.forward_backward([microbatch(share, replayed=replayed)], loss=loss, with_entropy=False)
    return losses[0].item()


def gradients(policy: CausalLMPolicy) -> dict[str, np.ndarray]:
    found = {name: parameter.grad for name, parameter in policy.module.named_parameters()}
    return {n: (g.full_tensor() if isinstance(g, DTensor) else g).numpy() for n, g in found.items() if g is not None}


def spread(rank, world_size, *, family, replayed, memory, sequence_parallel, sizes):
    mesh = ReplicaMesh.build(ParallelDims(**sizes), device=torch.device("cpu"))
    parallel = ParallelSection(**sizes, sequence_parallel=sequence_parallel)
    policy = CausalLMPolicy(
        tiny(family), setup=ModelSetup(mesh=mesh, parallel=parallel, memory=MemorySection(**memory))
    )
    loss = train(policy, mesh.share.index, replayed=replayed)
    return {"loss": loss, "share": mesh.share.index, **gradients(policy), **policy.metrics()}


def check(
    family: str,
    sizes: dict[str, int],
    *,
    replayed: bool = False,
    memory: dict[str, Any] | None = None,
    sequence_parallel: bool = False,
) -> None:
    dims = ParallelDims(**sizes)
    ranks = run_ranks(
        spread,
        dims.world_size,
        family=family,
        replayed=replayed,
        memory=memory or {},
        sequence_parallel=sequence_parallel,
        sizes=sizes,
    )
    policy = CausalLMPolicy(tiny(family))
    losses = [train(policy, share, replayed=replayed) for share in range(dims.num_shares)]
    expected = {**gradients(policy), **policy.metrics()}
    for rank in ranks:
        assert rank["loss"] == pytest.approx(losses[int(rank["share"])], abs=1e-4)
        assert rank.keys() - {"loss", "share"} == expected.keys()
        for name, value in expected.items():
            scale = np.abs(value).max() or 1.0  # without replayed routes their share is 0
            np.testing.assert_allclose(rank[name] / scale, value / scale, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_of_two_ranks_with_half_of_the_experts(family):
    check(family, {"dp_shard": 2, "ep": 2})


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_shard": 4, "ep": 4},
        {"dp_shard": 4, "ep": 2},
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    ],
)
def test_experts_beside_other_axes(sizes):
    check("qwen3_moe", sizes)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_tensor_parallel_ranks_do_not_count_their_tokens_twice(family):
    check(family, {"dp_shard": 2, "tp": 2, "ep": 2})


def test_replay_reaches_every_part_of_a_sequence_and_its_recomputation():
    check("qwen3_moe", {"dp_shard": 2, "cp": 2, "ep": 2}, replayed=True, memory={"activation_checkpointing": "full"})


def test_replay_with_activations_cut_along_the_sequence():
    memory = {"activation_checkpointing": "selective"}
    check("qwen3_moe", {"dp_shard": 2, "tp": 2, "ep": 2}, replayed=True, memory=memory, sequence_parallel=True)


def refuses(rank, world_size):
    mesh = ReplicaMesh.build(ParallelDims(dp_shard=3, ep=3), device=torch.device("cpu"))
    with pytest.raises(UserError, match=r"ep = 3: model\.layers\.0\.mlp\.experts has 8 experts"):
        spread_experts(tiny("qwen3_moe"), mesh)
    dense = make_model({"model_type": "qwen3", **COMMON}, dtype=torch.float32, seed=0)
    with pytest.raises(UserError, match=r"Qwen3ForCausalLM has no experts"):
        spread_experts(dense, mesh)


def test_what_cannot_be_spread_is_refused_with_the_numbers():
    run_ranks(refuses, 3)


def test_experts_are_told_from_other_modules():
    names = [name for name, module in tiny("gpt_oss").named_modules() if is_experts(module)]
    assert names == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]

"""A small model over the ranks of a mesh, beside one process: families that are right, and those that are refused."""

from typing import cast

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, LlamaForCausalLM, LlamaModel, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_llm.config import LLMLoraSection
from cosmos_rl_llm.model.miniature import MiniatureSize, miniature
from cosmos_rl_llm.policy.lora import add_adapters
from cosmos_rl_llm.policy.rank_probe import check_ranks, fitting_size
from doubles.ranks import run_ranks

SMALL = MiniatureSize()
RIGHT = {
    "glm4_moe_lite": "shared experts that the plan leaves out",
    "gpt_neox": "a configuration without num_key_value_heads",
    "granite_swa": "sinks in the plan",
    "qwen2_moe": "a shared expert with a gate",
}
REFUSED = {
    "axk1": r"tp: AXK1ForCausalLM has post_mlp_layernorm beside its experts.*set tp = 1",
    "gemma3n_text": r"Gemma3nForCausalLM over tp 2 differs from one process.*set tp = 1",
    "hrm_text": r"tp: HrmTextForCausalLM has its decoder layers in several stacks; set tp = 1",
    "longcat_flash": r"LongcatFlashForCausalLM does not run over tp 2 \(RuntimeError.*set tp = 1",
}


def small(kind: str, size: MiniatureSize = SMALL) -> PreTrainedModel:
    config = AutoConfig.for_model(kind)
    return miniature(cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]), config, size)


def setup_of(dims: dict[str, int], **parallel: bool) -> ModelSetup:
    mesh = ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu"))
    return ModelSetup(mesh=mesh, parallel=ParallelSection.model_validate({**dims, **parallel}))


def are_right(rank, world_size, *, kinds, dims, **parallel):
    setup = setup_of(dims, **parallel)
    for kind in kinds:
        check_ranks(small(kind), setup)


def are_refused(rank, world_size, *, kinds, dims):
    setup = setup_of(dims)
    for kind, message in kinds.items():
        with pytest.raises(UserError, match=message):
            check_ranks(small(kind), setup)


def test_families_with_parts_that_the_plan_leaves_out_are_right_over_tp():
    run_ranks(are_right, 2, kinds=list(RIGHT), dims={"tp": 2}, sequence_parallel=True)


def test_a_family_that_tp_would_compute_otherwise_is_refused():
    run_ranks(are_refused, 2, kinds=REFUSED, dims={"tp": 2})


class UntrainedModel(LlamaModel):
    """A decoder whose norm gets no gradient once it is sharded."""

    def forward(self, *given, **keywords):
        sharded = isinstance(self.norm.weight, DTensor)
        self.norm.weight.requires_grad_(not sharded)
        output = super().forward(*given, **keywords)
        self.norm.weight.requires_grad_(True)
        return output


class UntrainedForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = UntrainedModel(config)


def is_refused_for_its_norm(rank, world_size):
    model = miniature(UntrainedForCausalLM, AutoConfig.for_model("llama"))
    with pytest.raises(UserError, match=r"UntrainedForCausalLM over tp 2 differs .*model\.norm\.weight"):
        check_ranks(model, setup_of({"tp": 2}))


def test_a_parameter_that_ranks_do_not_train_is_refused():
    run_ranks(is_refused_for_its_norm, 2)


def test_families_without_attention_are_sharded_and_shared_layers_are_refused():
    run_ranks(are_right, 2, kinds=["mamba", "gemma4_text"], dims={"dp_shard": 2})
    shared = {"zamba2": r"Zamba2ForCausalLM has layers that share .*train it on one rank"}
    run_ranks(are_refused, 2, kinds=shared, dims={"dp_shard": 2})


def with_adapters(rank, world_size):
    section = LLMLoraSection(rank=4, alpha=8)
    check_ranks(small("qwen2_moe"), setup_of({"tp": 2}), prepare=lambda model: add_adapters(model, section, base="x"))


def test_adapters_are_probed_too():
    run_ranks(with_adapters, 2)


@pytest.mark.parametrize(
    ("dims", "heads", "experts"),
    [({"tp": 8}, 16, 4), ({"tp": 2, "cp": 4}, 8, 4), ({"dp_shard": 16, "ep": 16}, 8, 16), ({"pp": 4}, 4, 4)],
)
def test_a_miniature_is_as_large_as_the_mesh_needs(dims, heads, experts):
    size = fitting_size(ParallelDims(**dims), stages=dims.get("pp", 1))
    made = small("qwen3_moe", size).config
    assert (made.num_attention_heads, made.num_experts) == (heads, experts)
    assert made.hidden_size == 16 * heads and made.num_key_value_heads == heads // 2
    assert made.num_hidden_layers == 4 * dims.get("pp", 1)

"""What a network is not spread over, and what its types are: one clear message each, before anything is computed."""

import pytest
import torch
from wfm_parity import FAMILIES, make_inputs, make_tiny

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import MemorySection, ParallelSection, PrecisionSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_wfm.parallel.context import check_heads, plan_of
from cosmos_rl_wfm.parallel.parallelize import check_axes, parallelize, transformer_blocks
from doubles import ranks
from doubles.ranks import run_ranks

ranks.preload(*(f"diffusers.models.transformers.transformer_{name}" for name in FAMILIES), "peft")


def test_every_axis_that_has_no_plan_is_told_at_once():
    section = ParallelSection(tp=2, pp=3, ep=4, sequence_parallel=True)
    with pytest.raises(UserError, match=r"tp = 2: .* dp_shard .*pp = 3: .*ep = 4: .*sequence_parallel"):
        check_axes(section)
    check_axes(ParallelSection(dp_replicate=2, dp_shard=2, cp=2))


def test_compiled_blocks_and_cut_tokens_exclude_each_other():
    check_axes(ParallelSection(cp=1), MemorySection(compile=True))
    with pytest.raises(UserError, match=r"compile = true does not go together with .* cp = 2"):
        check_axes(ParallelSection(cp=2), MemorySection(compile=True))


def test_a_refused_axis_leaves_the_network_as_it_was():
    network = make_tiny("wan")
    with pytest.raises(UserError, match="pp = 2"):
        parallelize(network, ModelSetup(parallel=ParallelSection(pp=2)))
    assert all(type(parameter) is torch.nn.Parameter for parameter in network.parameters())


def test_heads_that_cannot_be_cut_are_told_with_all_numbers():
    check_heads(12, cp=6)
    with pytest.raises(UserError, match=r"cp = 8 does not divide the model's 12 attention heads.*1, 2, 3, 4, 6, 12"):
        check_heads(12, cp=8)


def test_a_class_without_a_plan_is_told_with_those_that_have_one():
    with pytest.raises(UserError, match=r"SanaTransformer2DModel has no plan for its tokens.*Cosmos.*SD3.*Wan"):
        plan_of("SanaTransformer2DModel", cp=2)


def test_blocks_are_those_that_a_class_declares():
    from diffusers import FluxTransformer2DModel

    flux = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=1,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    )
    kinds = [type(block).__name__ for block in transformer_blocks(flux)]
    assert kinds == ["FluxTransformerBlock", "FluxSingleTransformerBlock", "FluxSingleTransformerBlock"]


def test_blocks_of_a_class_that_declares_none_are_its_longest_list():
    network = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.ReLU()]), torch.nn.ModuleList([torch.nn.Tanh()] * 3))
    assert [type(block).__name__ for block in transformer_blocks(network)] == ["Tanh"] * 3
    with pytest.raises(UserError, match="Linear has no list of transformer blocks"):
        transformer_blocks(torch.nn.Linear(2, 2))


class OwnAttention:
    """A processor that does not ask torch for its attention."""

    def __call__(self, attn, hidden_states, *args, **kwargs):
        scores = attn.to_q(hidden_states) @ attn.to_k(hidden_states).transpose(1, 2)
        return attn.to_out[0](scores.softmax(-1) @ attn.to_v(hidden_states))


def refuse_own_attention(rank, world_size):
    network = make_tiny("wan")
    for block in network.blocks:
        block.attn1.processor = OwnAttention()
    mesh = ReplicaMesh.build(ParallelDims(cp=2), device=torch.device("cpu"))
    parallelize(network, ModelSetup(mesh=mesh, parallel=ParallelSection(cp=2)))
    with pytest.raises(UserError, match="DIFFUSERS_ATTN_BACKEND"):
        network(**make_inputs("wan", frames=1, height=4, width=4))
    return {"done": 1}


def test_an_attention_that_would_see_only_the_ranks_own_tokens_is_refused():
    assert [int(rank["done"]) for rank in run_ranks(refuse_own_attention, 2)] == [1, 1]


def in_bfloat16(rank, world_size, *, dims):
    """Velocity of a sharded network with float32 weights, and of one whose weights are bfloat16 as in a pipeline."""
    found = {}
    mesh = ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu"))
    for family in FAMILIES:
        inputs = make_inputs(family, frames=3, height=8, width=8)
        network = make_tiny(family)
        plain = make_tiny(family)
        for parameter in plain.parameters():  # and not rotary angles, which are buffers
            parameter.data = parameter.data.bfloat16()
        setup = ModelSetup(mesh=mesh, parallel=ParallelSection(**dims))
        parallelize(network, setup, compute_dtype=torch.bfloat16)
        halved = {
            name: value.bfloat16() if isinstance(value, torch.Tensor) and name != "timestep" else value
            for name, value in inputs.items()
        }
        velocity = network(**inputs, return_dict=False)[0]
        velocity.float().sum().backward()
        assert all(parameter.grad.dtype == torch.float32 for parameter in network.parameters())
        assert velocity.dtype == torch.bfloat16
        found[f"{family}/sharded"] = velocity.detach().float().numpy()
        found[f"{family}/plain"] = plain(**halved, return_dict=False)[0].detach().float().numpy()
    return found


@pytest.mark.parametrize(("dims", "tolerance"), [({"dp_shard": 2}, 0.0), ({"cp": 2}, 2e-2)], ids=str)
def test_a_network_in_bfloat16_computes_what_a_pipeline_does_with_times_in_float32(dims, tolerance):
    for rank in run_ranks(in_bfloat16, 2, dims=dims):
        for family in FAMILIES:
            plain, sharded = rank[f"{family}/plain"], rank[f"{family}/sharded"]
            assert abs(sharded - plain).max() <= tolerance * abs(plain).max(), family


def held_in_bfloat16(rank, world_size):
    """A network as diffusers loads it in bfloat16, a part of which stays in float32."""
    network = make_tiny("wan").to(torch.bfloat16)
    for block in network.blocks:
        block.scale_shift_table.data = block.scale_shift_table.data.float()
    mesh = ReplicaMesh.build(ParallelDims(dp_shard=2), device=torch.device("cpu"))
    precision = PrecisionSection(parameters="bfloat16")
    parallelize(network, ModelSetup(mesh=mesh, parallel=ParallelSection(dp_shard=2), precision=precision))
    inputs = make_inputs("wan", frames=3, height=8, width=8)
    times = {"timestep": inputs.pop("timestep")}
    network(**{name: value.bfloat16() for name, value in inputs.items()}, **times)[0].float().sum().backward()
    return {"types": len({parameter.grad.dtype for parameter in network.parameters()} - {torch.bfloat16})}


def test_weights_trained_in_bfloat16_are_all_of_that_type():
    assert [int(rank["types"]) for rank in run_ranks(held_in_bfloat16, 2)] == [0, 0]


@pytest.mark.filterwarnings("ignore")  # torchao's own, about kernels it does not find on CPUs
def test_float8_takes_the_linear_layers_of_blocks_alone():
    pytest.importorskip("torchao")
    network = make_tiny("cosmos")
    parallelize(network, ModelSetup(precision=PrecisionSection(fp8="tensorwise")))
    taken = {name for name, module in network.named_modules() if type(module).__name__ == "Float8Linear"}
    assert "transformer_blocks.1.attn1.to_q" in taken
    assert all(name.startswith("transformer_blocks.") for name in taken)

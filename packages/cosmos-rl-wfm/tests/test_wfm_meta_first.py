"""Networks over ranks are built on meta: a rank holds its shards and at most one block, and the values are right."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from wfm_fixtures import mock_data

from cosmos_rl_core.parallel.config import ParallelSection, PrecisionSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import whole
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.plan.live_bytes import LiveBytes
from cosmos_rl_wfm.build import build_policy
from cosmos_rl_wfm.models.build import build_model
from cosmos_rl_wfm.models.config import WFMModelConfig
from cosmos_rl_wfm.models.networks.tiny import tiny_network
from cosmos_rl_wfm.models.weights import empty_network
from cosmos_rl_wfm.parallel.parallelize import transformer_blocks
from cosmos_rl_wfm.sampling import FlowSampling
from doubles import ranks

ranks.preload("diffusers.models.transformers.transformer_wan", "cosmos_rl_wfm.models.build")

WORDS = {"encoder": "words"}


def setup_of(dims, parameters, *, frozen=False):
    mesh = ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu")) if dims else None
    precision = PrecisionSection(parameters=parameters)
    return ModelSetup(mesh=mesh, parallel=ParallelSection(**dims), precision=precision, frozen=frozen)


def policy_of(path, *, dims, lora=None, parameters="float32", frozen=False, **model):
    model = WFMModelConfig.model_validate({"path": path, "codec": "pixels", "text": WORDS, "lora": lora, **model})
    setup = setup_of(dims, parameters, frozen=frozen)
    return build_policy(model, data=mock_data(), sampling=FlowSampling(guidance=2.0), seed=0, setup=setup)


def tensors_of(policy, *, dtype):
    """Whole parameters and buffers, rounded to `dtype`: over ranks, all parameters have it."""
    network = policy.module
    found = {name: whole(parameter) for name, parameter in network.named_parameters()}
    found |= dict(network.named_buffers())
    assert not any(tensor.is_meta for tensor in found.values())
    return {name: tensor.to(dtype).float().numpy().copy() for name, tensor in found.items()}


def rank_tensors(rank, world_size, **options):
    return tensors_of(policy_of(**options), dtype=getattr(torch, options["parameters"]))


@pytest.mark.parametrize(("lora", "parameters"), [(None, "float32"), (None, "bfloat16"), ({"rank": 4}, "float32")])
def test_parameters_buffers_and_adapters_are_those_of_one_process(tmp_path, lora, parameters):
    if lora:
        pytest.importorskip("peft")
    build_model(WFMModelConfig(family="wan", tiny=True, codec="pixels", text=WORDS)).network.save_pretrained(tmp_path)
    options = {"path": str(tmp_path), "lora": lora, "parameters": parameters}
    expected = tensors_of(policy_of(**options, dims={}), dtype=getattr(torch, parameters))
    for found in ranks.run_ranks(rank_tensors, 2, **options, dims={"dp_shard": 2}):
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert (found[name] == value).all(), name


def reference_beside_policy(rank, world_size, *, path, dims):
    found, generator = {}, torch.Generator().manual_seed(0)
    for name, frozen in (("policy", False), ("reference", True)):
        network = policy_of(path, dims=dims, dtype="bfloat16", frozen=frozen).module
        assert {p.dtype for p in network.parameters()} == {torch.bfloat16 if frozen else torch.float32}
        latents = torch.randn(1, network.config.in_channels, 2, 8, 8, generator=generator.manual_seed(rank))
        words = torch.randn(1, 5, network.config.text_dim, generator=generator)
        with torch.no_grad():
            inputs = {"hidden_states": latents, "timestep": torch.tensor([937.5]), "encoder_hidden_states": words}
            found[name] = network(**inputs, return_dict=False)[0].float().numpy()
        found[f"buffers of the {name}"] = np.concatenate([b.float().flatten().numpy() for b in network.buffers()])
    return found


@pytest.mark.parametrize("dims", [{"dp_shard": 2}, {"cp": 2}])
def test_a_reference_without_masters_computes_the_same_bits(tmp_path, dims):
    build_model(WFMModelConfig(family="wan", tiny=True, codec="pixels", text=WORDS)).network.save_pretrained(tmp_path)
    for found in ranks.run_ranks(reference_beside_policy, 2, path=str(tmp_path), dims=dims):
        assert np.abs(found["policy"]).max() > 0
        assert np.array_equal(found["policy"], found["reference"])
        assert np.array_equal(found["buffers of the policy"], found["buffers of the reference"])


def held_while_building(rank, world_size, *, path, dims):
    with LiveBytes(inputs=True) as held:
        policy = policy_of(path, dims=dims)
    tensors = [*policy.module.parameters(), *policy.module.buffers()]
    return {"peak": held.peak, "part": sum(num_bytes(tensor) for tensor in tensors)}


def num_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def test_a_rank_holds_its_part_and_one_block_while_building(tmp_path):
    config = {**tiny_network("wan"), "num_layers": 12}
    network = empty_network("WanTransformer3DModel", config, dtype=torch.float32)
    network.save_pretrained(tmp_path)
    block = max(sum(num_bytes(parameter) for parameter in one.parameters()) for one in transformer_blocks(network))
    total = sum(num_bytes(parameter) for parameter in network.parameters())
    for found in ranks.run_ranks(held_while_building, 4, path=str(tmp_path), dims={"dp_shard": 4}):
        assert found["part"] <= found["peak"] <= found["part"] + block, found
        assert found["part"] + block < 0.5 * total

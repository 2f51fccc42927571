"""Models over ranks are built on meta: a rank holds its shards and at most one block, and the values are right."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from vla_fixtures import save_pi, small_pi
from vla_parity import MODULES, SAMPLES, decisions, microbatch_of, save_model

from cosmos_rl_core.parallel.config import MemorySection, ParallelSection, PrecisionSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import whole
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.plan.live_bytes import LiveBytes
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.build import build_policy
from cosmos_rl_vla.config import VLADataConfig, VLAModelConfig, VLASampling
from cosmos_rl_vla.models.families import load
from cosmos_rl_vla.models.instructions import word_instructions
from cosmos_rl_vla.models.pi.family import random_pi
from doubles import ranks

ranks.preload(*MODULES)


def policy_of(path, *, dims, parameters="float32", offload=False, frozen=False, **model):
    mesh = ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu")) if dims else None
    setup = ModelSetup(
        mesh=mesh,
        parallel=ParallelSection(**dims),
        memory=MemorySection(parameter_offload=offload),
        precision=PrecisionSection(parameters=parameters),
        frozen=frozen,
    )
    config = VLAModelConfig.model_validate({"path": path, "seed": 3, **model})
    data = VLADataConfig(simulator="reach", tasks=("reach",))
    return build_policy(config, data=data, sampling=VLASampling(), seed=0, setup=setup)


def tensors_of(policy):
    found = {name: whole(parameter) for name, parameter in policy.module.named_parameters()}
    found |= dict(policy.module.named_buffers())
    assert not any(tensor.is_meta for tensor in found.values())
    return {name: tensor.float().numpy().copy() for name, tensor in found.items()}


def rank_tensors(rank, world_size, **options):
    return tensors_of(policy_of(**options))


OTHER_CRITIC = {"critic": {"hidden": [8]}}
LORA = {"lora": {"rank": 4}}
BFLOAT16 = {"parameters": "bfloat16", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("pi05", {}),
        ("pi05", {**OTHER_CRITIC, **BFLOAT16}),  # a head that the directory lacks has its initial values
        ("pi05", LORA),
        ("pi0", {"train": "expert"}),
        ("openvla", OTHER_CRITIC),
        ("openvla_oft", LORA),
        ("mlp", {}),
    ],
)
def test_parameters_buffers_and_adapters_are_those_of_one_process(tmp_path, variant, options):
    if "lora" in options:
        pytest.importorskip("peft")
    save_model(variant, tmp_path)
    options = {"path": str(tmp_path), **options}
    expected = tensors_of(policy_of(**options, dims={}))
    for found in ranks.run_ranks(rank_tensors, 2, **options, dims={"dp_shard": 2}):
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert np.array_equal(found[name], value), name


def reference_beside_policy(rank, world_size, *, path, dims):
    inputs, acted = decisions(load(VLAModelConfig(path=path)))
    microbatch = microbatch_of(inputs, acted, [*range(SAMPLES)], supervised=False)
    found = {}
    for name, frozen in (("policy", False), ("reference", True)):
        policy = policy_of(path, dims=dims, dtype="bfloat16", frozen=frozen)
        with torch.no_grad():
            found[name] = policy.forward(microbatch).logprobs.numpy()
        exact = {id(p) for group in policy.loaded.model.exact() for module in group for p in module.parameters()}
        dtypes = {parameter.dtype for parameter in policy.module.parameters() if id(parameter) not in exact}
        assert dtypes == {torch.bfloat16 if frozen else torch.float32}
    return found


@pytest.mark.parametrize("variant", ["pi05", "openvla_oft"])
def test_a_reference_without_masters_computes_the_same_bits(tmp_path, variant):
    save_model(variant, tmp_path)
    for found in ranks.run_ranks(reference_beside_policy, 2, path=str(tmp_path), dims={"dp_shard": 2}):
        assert np.array_equal(found["policy"], found["reference"])


def held_while_building(rank, world_size, *, path, dims, offload):
    with LiveBytes(inputs=True) as held:
        policy = policy_of(path, dims=dims, offload=offload)
    tensors = [*policy.module.parameters(), *policy.module.buffers()]
    return {"peak": held.peak, "part": sum(num_bytes(tensor) for tensor in tensors)}


def num_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


@pytest.mark.parametrize("offload", [False, True])
def test_a_rank_holds_its_part_and_one_block_while_building(tmp_path, offload):
    config = small_pi()
    config = replace(config, language=replace(config.language, depth=12), expert=replace(config.expert, depth=12))
    model = random_pi(config, seed=0)
    save_pi(model, tmp_path)
    word_instructions(("reach",)).save(tmp_path)
    ActionStats.unit(config.action_dim).save(tmp_path)
    block = max(sum(num_bytes(parameter) for parameter in one.parameters()) for one in model.blocks())
    total = sum(num_bytes(parameter) for parameter in model.parameters())
    for found in ranks.run_ranks(held_while_building, 4, path=str(tmp_path), dims={"dp_shard": 4}, offload=offload):
        assert found["part"] <= found["peak"] <= found["part"] + block, (found, block, total)
        assert found["part"] + block < 0.5 * total

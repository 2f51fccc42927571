"""Wan2.1-14B on fake ranks: bytes of parameters of a rank are those of `cosmos-rl plan`; nothing is allocated."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from cosmos_rl_core.parallel import mesh as meshes
from cosmos_rl_core.parallel.config import ParallelSection, PolicySection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import parameters_on_meta
from cosmos_rl_core.parallel.estimate import estimate
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_wfm.models.weights import empty_network, with_defaults
from cosmos_rl_wfm.parallel.parallelize import parallelize
from cosmos_rl_wfm.parallel.shape import model_shape

WAN = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "text_dim": 4096, "freq_dim": 256}


@pytest.mark.parametrize(
    ("layers", "dims"),
    [
        (2, {"dp_shard": 64}),
        (2, {"dp_shard": 8, "cp": 8}),
        pytest.param(40, {"dp_shard": 64}, marks=pytest.mark.slow),
    ],
)
def test_a_rank_holds_the_planned_bytes_of_parameters(monkeypatch, layers, dims):
    name, dims = "WanTransformer3DModel", ParallelDims(**dims)
    config = with_defaults(name, {**WAN, "num_layers": layers})
    section = ParallelSection(**dict(dims))
    monkeypatch.setattr(meshes, "_set_timeouts", lambda *_, **__: None)  # a fake group has none
    dist.init_process_group("fake", rank=0, world_size=dims.world_size, store=FakeStore())
    try:
        mesh = ReplicaMesh.build(dims, device=torch.device("cpu"))
        with parameters_on_meta():
            network = empty_network(name, {**WAN, "num_layers": layers}, dtype=torch.float32)
        parallelize(network.requires_grad_(True), ModelSetup(mesh=mesh, parallel=section), compute_dtype=torch.bfloat16)
    finally:
        dist.destroy_process_group()
    parameters = list(network.parameters())
    assert all(isinstance(parameter, DTensor) and parameter.is_meta for parameter in parameters)
    shape = model_shape({**config, "_class_name": name}, dtype="bfloat16")
    assert shape is not None
    expected = estimate(shape, dims=dims, policy=PolicySection(parallel=section), tokens=1000)
    assert sum(parameter.to_local().nbytes for parameter in parameters) == pytest.approx(expected.parameters, rel=1e-3)

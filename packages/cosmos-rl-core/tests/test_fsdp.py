"""Fully sharded modules: gradients are sums over ranks, and a rank's part of a parameter is one box."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.axes.fsdp import reshard, shard_fully
from cosmos_rl_core.parallel.axes.tensor import TensorAxis, cut_columns, cut_rows, region
from cosmos_rl_core.parallel.config import MemorySection, ParallelSection, PrecisionSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from doubles.ranks import run_ranks

WIDTH = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, WIDTH))

    def forward(self, hidden):
        return hidden + self.inner(hidden)


class Network(nn.Module):
    """Two blocks and a head, from fixed values."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 3)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.3, generator=generator)

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def samples(index):
    return torch.randn(1, 4, WIDTH, generator=torch.Generator().manual_seed(index + 1))


def loss_of(network, rows):
    return network(rows).square().sum()


def sharded(mesh, *, tp=False, compute_dtype=None, parallel=None, memory=None):
    network = Network()
    if tp:
        axis = TensorAxis(mesh.world["tp"])
        for block in network.blocks:
            cut_columns(block.inner[0], axis)
            cut_rows(block.inner[2], axis)
            region(block.inner, axis)
    shard_fully(
        network,
        blocks=list(network.blocks),
        mesh=mesh,
        parallel=ParallelSection(**(parallel or {})),
        memory=MemorySection(**(memory or {})),
        precision=PrecisionSection(),
        compute_dtype=compute_dtype,
    )
    return network


def gradients_of(rank, world_size, *, dims, tp=False, **options):
    mesh = ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu"))
    network = sharded(mesh, tp=tp, **options)
    loss_of(network, samples(mesh.share.index)).backward()
    assert all(isinstance(parameter, DTensor) for parameter in network.parameters())
    return {name: parameter.grad.full_tensor().numpy() for name, parameter in network.named_parameters()}


@pytest.mark.parametrize(
    "dims",
    [{}, {"dp_shard": 2}, {"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}],
)
def test_gradients_are_sums_over_the_shares(dims):
    sizes = ParallelDims(**dims)
    network = Network()
    for index in range(sizes.num_shares):
        loss_of(network, samples(index)).backward()
    for found in run_ranks(gradients_of, sizes.world_size, dims=dims, tp="tp" in dims):
        for name, parameter in network.named_parameters():
            np.testing.assert_allclose(found[name], parameter.grad.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"memory": {"parameter_offload": True}}, {"parallel": {"reshard_after_forward": False}}]
)
def test_options_change_no_gradient(options):
    plain, other = (run_ranks(gradients_of, 2, dims={"dp_shard": 2}, **given)[0] for given in ({}, options))
    for name in plain:
        np.testing.assert_array_equal(other[name], plain[name])


def placements(rank, world_size, *, dims):
    mesh = ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu"))
    network = sharded(mesh, tp=True)
    up, _, down = network.blocks[0].inner
    assert up.weight.placements == (Shard(1), Shard(0))
    assert down.weight.placements == (Shard(0), Shard(1))
    assert up.bias.placements == (Shard(0), Replicate())
    assert network.head.weight.placements == (Shard(0),)


def test_what_tp_cuts_is_cut_along_another_dim():
    run_ranks(placements, 4, dims={"dp_shard": 2, "tp": 2})


def uneven(rank, world_size):
    mesh = ReplicaMesh.build(ParallelDims(dp_shard=4, tp=2), device=torch.device("cpu"))
    with pytest.raises(UserError, match=r"inner\.0\.weight of shape \(10, 6\).*dp_shard x cp = 4"):
        sharded(mesh, tp=True)


def test_a_matrix_that_no_dim_can_take_is_named():
    run_ranks(uneven, 8)


def computes_in_bfloat16(rank, world_size):
    mesh = ReplicaMesh.build(ParallelDims(dp_shard=2), device=torch.device("cpu"))
    network = sharded(mesh, compute_dtype=torch.bfloat16)
    output = network(samples(rank))
    output.float().square().sum().backward()
    assert output.dtype == torch.bfloat16
    return {name: parameter.grad.full_tensor().numpy() for name, parameter in network.named_parameters()}


def test_master_weights_keep_their_type_and_gradients_are_close():
    network = Network()
    for index in range(2):
        loss_of(network, samples(index)).backward()
    for found in run_ranks(computes_in_bfloat16, 2):
        for name, parameter in network.named_parameters():
            assert found[name].dtype == np.float32
            error = np.linalg.norm(found[name] - parameter.grad.numpy()) / np.linalg.norm(parameter.grad.numpy())
            assert 0 < error < 0.05, name


def leaves_nothing_gathered(rank, world_size):
    mesh = ReplicaMesh.build(ParallelDims(dp_shard=2), device=torch.device("cpu"))
    network = sharded(mesh)
    with torch.no_grad():
        network(samples(0))
    assert not isinstance(network.head.weight, DTensor)  # torch leaves the root as it was used
    reshard(network)
    assert all(isinstance(parameter, DTensor) for parameter in network.parameters())


def test_reshard_frees_what_a_forward_pass_left():
    run_ranks(leaves_nothing_gathered, 2)

"""Boxes of real DTensors, on ranks of a real gloo group: each rank must hold exactly what its box says."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.dtensor import local
from cosmos_rl_transfer.layout.manifest import Manifest
from doubles.ranks import run_ranks

SHAPES = {"up.weight": (12, 8), "up.bias": (12,), "down.weight": (8, 12), "down.bias": (8,)}


def numbered(name):
    shape = SHAPES[name]
    return torch.arange(float(np.prod(shape))).reshape(shape) + 1000 * list(SHAPES).index(name)


def two_layers():
    model = nn.Sequential()
    model.add_module("up", nn.Linear(8, 12))
    model.add_module("down", nn.Linear(12, 8))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(numbered(name))
    return model


def held(weights, rank):
    """1 where this rank's memory is its box of the numbered tensors, by name."""
    manifest = Manifest.from_tensors(weights, rank=rank)
    found = {}
    for layout in manifest.layouts:
        name, box = layout.spec.name, layout.boxes.get(rank)
        mine = local(weights[name])
        wanted = numbered(name)[box.slices()] if box else mine[:0]
        found[name] = int(mine.shape == wanted.shape and torch.equal(mine, wanted))
    return found


def fsdp_and_tp(rank, world_size, *, shape, axes):
    model = two_layers()
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(axes))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    others = tuple(axis for axis in axes if axis != "tp")
    fully_shard(model, mesh=mesh[others])
    weights = dict(model.named_parameters())
    kinds = {type(p).__name__ for tensor in weights.values() for p in tensor.placements}
    return {**held(weights, rank), "strided": int("_StridedShard" in kinds)}


@pytest.mark.parametrize(
    ("shape", "axes"), [((2, 2), ("fsdp", "tp")), ((2, 2, 2), ("replicate", "fsdp", "tp")), ((4, 2), ("fsdp", "tp"))]
)
def test_fsdp_over_tensor_parallel_parameters(shape, axes):
    for found in run_ranks(fsdp_and_tp, int(np.prod(shape)), shape=list(shape), axes=list(axes)):
        assert found.pop("strided") == 1
        assert {name: int(ok) for name, ok in found.items()} == dict.fromkeys(SHAPES, 1)


def distributed(rank, world_size):
    """Placements by hand, on a 2 x 2 mesh."""
    mesh = init_device_mesh("cpu", (2, 2))
    placed = {
        "up.weight": [Shard(0), Shard(0)],
        "up.bias": [Replicate(), Shard(0)],
        "down.weight": [_StridedShard(1, split_factor=2), Shard(1)],
        "down.bias": [_StridedShard(0, split_factor=2), Shard(0)],
    }
    weights = {name: distribute_tensor(numbered(name), mesh, placements) for name, placements in placed.items()}
    return held(weights, rank)


def test_strided_and_plain_shards_on_any_dim():
    for found in run_ranks(distributed, 4):
        assert {name: int(ok) for name, ok in found.items()} == dict.fromkeys(SHAPES, 1)


def refused(rank, world_size):
    """Each placement that must be refused, 1 if it was and the error names the tensor."""
    mesh = init_device_mesh("cpu", (2, 2))
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    placed = {
        "several": distribute_tensor(torch.zeros(16), mesh, [_StridedShard(0, split_factor=4), Shard(0)]),
        "memory": DTensor.from_local(torch.zeros(3), mesh, strided, shape=torch.Size([16]), stride=(1,)),
        "sums": DTensor.from_local(torch.zeros(4), mesh, [Partial(), Replicate()]),
    }
    found = {}
    for name, tensor in placed.items():
        found[name] = 0
        try:
            Manifest.from_tensors({name: tensor}, rank=rank)
        except LayoutError as error:
            found[name] = int(name in str(error))
    return found


def test_sums_several_boxes_and_memory_that_contradicts_the_placement_are_refused_by_name():
    for found in run_ranks(refused, 4):
        assert {name: int(ok) for name, ok in found.items()} == {"several": 1, "memory": 1, "sums": 1}


@contextmanager
def fake_rank(rank, world_size):
    """A rank whose collectives do nothing: enough to shard."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def tied_model(mesh):
    """9 rows over 4 ranks are 3, 3, 3 and none."""
    embed, up, head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False), nn.Linear(4, 9, bias=False)
    head.weight = embed.weight
    return fully_shard(nn.Sequential(embed, up, head), mesh=mesh)


@pytest.mark.parametrize(
    "weights", [lambda model: dict(model.named_parameters(remove_duplicate=False)), lambda model: model.state_dict()]
)
def test_a_rank_with_an_empty_part_sees_the_same_ties_as_the_others(weights):
    parts = []
    for rank in range(4):
        with fake_rank(rank, 4) as mesh:
            model = tied_model(mesh)
            parts.append(Manifest.from_tensors(weights(model), rank=rank))
    assert parts[3].box("0.weight", 3) is None
    assert all(part == parts[0] for part in parts) and parts[0].tied == {"2.weight": "0.weight"}
    assert Manifest.merge(parts) == parts[0]


def test_empty_parts_that_lie_in_one_pool_are_tensors_of_their_own():
    with fake_rank(3, 4) as mesh:
        pool = torch.zeros(0)
        weights = {
            name: DTensor.from_local(pool.view(0, width), mesh, [Shard(0)], shape=(9, width), stride=(width, 1))
            for name, width in (("a", 4), ("b", 4), ("c", 2))
        }
        assert Manifest.from_tensors(weights, rank=3).tied == {}

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from cosmos_rl_core.testing.ranks import run_ranks
from cosmos_rl_transfer.content.quantize import quantized
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.dtensor import local
from cosmos_rl_transfer.layout.manifest import Manifest

SCHEMES = ["fp8", "fp8_channel", "fp8_block", "mxfp4", "nvfp4"]
PLACEMENTS = {
    "rows": [Replicate(), Shard(0)],
    "columns": [Shard(1), Replicate()],
    "both": [Shard(0), Shard(1)],
    "columns, the later axis first": [_StridedShard(1, split_factor=2), Shard(1)],
}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def quantise_shards(rank, world_size):
    """1 for each scheme and placement whose shard here has the bits of its box of the whole."""
    mesh = init_device_mesh("cpu", (2, 2))
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    found = {}
    for scheme in SCHEMES:
        expected = quantized({"a.weight": weight}, scheme)
        for label, placements in PLACEMENTS.items():
            shards = quantized({"a.weight": distribute_tensor(weight, mesh, placements)}, scheme)
            boxes = {spec.name: box for spec, box in Manifest.from_tensors(shards, rank=rank).held_by(rank)}
            found[f"{scheme} {label}"] = list(boxes) == list(expected) and all(
                torch.equal(bits(local(shards[name])), bits(expected[name][box.slices()]))
                for name, box in boxes.items()
            )
    return {name: int(ok) for name, ok in found.items()}


def test_quantised_shards_are_the_bits_of_the_whole():
    for found in run_ranks(quantise_shards, 4):
        assert {name: int(ok) for name, ok in found.items()} == {
            f"{scheme} {label}": 1 for scheme in SCHEMES for label in PLACEMENTS
        }


def cut_tiles(rank, world_size):
    """1 if shards of 96 rows are refused for blocks of 128."""
    mesh = init_device_mesh("cpu", (2,))
    placed = distribute_tensor(torch.ones(192, 128), mesh, [Shard(0)])
    with pytest.raises(LayoutError, match=r"a\.weight: its shards cut the 128 x 128 tiles of fp8_block"):
        quantized({"a.weight": placed}, "fp8_block")
    return {"refused": 1}


def test_shards_that_cut_tiles_are_refused_by_name():
    for found in run_ranks(cut_tiles, 2):
        assert int(found["refused"]) == 1

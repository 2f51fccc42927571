"""A replica spread over ranks publishes its parts; an engine's rank puts them together."""

import asyncio

import numpy as np
import pytest
import torch

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_transfer import LayoutError, Manifest
from cosmos_rl_transfer.backend import TransferSync
from cosmos_rl_transfer.layout.manifest import Shard
from cosmos_rl_transfer.publish.publisher import own_part
from doubles.ranks import run_ranks

TOKEN = b"the run's token of 32 bytes....."
SHAPES = {"embed": (7, 6), "proj": (8, 10), "norm": (5,), "scalar": (1,), "first": (4, 3), "last": (3, 4)}
"""Uneven over the mesh on purpose; `scalar` leaves ranks with nothing of it."""


def whole_at(version):
    draw = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def parts_at(version, rank, mesh):
    """What a rank of dp_shard 2 x tp 2 holds; `first` and `last` are of two pipeline stages, whole on one rank each."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = {
        "embed": [Shard(1), Shard(0)],
        "proj": [Shard(0), Shard(1)],
        "norm": [Shard(0), Replicate()],
        "scalar": [Shard(0), Shard(0)],
    }
    whole = whole_at(version)
    parts = {name: distribute_tensor(whole[name], mesh, cut) for name, cut in placements.items()}
    mine = {0: "first", 3: "last"}.get(rank)
    return {**parts, mine: whole[mine]} if mine else parts


def publish_and_pull(rank, world_size, *, transport):
    """All ranks publish two versions; rank 0 is the engine too."""
    from torch.distributed.device_mesh import init_device_mesh

    from cosmos_rl_core.parallel.rank_group import RankGroup

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    ranks = RankGroup.of_all()
    sync = TransferSync()
    settings = SyncSection(transport=transport, bucket_bytes=4096, timeout_s=30.0)
    publisher = sync.publisher(parts_at(0, rank, mesh), bind="127.0.0.1", ranks=ranks, settings=settings, token=TOKEN)
    live = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    exact = []

    async def pull(version):
        subscriber = sync.subscriber(publisher.address, live, settings=settings, token=TOKEN)
        assert await subscriber.stage(after=version - 1) == version
        subscriber.apply()
        await subscriber.close()
        return all(torch.equal(live[name], tensor) for name, tensor in whole_at(version).items())

    metrics = {}
    for version in (0, 1):
        metrics = asyncio.run(publisher.publish(version, parts_at(version, rank, mesh)))
        if rank == 0:
            exact.append(asyncio.run(pull(version)))
        ranks.meet()
    asyncio.run(publisher.close())
    addresses = len(publisher.address.split(","))
    return {"exact": all(exact), "addresses": addresses, "bytes": metrics["sync_bytes"]}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_parts_of_four_ranks_make_up_the_whole(transport):
    for result in run_ranks(publish_and_pull, 4, transport=transport):
        assert result["exact"]
        assert result["addresses"] == 4
        assert result["bytes"] == 4 * sum(np.prod(shape) for shape in SHAPES.values())


def publish_from_one(rank, world_size):
    """Rank 0 holds the only tensor."""
    from cosmos_rl_core.parallel.rank_group import RankGroup

    ranks = RankGroup.of_all()
    weights = {"w": torch.arange(12.0)} if rank == 0 else {}
    settings = SyncSection(transport="tcp", dtype="bfloat16", bucket_bytes=4096, timeout_s=30.0)
    publisher = TransferSync().publisher(weights, bind="127.0.0.1", ranks=ranks, settings=settings, token=TOKEN)
    metrics = asyncio.run(publisher.publish(0, weights))
    asyncio.run(publisher.close())
    return {"addresses": len(publisher.address.split(",")), "bytes": metrics.get("sync_bytes", 0.0)}


def test_a_rank_that_holds_nothing_has_no_address():
    results = run_ranks(publish_from_one, 2)
    assert [(int(r["addresses"]), float(r["bytes"])) for r in results] == [(1, 24.0), (1, 0.0)]


def test_what_ranks_hold_is_joined_into_one_manifest():
    specs = [WeightSpec(name="a", shape=(5, 2), dtype="float32"), WeightSpec(name="b", shape=(4,), dtype="float32")]
    known = Manifest.sharded(specs, mesh_shape=(3,), placements={"a": [Shard(0)]})
    parts = [
        Manifest(tuple(type(x)(x.spec, {r: box for r, box in x.boxes.items() if r == rank}) for x in known.layouts))
        for rank in range(3)
    ]
    assert Manifest.merge(parts) == known
    assert own_part({"b": torch.zeros(4)}, rank=2) == Manifest.whole(specs[1:], rank=2)


def test_ranks_that_disagree_on_a_tensor_are_told():
    wide, narrow = (WeightSpec(name="a", shape=(4,), dtype=dtype) for dtype in ("float32", "bfloat16"))
    with pytest.raises(LayoutError, match=r"a: float32 \[4\] on one rank, bfloat16 \[4\] on another"):
        Manifest.merge([Manifest.whole([wide]), Manifest.whole([narrow], rank=1)])

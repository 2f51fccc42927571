import asyncio

import pytest
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore
from transfer_samples import sync

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer import LayoutError, Manifest, Publisher, Subscriber
from cosmos_rl_transfer.layout import manifest as layout
from cosmos_rl_transfer.layout.dtensor import local

TOKEN = b"the run's token"
SPECS = [
    WeightSpec(name="embed", shape=(101, 24), dtype="float32"),
    WeightSpec(name="proj", shape=(24, 50), dtype="bfloat16"),
    WeightSpec(name="norm", shape=(24,), dtype="float32"),
]
HYBRID = Manifest.sharded(
    SPECS, mesh_shape=(2, 3), placements={s.name: [layout.Replicate(), layout.Shard(0)] for s in SPECS}
)
COLUMNS = Manifest.sharded(
    SPECS, mesh_shape=(2,), placements={"embed": [layout.Shard(1)], "proj": [layout.Shard(1)]}, first_rank=10
)


def whole_at(version):
    draw = torch.Generator().manual_seed(version)
    return {s.name: torch.randn(s.shape, generator=draw).to(getattr(torch, s.dtype)) for s in SPECS}


def parts(manifest, rank, whole):
    return {spec.name: whole[spec.name][box.slices()].clone() for spec, box in manifest.held_by(rank)}


def publishers(manifest, transport):
    return [
        Publisher(
            parts(manifest, rank, whole_at(0)),
            token=TOKEN,
            manifest=manifest,
            rank=rank,
            settings=sync(transport=transport, bucket_bytes=1024),
        )
        for rank in manifest.ranks
    ]


@pytest.mark.parametrize("source", [HYBRID, Manifest.whole(SPECS)], ids=["hybrid", "whole"])
@pytest.mark.parametrize("target", [COLUMNS, Manifest.whole(SPECS)], ids=["columns", "whole"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_every_layout_reaches_every_other_bit_exact(source, target, transport):
    async def main():
        sending = publishers(source, transport)
        addresses = [p.address for p in sending]
        live = {
            rank: parts(target, rank, {n: torch.zeros_like(t) for n, t in whole_at(0).items()}) for rank in target.ranks
        }
        receiving = {
            rank: Subscriber(
                addresses, live[rank], token=TOKEN, manifest=target, rank=rank, settings=sync(transport=transport)
            )
            for rank in target.ranks
        }
        for version in range(3):
            whole = whole_at(version)
            for rank, publisher in zip(source.ranks, sending):
                await publisher.publish(version, parts(source, rank, whole))
            for rank, subscriber in receiving.items():
                assert await subscriber.stage(after=version - 1) == version
                subscriber.apply()
                for name, wanted in parts(target, rank, whole).items():
                    assert torch.equal(live[rank][name], wanted), (name, rank)
        for side in [*receiving.values(), *sending]:
            await side.close()

    asyncio.run(main())


def test_a_version_counts_once_all_publishers_have_it():
    async def main():
        sending = publishers(HYBRID, "shm")
        live = {n: torch.zeros_like(t) for n, t in whole_at(0).items()}
        subscriber = Subscriber([p.address for p in sending], live, token=TOKEN)
        for version, group in ((0, sending), (1, sending[:3])):
            for rank, publisher in enumerate(group):
                await publisher.publish(version, parts(HYBRID, rank, whole_at(version)))
        staging = asyncio.create_task(subscriber.stage(after=-1))
        done, _ = await asyncio.wait([staging], timeout=0.2)
        assert not done
        for rank, publisher in enumerate(sending[3:], 3):
            await publisher.publish(1, parts(HYBRID, rank, whole_at(1)))
        assert await staging == 1
        subscriber.apply()
        assert all(torch.equal(live[name], tensor) for name, tensor in whole_at(1).items())
        for side in [subscriber, *sending]:
            await side.close()

    asyncio.run(main())


def test_a_missing_publisher_is_named():
    async def main():
        sending = publishers(HYBRID, "shm")
        subscriber = Subscriber([p.address for p in sending[1:]], whole_at(0), token=TOKEN)
        with pytest.raises(LayoutError, match=r"source ranks \[0\] hold needed weights"):
            await subscriber.stage(after=-1)
        for side in [subscriber, *sending]:
            await side.close()

    asyncio.run(main())


@pytest.fixture
def mesh():
    """Rank 4 of a 2 x 3 mesh whose other ranks exist on paper only."""
    init_process_group("fake", rank=4, world_size=6, store=FakeStore())
    yield init_device_mesh("cpu", (2, 3))
    destroy_process_group()


@pytest.mark.parametrize("placements", [[Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(0), Shard(0)]])
def test_dtensors_are_described_as_torch_cuts_them(mesh, placements):
    tensor = distribute_tensor(torch.arange(77.0).reshape(11, 7), mesh, placements, src_data_rank=None)
    manifest = Manifest.from_tensors({"w": tensor})
    box = manifest.layouts[0].boxes[4]
    assert (box.shape, box.offset) == compute_local_shape_and_global_offset((11, 7), mesh, placements)
    assert torch.equal(local(tensor), torch.arange(77.0).reshape(11, 7)[box.slices()])
    ours = Manifest.sharded(
        [WeightSpec(name="w", shape=(11, 7), dtype="float32")],
        mesh_shape=(2, 3),
        placements={"w": [layout.Shard(p.dim) if isinstance(p, Shard) else layout.Replicate() for p in placements]},
    )
    assert manifest == ours


def test_partial_tensors_are_refused(mesh):
    tensor = distribute_tensor(torch.zeros(4), mesh, [Replicate(), Partial()], src_data_rank=None)
    with pytest.raises(LayoutError, match=r"w: .*redistribute it to Shard or Replicate"):
        Manifest.from_tensors({"w": tensor})

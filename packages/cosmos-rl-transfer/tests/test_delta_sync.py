"""Deltas from a publisher to subscribers, over both transports."""

import asyncio
from contextlib import AsyncExitStack

import pytest
import torch
from transfer_samples import TOKEN, BitFlips, over

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer import Manifest, Publisher, Shard, Subscriber
from cosmos_rl_transfer.transports.shm import SharedMemory
from cosmos_rl_transfer.transports.tcp import Tcp

TRANSPORTS = ["shm", "tcp"]
SHAPES = {"embed": (96, 64), "norm": (64,), "proj": (64, 48), "count": ()}
NUM_BYTES = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())


class Trainer:
    """Weights of which a part changes from version to version, and their publisher."""

    def __init__(self, *, transport="shm", **options):
        self.draw = torch.Generator().manual_seed(0)
        self.weights = {name: torch.randn(shape, generator=self.draw) for name, shape in SHAPES.items()}
        self.version = -1
        self.publisher = Publisher(
            self.weights, token=TOKEN, **over(transport, bucket_bytes=4096, delta=True, **options)
        )

    async def step(self, density):
        """Change elements and publish; returns the weights as they are published."""
        await self.publisher.fence()
        for tensor in self.weights.values():
            chosen = torch.rand(tensor.shape, generator=self.draw) < density
            tensor[chosen] = torch.randn(tensor.shape, generator=self.draw)[chosen]
        self.version += 1
        await self.publisher.publish(self.version, self.weights)
        return {name: tensor.clone() for name, tensor in self.weights.items()}


class Engine:
    """Live tensors, some of them views of others, and their subscriber."""

    def __init__(self, address, *, transport="shm", dtype=torch.float32, **options):
        fused = torch.zeros(160, 64, dtype=dtype)
        self.live = {
            "embed": fused[:96],
            "norm": torch.zeros(64, dtype=dtype),
            "proj": torch.zeros(48, 80, dtype=dtype)[:, 8:72].T,
            "count": torch.zeros((), dtype=dtype),
        }
        self.subscriber = Subscriber(address, self.live, token=TOKEN, **over(transport, **options))
        self.version = -1

    async def pull(self):
        """Stage and apply; returns what the pull did."""
        self.version = await self.subscriber.stage(after=self.version)
        self.subscriber.apply()
        return self.subscriber.pulled

    def assert_has(self, weights):
        for name, tensor in self.live.items():
            assert torch.equal(tensor, weights[name].to(tensor.dtype)), name


def play(script):
    """Run a scene; everything it opens is closed."""

    async def main():
        async with AsyncExitStack() as stack:
            await script(stack)

    asyncio.run(main())


def opened(stack, side):
    stack.push_async_callback((side.publisher if isinstance(side, Trainer) else side.subscriber).close)
    return side


@pytest.mark.parametrize("staging", ["shadow", "in_place"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_hundred_versions_arrive_bit_exact_whatever_part_of_them_changed(transport, staging):
    async def script(stack):
        trainer = opened(stack, Trainer(transport=transport, full_every=7))
        engine = opened(stack, Engine(trainer.publisher.address, transport=transport, staging=staging))
        came = {0.0: set(), 0.01: set(), 0.6: set(), 1.0: set()}
        for version in range(200):
            density = list(came)[version // 6 % 4]
            published = await trainer.step(density)
            done = await engine.pull()
            engine.assert_has(published)
            came[density].add(done.num_deltas > 0)
        assert came == {0.0: {True, False}, 0.01: {True, False}, 0.6: {False}, 1.0: {False}}

    play(script)


def test_few_changes_take_few_bytes_and_none_almost_nothing():
    async def script(stack):
        trainer = opened(stack, Trainer())
        engine = opened(stack, Engine(trainer.publisher.address))
        await trainer.step(1.0)
        assert (await engine.pull()).num_bytes >= NUM_BYTES
        await trainer.step(0.05)
        assert (await engine.pull()).num_bytes < 0.1 * NUM_BYTES  # 6 bytes of 4 a changed element
        await trainer.step(0.0)
        assert (await engine.pull()).num_bytes < 0.01 * NUM_BYTES

    play(script)


def test_every_so_many_versions_one_comes_whole():
    async def script(stack):
        trainer = opened(stack, Trainer(full_every=4))
        engine = opened(stack, Engine(trainer.publisher.address))
        whole = []
        for version in range(12):
            await trainer.step(0.01)
            if not (await engine.pull()).num_deltas:
                whole.append(version)
        assert whole == [0, 4, 8]

    play(script)


def test_who_joins_in_the_middle_gets_all_and_then_changes():
    async def script(stack):
        trainer = opened(stack, Trainer())
        first = opened(stack, Engine(trainer.publisher.address))
        for _ in range(3):
            await trainer.step(0.01)
            await first.pull()
        late = opened(stack, Engine(trainer.publisher.address, transport="tcp"))
        late.version = first.version  # what the other engine serves is too old for it
        published = await trainer.step(0.01)
        assert (await late.pull()).num_deltas == 0
        late.assert_has(published)
        published = await trainer.step(0.01)
        assert (await late.pull()).num_deltas > 0
        assert (await first.pull()).num_deltas == 0  # it left one version out
        late.assert_has(published)
        first.assert_has(published)

    play(script)


def test_who_joins_and_reads_from_another_follows_the_trainer_with_deltas():
    async def script(stack):
        trainer = opened(stack, Trainer())
        first = opened(stack, Engine(trainer.publisher.address))
        published = await trainer.step(1.0)
        await first.pull()
        late = opened(stack, Engine(trainer.publisher.address))
        sent = trainer.publisher.sent_bytes
        await late.pull()
        late.assert_has(published)
        assert trainer.publisher.sent_bytes == sent
        published = await trainer.step(0.01)
        assert (await late.pull()).num_deltas > 0
        late.assert_has(published)

    play(script)


def test_in_place_deltas_come_while_the_tensors_are_in_use_and_are_written_by_apply():
    async def script(stack):
        trainer = opened(stack, Trainer(full_every=4))
        engine = opened(stack, Engine(trainer.publisher.address, staging="in_place"))
        before = await trainer.step(1.0)
        await engine.pull()
        published = await trainer.step(0.01)
        assert await engine.subscriber.stage(after=0) == 1
        engine.assert_has(before)
        assert engine.subscriber.pulled.num_deltas > 0
        await trainer.publisher.close()  # nothing is left to be fetched
        engine.subscriber.apply()
        engine.assert_has(published)

    play(script)


def test_in_place_a_version_staged_and_never_applied_is_left_out():
    async def script(stack):
        trainer = opened(stack, Trainer())
        engine = opened(stack, Engine(trainer.publisher.address, staging="in_place"))
        for version, density in enumerate((1.0, 0.01, 0.01, 1.0, 0.01, 0.01)):
            published = await trainer.step(density)
            assert await engine.subscriber.stage(after=version - 1) == version
            if version not in (1, 3, 4):
                engine.subscriber.apply()
                engine.assert_has(published)

    play(script)


def test_weights_that_travel_in_fewer_bits_change_where_those_bits_do():
    async def script(stack):
        trainer = opened(stack, Trainer(dtype="bfloat16"))
        engine = opened(stack, Engine(trainer.publisher.address, dtype=torch.bfloat16))
        await trainer.step(1.0)
        await engine.pull()
        trainer.weights["embed"][5, 7] *= 3
        trainer.weights["embed"] *= 1 + 1e-7
        published = await trainer.step(0.0)
        assert (await engine.pull()).num_bytes < 0.01 * NUM_BYTES
        engine.assert_has(published)

    play(script)


def test_in_place_a_live_dtype_that_cannot_hold_the_bits_gets_no_deltas():
    async def script(stack):
        trainer = opened(stack, Trainer(dtype="float32"))
        engine = opened(stack, Engine(trainer.publisher.address, dtype=torch.bfloat16, staging="in_place"))
        for _ in range(3):
            published = await trainer.step(0.01)
            assert (await engine.pull()).num_deltas == 0
            engine.assert_has(published)

    play(script)


@pytest.mark.parametrize("transport", [SharedMemory, Tcp])
def test_a_delta_that_arrives_wrong_is_fetched_again_whole(transport):
    async def script(stack):
        flips = BitFlips(transport(), bucket=2, times=0)
        trainer = opened(stack, Trainer(transport=flips.name))
        engine = opened(stack, Engine(trainer.publisher.address, transport=flips))
        await trainer.step(0.01)
        await engine.pull()
        flips._times = flips.num_reads + 1
        published = await trainer.step(0.01)
        done = await engine.pull()
        assert done.repaired == [(0, 2)]
        assert done.num_bytes > 4000
        engine.assert_has(published)

    play(script)


def test_versions_staged_one_after_the_other_are_applied_together():
    async def script(stack):
        trainer = opened(stack, Trainer())
        engine = opened(stack, Engine(trainer.publisher.address))
        await trainer.step(0.01)
        await engine.pull()
        for version in range(1, 5):
            published = await trainer.step(0.01)
            assert await engine.subscriber.stage(after=version - 1) == version
            assert engine.subscriber.pulled.num_deltas > 0
        engine.subscriber.apply()
        engine.assert_has(published)
        engine.subscriber.apply()
        engine.assert_has(published)

    play(script)


def test_a_new_publisher_that_counts_its_versions_anew_sends_all():
    async def script(stack):
        first = opened(stack, Trainer())
        engine = opened(stack, Engine(first.publisher.address))
        await first.step(0.01)
        await engine.pull()
        await first.publisher.close()
        second = opened(stack, Trainer())
        engine.subscriber._sources.addresses[:] = [second.publisher.address]
        await second.step(1.0)
        published = await second.step(0.01)
        with pytest.raises(ConnectionError):
            await engine.pull()
        assert (await engine.pull()).num_deltas == 0
        engine.assert_has(published)

    play(script)


def test_after_the_fence_the_version_is_read_out_of_the_copy():
    async def script(stack):
        trainer = opened(stack, Trainer())
        engine = opened(stack, Engine(trainer.publisher.address))
        for density in (1.0, 0.01, 1.0):
            published = await trainer.step(density)
            await trainer.publisher.fence()
            kept = {name: tensor.clone() for name, tensor in trainer.weights.items()}
            for tensor in trainer.weights.values():
                tensor.zero_()
            await engine.pull()
            engine.assert_has(published)
            for name, tensor in trainer.weights.items():
                tensor.copy_(kept[name])

    play(script)


def test_a_reader_that_stands_still_does_not_hold_the_fence_up():
    async def script(stack):
        trainer = opened(stack, Trainer(patience_s=30.0))
        engine = opened(stack, Engine(trainer.publisher.address, staging="in_place"))
        published = await trainer.step(1.0)
        await engine.subscriber.stage(after=-1)  # holds the version until `apply`
        fenced = await trainer.publisher.fence()
        assert fenced["sync_stall_s"] < 5
        for tensor in trainer.weights.values():
            tensor.zero_()
        engine.subscriber.apply()
        engine.assert_has(published)

    play(script)


SPECS = [WeightSpec(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items() if shape]
ROWS = Manifest.sharded(SPECS, mesh_shape=(2,), placements={name: [Shard(0)] for name in ("embed", "norm", "proj")})
COLUMNS = Manifest.sharded(SPECS, mesh_shape=(2,), placements={name: [Shard(1)] for name in ("embed", "proj")})


def parts(manifest, rank, whole):
    return {spec.name: whole[spec.name][box.slices()].clone() for spec, box in manifest.held_by(rank)}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_ranks_send_deltas_to_two_ranks_that_are_cut_otherwise(transport):
    async def script(stack):
        draw = torch.Generator().manual_seed(0)
        whole = {spec.name: torch.randn(spec.shape, generator=draw) for spec in SPECS}
        trained = [parts(ROWS, rank, whole) for rank in (0, 1)]
        sides = [
            Publisher(
                trained[rank], token=TOKEN, manifest=ROWS, rank=rank, **over(transport, bucket_bytes=2048, delta=True)
            )
            for rank in (0, 1)
        ]
        addresses = [side.address for side in sides]
        live = [parts(COLUMNS, rank, {n: torch.zeros_like(t) for n, t in whole.items()}) for rank in (0, 1)]
        engines = [
            Subscriber(addresses, live[rank], token=TOKEN, manifest=COLUMNS, rank=rank, **over(transport))
            for rank in (0, 1)
        ]
        for side in [*sides, *engines]:
            stack.push_async_callback(side.close)
        for version in range(10):
            for name, tensor in whole.items():
                chosen = torch.rand(tensor.shape, generator=draw) < 0.02
                tensor[chosen] += 1
                for rank in (0, 1):
                    trained[rank][name].copy_(parts(ROWS, rank, whole)[name])
            for side, weights in zip(sides, trained):
                await side.publish(version, weights)
            for rank, engine in enumerate(engines):
                assert await engine.stage(after=version - 1) == version
                engine.apply()
                assert (engine.pulled.num_deltas > 0) == (version > 0)
                for name, wanted in parts(COLUMNS, rank, whole).items():
                    assert torch.equal(live[rank][name], wanted), (name, rank, version)
            for side in sides:
                await side.fence()

    play(script)

"""Subscribers that want the same buckets pass them on: the trainer sends each once."""

import asyncio
import time

import pytest
import torch
from transfer_samples import TOKEN, Watched, over, sync, weights_at

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer import Manifest, Publisher, Shard, Subscriber
from cosmos_rl_transfer.errors import Superseded
from cosmos_rl_transfer.planning.plan import plan
from cosmos_rl_transfer.planning.relay import Relay
from cosmos_rl_transfer.publish.holders import Directory, Partial
from cosmos_rl_transfer.transports.shm import SharedMemory
from cosmos_rl_transfer.transports.tcp import Tcp
from cosmos_rl_transfer.wire.messages import Holder

KINDS = {"shm": SharedMemory, "tcp": Tcp}
ROWS = 256


class Group:
    """A publisher of tensors in buckets of 2 KiB, and three subscribers of all of them."""

    def __init__(self, transport, *, relay: Relay = "on", see=None):
        self.trained = weights_at(0, rows=ROWS)
        self.publisher = Publisher(
            self.trained,
            token=TOKEN,
            settings=sync(transport=transport, bucket_bytes=2048, relay=relay, patience_s=0.5),
        )
        self.num_bytes = sum(tensor.nbytes for tensor in self.trained.values())
        self.lives = [{n: torch.zeros_like(t) for n, t in self.trained.items()} for _ in range(3)]
        kinds = [transport, Watched(KINDS[transport](), see) if see else transport, transport]
        self.subscribers = [
            Subscriber(self.publisher.address, live, token=TOKEN, **over(kind, timeout_s=10))
            for live, kind in zip(self.lives, kinds)
        ]

    async def publish(self, version):
        """Publish a version; returns how much was sent before."""
        await self.publisher.fence()
        for name, tensor in weights_at(version, rows=ROWS).items():
            self.trained[name].copy_(tensor)
        await self.publisher.publish(version, self.trained)
        return self.publisher.sent_bytes

    async def all_take(self, version, *, after=None):
        """Let all stage at once, apply, and compare."""
        after = version - 1 if after is None else after
        staged = await asyncio.gather(*(s.stage(after=after) for s in self.subscribers))
        assert staged == [version] * len(staged)
        for subscriber, live in zip(self.subscribers, self.lives):
            subscriber.apply()
            for name, tensor in weights_at(version, rows=ROWS).items():
                assert torch.equal(live[name], tensor), (name, version)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        for subscriber in self.subscribers:
            await subscriber.close()
        await self.publisher.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_trainer_sends_each_bucket_once_to_three_subscribers(transport):
    async def main():
        async with Group(transport) as group:
            await group.publish(0)
            await group.all_take(0)
            for version in (1, 2, 3):
                before = await group.publish(version)
                await group.all_take(version)
                assert group.num_bytes <= group.publisher.sent_bytes - before <= 1.1 * group.num_bytes

    asyncio.run(main())


@pytest.mark.parametrize("relay", ["auto", "off"])
def test_on_one_host_nobody_passes_on_unless_told(relay):
    async def main():
        async with Group("shm", relay=relay) as group:
            await group.publish(0)
            await group.all_take(0)
            before = await group.publish(1)
            await group.all_take(1)
            assert group.publisher.sent_bytes - before >= 3 * group.num_bytes

    asyncio.run(main())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_member_that_dies_in_the_middle_is_done_without(transport):
    async def main():
        armed = []

        def see(data, packed):
            if armed and data.bucket == 7:
                armed.pop().cancel()
            return packed

        async with Group(transport, see=see) as group:
            await group.publish(0)
            await group.all_take(0)
            await group.publish(1)
            dying, live = group.subscribers.pop(1), group.lives.pop(1)
            loop = asyncio.get_running_loop()
            task = asyncio.create_task(dying.stage(after=0))
            armed.append(Cancelling(task, loop))
            started = time.monotonic()
            others = asyncio.create_task(group.all_take(1))
            with pytest.raises(asyncio.CancelledError):
                await task
            await dying.close()
            await others
            assert time.monotonic() - started < 5
            assert all(torch.equal(live[n], t) for n, t in weights_at(0, rows=ROWS).items())

    asyncio.run(main())


class Cancelling:
    """Cancels a task from another thread."""

    def __init__(self, task, loop):
        self.task, self.loop = task, loop

    def cancel(self):
        self.loop.call_soon_threadsafe(self.task.cancel)


def test_a_member_that_does_not_take_part_costs_a_second_at_most():
    async def main():
        async with Group("tcp") as group:
            await group.publish(0)
            await group.all_take(0)
            idle, _ = group.subscribers.pop(1), group.lives.pop(1)
            await group.publish(1)
            started = time.monotonic()
            await group.all_take(1)
            assert time.monotonic() - started < 4
            assert await idle.stage(after=0) == 1
            await idle.close()

    asyncio.run(main())


def test_rings_of_two_ranks_each_read_two_publishers():
    specs = [WeightSpec(name=n, shape=(64, 32), dtype="float32") for n in ("a", "b")]
    source = Manifest.sharded(specs, mesh_shape=(2,), placements={n: [Shard(0)] for n in "ab"})
    target = Manifest.sharded(specs, mesh_shape=(2,), placements={n: [Shard(1)] for n in "ab"})

    def whole_at(version):
        draw = torch.Generator().manual_seed(version)
        return {spec.name: torch.randn(spec.shape, generator=draw) for spec in specs}

    def parts(whole, manifest, rank):
        return {spec.name: whole[spec.name][box.slices()].clone() for spec, box in manifest.held_by(rank)}

    async def main():
        trained = [parts(whole_at(0), source, rank) for rank in (0, 1)]
        sending = [
            Publisher(
                part,
                token=TOKEN,
                manifest=source,
                rank=rank,
                settings=sync(bucket_bytes=512, relay="on", delta=rank == 0),
            )
            for rank, part in enumerate(trained)
        ]
        lives = [(rank, parts(whole_at(9), target, rank)) for rank in (0, 1, 0, 1)]
        receiving = [
            Subscriber(
                [p.address for p in sending], live, token=TOKEN, manifest=target, rank=rank, settings=sync(timeout_s=10)
            )
            for rank, live in lives
        ]
        for version in range(4):
            for rank, publisher in enumerate(sending):
                await publisher.fence()
                for name, tensor in parts(whole_at(version), source, rank).items():
                    trained[rank][name].copy_(tensor)
                await publisher.publish(version, trained[rank])
            before = sum(p.sent_bytes for p in sending)
            await asyncio.gather(*(s.stage(after=version - 1) for s in receiving))
            for (rank, live), subscriber in zip(lives, receiving):
                subscriber.apply()
                for name, tensor in parts(whole_at(version), target, rank).items():
                    assert torch.equal(live[name], tensor)
            if version:
                assert sum(p.sent_bytes for p in sending) - before <= 1.1 * 2 * 64 * 32 * 4
        for side in [*receiving, *sending]:
            await side.close()

    asyncio.run(main())


def test_a_ring_is_the_same_for_all_while_a_version_travels_and_pays_with_more_hosts_only():
    directory = Directory("auto")
    for owner, address in enumerate(("b:1", "a:1", "a:2")):
        directory.enter(owner, 3, Holder("layout", 0, address, "plan"))
    directory.enter(9, 3, Holder("layout", 1, "c:1", "plan"))
    assert directory.ring(0, 4) == ("a:1", "a:2", "b:1")
    directory.leave(1)
    assert directory.ring(2, 4) == ("a:1", "a:2", "b:1")
    assert directory.ring(1, 4) == directory.ring(9, 4) == ()
    assert directory.ring(2, 5) == ("a:2", "b:1")
    directory.num_hosts = 2
    assert directory.ring(2, 6) == ()


def test_a_bucket_can_be_had_when_it_has_landed_and_not_after_the_end():
    manifest = Manifest.whole([WeightSpec(name="w", shape=(64,), dtype="float32")])
    made = plan(manifest, manifest, bucket_bytes=64, relay="off")
    first, second = made.stream(0, 0)[:2]
    partial = Partial()
    partial.set_plan(made, 0)
    assert partial.stream(made.digest, 0) == made.stream(0, 0)
    assert partial.stream("another", 0) is None
    partial.begin(4)
    partial.landed(first)
    partial.wait(4, first, timeout_s=0.01)
    with pytest.raises(Superseded, match="bucket 1 of version 4"):
        partial.wait(4, second, timeout_s=0.01)
    assert partial.complete(4)
    partial.wait(4, second, timeout_s=0.01)
    partial.end()
    with pytest.raises(Superseded):
        partial.wait(4, first, timeout_s=5)
    assert not partial.is_whole

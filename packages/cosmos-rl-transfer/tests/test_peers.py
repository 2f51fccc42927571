"""Subscribers that come late read from others; the trainer sends nothing for them."""

import asyncio
import gc
import threading
import time
import weakref
from contextlib import asynccontextmanager

import pytest
import torch
from transfer_samples import TOKEN, BitFlips, Pair, Watched, assert_version, blank, over, sync, weights_at

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer import Manifest, PeerLost, Publisher, Shard, Subscriber
from cosmos_rl_transfer.planning.plan import plan
from cosmos_rl_transfer.publish.holders import Directory
from cosmos_rl_transfer.pull.peers import choices
from cosmos_rl_transfer.pull.sources import Feed, Sources
from cosmos_rl_transfer.pull.two_phase import ReplicaMember, ReplicaSubscriber
from cosmos_rl_transfer.transports.shm import SharedMemory
from cosmos_rl_transfer.transports.tcp import Tcp
from cosmos_rl_transfer.wire.messages import Holder, Holders

TRANSPORTS = ["shm", "tcp"]
SPECS = [
    WeightSpec(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
    for name, t in weights_at(0).items()
]
COLUMNS = Manifest.sharded(SPECS, mesh_shape=(2,), placements={"embed": [Shard(1)], "proj": [Shard(0)]})


def part_of(whole, manifest, rank):
    """Return what a rank holds, as tensors of its own."""
    return {spec.name: whole[spec.name][box.slices()].clone() for spec, box in manifest.held_by(rank)}


@asynccontextmanager
async def joiner(pair, transport="auto", **options):
    """One more subscriber of the pair's publisher, with tensors of its own."""
    live = blank()
    subscriber = Subscriber(
        pair.publisher.address, live, token=TOKEN, **over(transport, **{"timeout_s": 10, **options})
    )
    try:
        yield subscriber, live
    finally:
        await subscriber.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fenced", [False, True])
def test_a_late_joiner_takes_the_version_from_another_and_the_trainer_sends_nothing(transport, fenced):
    async def main():
        async with Pair(transport) as pair:
            await pair.publish(3)
            await pair.subscriber.stage(after=-1)
            sent = pair.publisher.sent_bytes
            assert sent >= sum(tensor.nbytes for tensor in pair.live.values())
            if fenced:
                await pair.publisher.fence()
                pair.trained["embed"].zero_()
            async with joiner(pair, transport=transport) as (late, live):
                assert await late.stage(after=-1) == 3
                late.apply()
                assert_version(live, 3)
            assert pair.publisher.sent_bytes == sent

    asyncio.run(main())


def test_a_joiner_serves_the_next_one_and_takes_the_next_version_from_the_trainer():
    async def main():
        async with Pair("shm") as pair:
            await pair.publish(0)
            await pair.subscriber.stage(after=-1)
            async with joiner(pair) as (second, live):
                await second.stage(after=-1)
                await pair.subscriber.close()
                sent = pair.publisher.sent_bytes
                async with joiner(pair) as (third, other):
                    assert await third.stage(after=-1) == 0
                    third.apply()
                    assert_version(other, 0)
                    assert pair.publisher.sent_bytes == sent
                await pair.publish(1)
                assert await second.stage(after=0) == 1
                second.apply()
                assert_version(live, 1)
                assert pair.publisher.sent_bytes > sent

    asyncio.run(main())


def test_ranks_of_a_replica_feed_one_of_another_layout_in_the_dtype_that_travels():
    async def main():
        whole = weights_at(5)
        publisher = Publisher(whole, token=TOKEN, settings=sync(bucket_bytes=512, dtype="bfloat16"))
        await publisher.publish(5, whole)
        ranks = [
            Subscriber(publisher.address, part_of(blank(), COLUMNS, rank), token=TOKEN, manifest=COLUMNS, rank=rank)
            for rank in (0, 1)
        ]
        for subscriber in ranks:
            await subscriber.stage(after=-1)
        await publisher.fence()
        sent = publisher.sent_bytes
        live = blank()
        late = Subscriber(publisher.address, live, token=TOKEN)
        assert await late.stage(after=-1) == 5
        late.apply()
        assert publisher.sent_bytes == sent
        for name, tensor in whole.items():
            travelled = tensor.bfloat16().to(tensor.dtype) if tensor.is_floating_point() else tensor
            assert torch.equal(live[name], travelled)
        for side in [late, *ranks, publisher]:
            await side.close()

    asyncio.run(main())


def test_a_connection_to_a_peer_is_forgotten_once_it_is_dropped():
    async def main():
        async with Pair("tcp") as pair:
            sources = Sources(pair.publisher.address, token=TOKEN, timeout_s=10)
            dropped, kept = (sources.open(pair.publisher.address, timeout_s=10) for _ in range(2))
            gone = weakref.ref(dropped.link)
            sources.drop(dropped)
            del dropped
            gc.collect()
            assert gone() is None
            assert kept.find_holders(-1).version == -1
            sources.close()
            with pytest.raises(PeerLost):
                kept.find_holders(-1)

    asyncio.run(main())


def test_a_rank_reads_from_a_replica_that_holds_more_than_it_needs():
    async def main():
        async with Pair("tcp") as pair:
            await pair.publish(2)
            await pair.subscriber.stage(after=-1)
            await pair.publisher.fence()
            live = part_of(blank(), COLUMNS, 1)
            late = Subscriber(pair.publisher.address, live, token=TOKEN, manifest=COLUMNS, rank=1)
            assert await late.stage(after=-1) == 2
            late.apply()
            for name, tensor in part_of(weights_at(2), COLUMNS, 1).items():
                assert torch.equal(live[name], tensor)
            await late.close()

    asyncio.run(main())


def test_a_replica_that_comes_late_reads_from_another_while_the_trainer_writes():
    async def main():
        async with Pair("shm") as pair:
            await pair.publish(4)
            await pair.subscriber.stage(after=-1)
            await pair.publisher.fence()
            sent = pair.publisher.sent_bytes
            together = ReplicaSubscriber(pair.publisher.address, token=TOKEN, num_ranks=2, timeout_s=5)
            lives = [part_of(blank(), COLUMNS, rank) for rank in (0, 1)]
            ranks = [
                Subscriber(
                    pair.publisher.address, live, token=TOKEN, manifest=COLUMNS, rank=rank, settings=sync(timeout_s=5)
                )
                for rank, live in enumerate(lives)
            ]
            members = [ReplicaMember(together.address, s, token=TOKEN, rank=rank) for rank, s in enumerate(ranks)]
            assert await together.stage(after=-1) == 4
            together.apply()
            for rank, live in enumerate(lives):
                assert all(torch.equal(live[n], t) for n, t in part_of(weights_at(4), COLUMNS, rank).items())
            assert pair.publisher.sent_bytes == sent
            await together.close()
            for member, subscriber in zip(members, ranks):
                await asyncio.to_thread(member.close)
                await subscriber.close()

    asyncio.run(main())


def test_a_holder_that_is_gone_is_passed_over():
    async def main():
        async with Pair("tcp") as pair:
            await pair.publish(0)
            liar = Feed.open(pair.publisher.address, token=TOKEN, timeout_s=5)
            made = plan(liar.source, liar.source, bucket_bytes=2048)
            liar.join(made, target=liar.source, rank=0, transport="tcp", memory=[])
            liar.holds(7, "127.0.0.1:1")
            assert liar.find_holders(-1).version == 7  # it is in the directory
            async with joiner(pair) as (late, live):
                assert await late.stage(after=-1) == 0
                late.apply()
                assert_version(live, 0)
            liar.close()

    asyncio.run(main())


def test_what_arrives_wrong_from_a_peer_is_taken_from_the_trainer():
    async def main():
        async with Pair("tcp") as pair:
            await pair.publish(0)
            await pair.subscriber.stage(after=-1)
            flips = BitFlips(Tcp(), bucket=2, times=2)
            async with joiner(pair, transport=flips) as (late, live):
                assert await late.stage(after=-1) == 0
                late.apply()
                assert_version(live, 0)
                assert flips.num_reads == 3

    asyncio.run(main())


@pytest.mark.parametrize("transport", [SharedMemory, Tcp])
def test_a_joiner_that_stands_still_does_not_hold_its_peer_up_and_gets_the_newest(transport):
    async def main():
        reading, go_on = threading.Event(), threading.Event()

        def stop(data, packed):
            reading.set()
            assert go_on.wait(20)
            return packed

        async with Pair(transport.name) as pair:
            await pair.publish(0)
            await pair.subscriber.stage(after=-1)
            async with joiner(pair, transport=Watched(transport(), stop)) as (late, live):
                staging = asyncio.create_task(late.stage(after=-1))
                assert await asyncio.to_thread(reading.wait, 10)
                await pair.publish(1)
                started = time.monotonic()
                assert await pair.subscriber.stage(after=0) == 1
                assert time.monotonic() - started < 2
                go_on.set()
                assert await staging == 1
                late.apply()
                assert_version(live, 1)

    asyncio.run(main())


@pytest.mark.parametrize(("holding", "joining"), [({"staging": "in_place"}, {}), ({}, {"staging": "in_place"})])
def test_without_a_shadow_on_both_sides_the_trainer_is_read(holding, joining):
    async def main():
        async with Pair("shm") as pair, joiner(pair, **holding) as (first, _):
            await pair.publish(0)
            await first.stage(after=-1)
            first.apply()
            sent = pair.publisher.sent_bytes
            async with joiner(pair, **joining) as (late, live):
                await late.stage(after=-1)
                late.apply()
                assert_version(live, 0)
            assert pair.publisher.sent_bytes == 2 * sent

    asyncio.run(main())


def test_the_directory_names_who_was_asked_least_and_forgets_who_left():
    directory = Directory()
    old, first, second, other = (Holder("layout", rank, f"host:{i}") for i, rank in enumerate((0, 0, 0, 1)))
    for owner, (version, holder) in enumerate([(3, old), (4, first), (4, second), (4, other)]):
        directory.enter(owner, version, holder)
    assert directory.find(3) == Holders(4, (first, second, other))
    assert directory.find(3) == Holders(4, (second, first, other))
    assert directory.find(4) == Holders(-1, ())
    for owner in (1, 2, 3):
        directory.leave(owner)
    assert directory.find(-1) == Holders(3, (old,))


def test_a_twin_is_asked_alone_and_before_ranks_of_another_layout():
    held = [("cut", 0, "a"), ("mine", 1, "b"), ("cut", 1, "c"), ("mine", 0, "d"), ("cut", 0, "e")]
    found = Holders(4, tuple(Holder(*each) for each in held))
    assert list(choices(found, layout="mine", rank=1)) == [{1: "b"}, {0: "a", 1: "c"}, {0: "e", 1: "c"}]


def halves(names=("w", "b")):
    """Two source ranks: each holds half of `w`, both hold `b`."""
    specs = [WeightSpec(name=name, shape=(6, 4), dtype="float32") for name in names]
    return Manifest.sharded(specs, mesh_shape=(2,), placements={"w": [Shard(0)]})


async def two_publishers(manifest, transport):
    whole = {name: torch.randn(spec.shape) for name, spec in manifest.specs.items()}
    parts = [part_of(whole, manifest, rank) for rank in (0, 1)]
    sending = [
        Publisher(part, token=TOKEN, manifest=manifest, rank=rank, settings=sync(transport=transport, bucket_bytes=64))
        for rank, part in enumerate(parts)
    ]
    live = {name: torch.zeros(spec.shape) for name, spec in manifest.specs.items()}
    subscriber = Subscriber(
        [p.address for p in sending], live, token=TOKEN, settings=sync(transport=transport, timeout_s=5)
    )
    return whole, parts, sending, subscriber, live


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_copy_of_what_a_lost_publisher_held_is_used_instead(transport):
    async def main():
        made = await two_publishers(halves(names=("b",)), transport)
        whole, parts, sending, subscriber, live = made
        for publisher, part in zip(sending, parts):
            await publisher.publish(0, part)
        await subscriber.stage(after=-1)
        await sending[0].close()
        await sending[1].publish(1, parts[1])
        assert await subscriber.stage(after=0) == 1
        subscriber.apply()
        assert all(torch.equal(live[name], tensor) for name, tensor in whole.items())
        await subscriber.close()
        await sending[1].close()

    asyncio.run(main())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_lost_publisher_without_copies_is_named_and_what_was_staged_stays(transport):
    async def main():
        whole, parts, sending, subscriber, live = await two_publishers(halves(), transport)
        for publisher, part in zip(sending, parts):
            await publisher.publish(0, part)
        await subscriber.stage(after=-1)
        await sending[0].close()
        with pytest.raises(PeerLost, match=r"source ranks \[0\] are gone, the others do not hold everything: .*w"):
            await subscriber.stage(after=0)
        subscriber.apply()
        assert all(torch.equal(live[name], tensor) for name, tensor in whole.items())
        await subscriber.close()
        await sending[1].close()

    asyncio.run(main())

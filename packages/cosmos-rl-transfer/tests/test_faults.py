import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from transfer_samples import TOKEN, BitFlips, Pair, assert_version, blank, sync, weights_at

from cosmos_rl_transfer import (
    AuthenticationError,
    LayoutError,
    PeerLost,
    Publisher,
    Subscriber,
    TransferError,
    WeightMismatch,
)
from cosmos_rl_transfer.pull.sources import Feed
from cosmos_rl_transfer.transports.shm import SharedMemory
from cosmos_rl_transfer.transports.tcp import Tcp
from cosmos_rl_transfer.wire.messages import SubscriberJoin, TransferRefused

TRANSPORTS = ["shm", "tcp"]


@pytest.mark.parametrize("transport", [SharedMemory, Tcp])
def test_a_flipped_bit_is_noticed_and_the_bucket_alone_fetched_again(transport, caplog):
    async def main():
        flips = BitFlips(transport(), bucket=2, times=1)
        async with Pair(transport.name, reading=flips) as pair:
            await pair.publish(0)
            assert await pair.subscriber.stage(after=-1) == 0
            pair.subscriber.apply()
            assert_version(pair.live, 0)
            assert flips.num_reads == 2
        assert caplog.messages == ["bucket 2 of version 0 arrived wrong from rank 0"]

    asyncio.run(main())


@pytest.mark.parametrize("transport", [SharedMemory, Tcp])
def test_lasting_corruption_raises_and_leaves_the_live_tensors_alone(transport):
    async def main():
        async with Pair(transport.name, reading=BitFlips(transport(), bucket=2, times=99)) as pair:
            await pair.publish(7)
            with pytest.raises(WeightMismatch, match=r"embed of version 7 .*rank 0 at rank 0 \(bucket 2\)"):
                await pair.subscriber.stage(after=-1)
            assert not any(tensor.any() for tensor in pair.live.values())
            with pytest.raises(TransferError, match="nothing is staged"):
                pair.subscriber.apply()

    asyncio.run(main())


class Stalling:
    """A transport whose subscriber stops in the middle of a bucket until it is let go."""

    def __init__(self, inner):
        self.inner, self.name = inner, inner.name
        self.reading, self.go_on = threading.Event(), threading.Event()

    def attach(self, link, *, offer, memory):
        self.inlet = self.inner.attach(link, offer=offer, memory=memory)
        self.views, self.over_link = self.inlet.views, self.inlet.over_link
        return self

    def receive(self, data, *, out):
        self.reading.set()
        assert self.go_on.wait(20)
        return self.inlet.receive(data, out=out)

    def close(self):
        self.inlet.close()


async def stalled(pair, stalling):
    """Publish version 0 and return the stage of a subscriber that stands still in it."""
    await pair.publish(0)
    staging = asyncio.create_task(pair.subscriber.stage(after=-1))
    assert await asyncio.to_thread(stalling.reading.wait, 10)
    return staging


@pytest.mark.parametrize("transport", [SharedMemory, Tcp])
def test_a_slow_reader_holds_the_fence_for_its_patience_and_gets_its_version_all_the_same(transport):
    async def main():
        stalling = Stalling(transport())
        async with Pair(transport.name, reading=stalling, patience_s=0.3) as pair:
            staging = await stalled(pair, stalling)
            started = time.monotonic()
            metrics = await pair.publisher.fence()
            assert 0.3 <= time.monotonic() - started < 3
            assert 0 < metrics["sync_copied_bytes"] <= sum(t.nbytes for t in pair.live.values()) + 1024
            for tensor in pair.trained.values():
                tensor.zero_()
            stalling.go_on.set()
            assert await staging == 0
            pair.subscriber.apply()
            assert_version(pair.live, 0)

    asyncio.run(main())


def test_large_buckets_that_wait_to_be_sent_are_of_the_version_that_was_asked_for():
    """A subscriber that stands still keeps some buckets in the publisher's queue while the optimizer writes."""

    async def main():
        weights = {f"w{i}": torch.full((1 << 20,), float(i)) for i in range(8)}
        live = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        stalling = Stalling(Tcp())
        publisher = Publisher(
            weights, token=TOKEN, settings=sync(transport="tcp", bucket_bytes=4 << 20, patience_s=0.1)
        )
        subscriber = Subscriber(publisher.address, live, token=TOKEN, transport=stalling, settings=sync(timeout_s=10))
        await publisher.publish(0, weights)
        staging = asyncio.create_task(subscriber.stage(after=-1))
        assert await asyncio.to_thread(stalling.reading.wait, 10)
        assert (await publisher.fence())["sync_copied_bytes"] > 0
        for tensor in weights.values():
            tensor.fill_(-1.0)
        stalling.go_on.set()
        assert await staging == 0
        subscriber.apply()
        assert all(torch.equal(live[f"w{i}"], torch.full((1 << 20,), float(i))) for i in range(8))
        await subscriber.close()
        await publisher.close()

    asyncio.run(main())


@pytest.mark.parametrize("transport", [SharedMemory, Tcp])
def test_a_reader_that_is_overtaken_takes_the_newest_instead(transport):
    async def main():
        stalling = Stalling(transport())
        async with Pair(transport.name, reading=stalling, patience_s=0.05) as pair:
            staging = await stalled(pair, stalling)
            for version in (1, 2):
                await pair.publish(version)
            stalling.go_on.set()
            assert await staging == 2
            pair.subscriber.apply()
            assert_version(pair.live, 2)

    asyncio.run(main())


def test_a_reader_that_stands_still_does_not_keep_others_from_reading():
    async def main():
        stalling = Stalling(SharedMemory())
        async with Pair("shm", reading=stalling, patience_s=0.1) as pair:
            staging = await stalled(pair, stalling)
            live = blank()
            other = Subscriber(pair.publisher.address, live, token=TOKEN)
            assert await other.stage(after=-1) == 0
            other.apply()
            assert_version(live, 0)
            stalling.go_on.set()
            assert await staging == 0  # its slots were taken away: what it read was wrong and was fetched again
            pair.subscriber.apply()
            assert_version(pair.live, 0)
            await other.close()

    asyncio.run(main())


def test_a_reader_that_stands_still_keeps_its_slots_while_nobody_else_wants_them():
    async def main():
        weights, stalling = {"w": torch.arange(16384.0)}, Stalling(SharedMemory())
        publisher = Publisher(weights, token=TOKEN, settings=sync(transport="shm", bucket_bytes=4096))
        live = {"w": torch.zeros(16384)}
        subscriber = Subscriber(publisher.address, live, token=TOKEN, transport=stalling)
        await publisher.publish(0, weights)
        staging = asyncio.create_task(subscriber.stage(after=-1))
        assert await asyncio.to_thread(stalling.reading.wait, 10)
        await asyncio.sleep(0.7)  # longer than others would have to wait
        stalling.go_on.set()
        assert await staging == 0
        assert subscriber.pulled.repaired == []
        await subscriber.close()
        await publisher.close()

    asyncio.run(main())


def test_a_cancelled_stage_ends_at_once_and_the_next_one_works():
    async def main():
        async with Pair("shm") as pair:
            waiting = asyncio.create_task(pair.subscriber.stage(after=-1))
            await asyncio.sleep(0.1)
            started = time.monotonic()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert time.monotonic() - started < 2
            await pair.publish(0)
            assert await pair.subscriber.stage(after=-1) == 0

    asyncio.run(main())


def test_closing_the_publisher_ends_a_waiting_stage():
    async def main():
        async with Pair("shm") as pair:
            waiting = asyncio.create_task(pair.subscriber.stage(after=-1))
            await asyncio.sleep(0.1)
            await pair.publisher.close()
            with pytest.raises(PeerLost):
                await waiting

    asyncio.run(main())


def test_a_wrong_token_is_refused():
    async def main():
        async with Pair("shm") as pair:
            stranger = Subscriber(pair.publisher.address, blank(), token=b"guess")
            with pytest.raises(AuthenticationError, match="token"):
                await stranger.stage(after=-1)
            await stranger.close()

    asyncio.run(main())


def test_names_that_do_not_match_are_listed():
    async def main():
        async with Pair("shm") as pair:
            live = {f"layer{i}": torch.zeros(2) for i in range(7)}
            other = Subscriber(pair.publisher.address, live, token=TOKEN)
            with pytest.raises(LayoutError, match="lacks layer0, layer1, layer2, layer3, layer4 and 2 more"):
                await other.stage(after=-1)
            await other.close()

    asyncio.run(main())


def test_a_plan_with_another_digest_is_refused():
    async def main():
        async with Pair("shm") as pair:
            feed = Feed.open(pair.publisher.address, token=TOKEN, timeout_s=5)
            feed.link.send(SubscriberJoin(feed.welcome.source, 0, "0" * 64))
            reply = feed.link.receive()
            assert isinstance(reply, TransferRefused)
            assert "the plans differ" in reply.reason and "000000000000" in reply.reason
            feed.close()

    asyncio.run(main())


class Child:
    """Another process that plays one side; it answers on its standard output."""

    def __init__(self, *arguments):
        script = Path(__file__).with_name("support") / "transfer_peer_process.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def line(self):
        return self.process.stdout.readline().strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(10)
        self.process.stdout.close()


@pytest.mark.ci
def test_a_hundred_versions_reach_another_process_bit_exact_over_each_transport():
    async def main():
        weights = weights_at(0)
        publishers = [
            Publisher(weights, token=TOKEN, settings=sync(transport=name, bucket_bytes=2048)) for name in TRANSPORTS
        ]
        with Child("follow", *(p.address for p in publishers)) as child:
            for version in range(100):
                for publisher in publishers:
                    await publisher.fence()
                for name, tensor in weights_at(version).items():
                    weights[name].copy_(tensor)
                for publisher in publishers:
                    await publisher.publish(version, weights)
                heard = {await asyncio.to_thread(child.line) for _ in publishers}
                assert heard == {f"shm exact {version}", f"tcp exact {version}"}
        for publisher in publishers:
            await publisher.close()

    asyncio.run(main())


def test_a_subscriber_killed_while_it_reads_does_not_hold_the_publisher_up():
    async def main():
        publisher = Publisher(weights_at(0), token=TOKEN, settings=sync(transport="shm", patience_s=30))
        await publisher.publish(0, weights_at(0))
        with Child("stall", publisher.address) as child:
            assert await asyncio.to_thread(child.line) == "reading"
            child.process.kill()
            started = time.monotonic()
            for version in range(1, 5):
                await publisher.fence()
                await publisher.publish(version, weights_at(version))
            assert time.monotonic() - started < 2
        await publisher.close()

    asyncio.run(main())


def test_a_killed_publisher_is_noticed_within_two_seconds_over_each_transport():
    async def follow(address, transport):
        live = blank()
        subscriber = Subscriber(address, live, token=TOKEN, settings=sync(transport=transport))
        assert await subscriber.stage(after=-1) == 0
        return subscriber, live, asyncio.create_task(subscriber.stage(after=0))

    async def main():
        with Child("publish", *TRANSPORTS) as child:
            addresses = [await asyncio.to_thread(child.line) for _ in TRANSPORTS]
            followers = [await follow(*pair) for pair in zip(addresses, TRANSPORTS)]
            child.process.kill()
            started = time.monotonic()
            for subscriber, live, waiting in followers:
                with pytest.raises(PeerLost):
                    await waiting
                assert time.monotonic() - started < 2
                subscriber.apply()  # what was staged and verified before is still good
                assert_version(live, 0)
                await subscriber.close()

    asyncio.run(main())

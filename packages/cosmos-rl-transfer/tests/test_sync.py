import asyncio

import pytest
import torch
from transfer_samples import TOKEN, Pair, assert_version, blank, sync, weights_at

from cosmos_rl_transfer import (
    LayoutError,
    Publisher,
    Subscriber,
    TransferError,
    WeightMismatch,
)
from cosmos_rl_transfer.pull.subscriber import prove

TRANSPORTS = ["shm", "tcp"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_published_version_arrives_bit_exact(transport):
    async def main():
        async with Pair(transport) as pair:
            metrics = await pair.publish(0)
            assert await pair.subscriber.stage(after=-1) == 0
            pair.subscriber.apply()
            assert_version(pair.live, 0)
            assert metrics["sync_bytes"] == sum(t.nbytes for t in pair.live.values())
            assert metrics["sync_s"] > 0

    asyncio.run(main())


def test_staging_leaves_the_live_tensors_alone_until_apply():
    async def main():
        async with Pair("shm") as pair:
            await pair.publish(0)
            await pair.subscriber.stage(after=-1)
            assert not any(tensor.any() for tensor in pair.live.values())

    asyncio.run(main())


def test_apply_without_a_staged_version_says_what_to_do():
    async def main():
        async with Pair("shm") as pair:
            with pytest.raises(TransferError, match=r"await stage\(\) first"):
                pair.subscriber.apply()

    asyncio.run(main())


def test_stage_takes_the_newest_version():
    async def main():
        async with Pair("shm") as pair:
            for version in range(5):
                await pair.publish(version)
            assert await pair.subscriber.stage(after=1) == 4
            pair.subscriber.apply()
            assert_version(pair.live, 4)

    asyncio.run(main())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_version_seen_is_whole_while_the_trainer_publishes_and_changes_weights(transport):
    async def train(pair):
        for version in range(60):
            await pair.publisher.fence()
            for tensor in pair.trained.values():
                tensor.zero_()  # what an optimizer may do as soon as the fence is down
            await pair.publish(version)
            await asyncio.sleep(0.002)

    async def main():
        async with Pair(transport) as pair:
            training, version, seen = asyncio.create_task(train(pair)), -1, 0
            while version < 59:
                version = await pair.subscriber.stage(after=version)
                pair.subscriber.apply()
                assert_version(pair.live, version)
                seen += 1
            await training
            assert seen > 1

    asyncio.run(main())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_subscriber_without_a_shadow_pulls_into_its_live_tensors(transport):
    async def main():
        async with Pair(transport, staging="in_place") as pair:
            for version in range(3):
                await pair.publish(version)
                assert await pair.subscriber.stage(after=version - 1) == version
                changing = asyncio.create_task(pair.publisher.fence())  # waits for the borrowed version
                await asyncio.to_thread(pair.subscriber.apply)
                assert (await changing)["sync_copied_bytes"] == 0
                assert_version(pair.live, version)

    asyncio.run(main())


def test_a_version_borrowed_in_place_outlives_the_fence():
    async def main():
        async with Pair("shm", staging="in_place", patience_s=0.05) as pair:
            await pair.publish(0)
            await pair.subscriber.stage(after=-1)
            metrics = await pair.publish(1)
            assert metrics["sync_copied_bytes"] >= sum(t.nbytes for t in pair.live.values())
            pair.subscriber.apply()
            assert_version(pair.live, 0)

    asyncio.run(main())


def test_large_tensors_travel_without_a_copy_and_small_ones_packed():
    async def main():
        weights = {"large": torch.randn(1024, 1024), "cast": torch.randn(300, 400).T, "small": torch.randn(9)}
        live = {name: torch.zeros(tensor.shape) for name, tensor in weights.items()}
        publisher = Publisher(weights, token=TOKEN, settings=sync(transport="tcp", bucket_bytes=1 << 20))
        subscriber = Subscriber(publisher.address, live, token=TOKEN)
        await publisher.publish(0, weights)
        await subscriber.stage(after=-1)
        subscriber.apply()
        assert all(torch.equal(live[name], weights[name]) for name in weights)
        await subscriber.close()
        await publisher.close()

    asyncio.run(main())


def test_weights_travel_in_the_wire_dtype_and_land_in_the_live_dtype():
    async def main():
        weights = {"w": torch.randn(33, 17), "steps": torch.tensor(2**40 + 1)}
        live = {"w": torch.zeros(33, 17, dtype=torch.float64), "steps": torch.tensor(0)}
        publisher = Publisher(weights, token=TOKEN, settings=sync(dtype="bfloat16"))
        subscriber = Subscriber(publisher.address, live, token=TOKEN)
        assert (await publisher.publish(3, weights))["sync_bytes"] == 33 * 17 * 2 + 8
        await subscriber.stage(after=0)
        subscriber.apply()
        assert torch.equal(live["w"], weights["w"].bfloat16().double())
        assert live["steps"] == weights["steps"]
        await subscriber.close()
        await publisher.close()

    asyncio.run(main())


def test_tensors_no_wider_than_the_wire_dtype_arrive_bit_for_bit():
    """All 256 patterns of each float8, NaN payloads among them, and float16, which has bits that bfloat16 lacks."""

    async def main():
        patterns = torch.arange(256, dtype=torch.uint8)
        weights = {str(dtype): patterns.view(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
        weights["half"] = torch.randn(64).half()
        live = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        publisher = Publisher(weights, token=TOKEN, settings=sync(dtype="bfloat16"))
        subscriber = Subscriber(publisher.address, live, token=TOKEN)
        assert (await publisher.publish(0, weights))["sync_bytes"] == 256 + 256 + 64 * 2
        await subscriber.stage(after=-1)
        subscriber.apply()
        assert all(torch.equal(live[name].view(torch.uint8), w.view(torch.uint8)) for name, w in weights.items())
        await subscriber.close()
        await publisher.close()

    asyncio.run(main())


def test_transposed_frozen_and_empty_tensors_travel():
    async def main():
        base = torch.randn(6, 10)
        weights = {"t": base.T, "frozen": torch.nn.Parameter(torch.randn(5)), "empty": torch.zeros(0, 4)}
        live = {"t": torch.zeros(10, 6), "frozen": torch.nn.Parameter(torch.zeros(5)), "empty": torch.zeros(0, 4)}
        publisher = Publisher(weights, token=TOKEN)
        subscriber = Subscriber(publisher.address, live, token=TOKEN)
        await publisher.publish(0, weights)
        await subscriber.stage(after=-1)
        subscriber.apply()
        assert torch.equal(live["t"], base.T)
        assert torch.equal(live["frozen"], weights["frozen"])
        await subscriber.close()
        await publisher.close()

    asyncio.run(main())


def test_several_subscribers_follow_one_publisher():
    async def main():
        async with Pair("shm") as pair:
            other = blank()
            second = Subscriber(pair.publisher.address, other, token=TOKEN, settings=sync(transport="tcp"))
            await pair.publish(0)
            assert await asyncio.gather(pair.subscriber.stage(after=-1), second.stage(after=-1)) == [0, 0]
            second.apply()
            assert_version(other, 0)
            await second.close()

    asyncio.run(main())


def test_versions_must_rise():
    async def main():
        async with Pair("shm") as pair:
            await pair.publish(3)
            with pytest.raises(ValueError, match="version 3 is not newer than the published 3"):
                await pair.publish(3)

    asyncio.run(main())


def test_publishing_other_tensors_than_at_the_start_is_an_error():
    async def main():
        async with Pair("shm") as pair:
            with pytest.raises(LayoutError, match="extra"):
                await pair.publisher.publish(0, weights_at(0) | {"extra": torch.zeros(1)})
            with pytest.raises(LayoutError, match="norm"):
                await pair.publisher.publish(0, weights_at(0) | {"norm": torch.zeros(8)})

    asyncio.run(main())


@pytest.mark.parametrize("staging", ["shadow", "in_place"])
def test_live_tensors_are_proven_to_be_the_published_ones(staging):
    async def main():
        async with Pair("tcp", staging=staging) as pair:
            for version in range(2):
                await pair.publish(version)
                assert await pair.subscriber.stage(after=version - 1) == version
                pair.subscriber.apply()
                prove(pair.subscriber)
            name, tensor = next((name, one) for name, one in pair.live.items() if one.is_floating_point())
            tensor.view(-1)[0] += 1.0  # as an engine that clears or moves what it was sent
            with pytest.raises(WeightMismatch, match=rf"1 live tensors are not those of version 1: {name}"):
                prove(pair.subscriber)

    asyncio.run(main())

"""Weights on a (pretend) GPU: copies on a side stream, one copy a version, one event wait a bucket."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transfer_samples import TOKEN, blank, sync, weights_at

from cosmos_rl_transfer.publish.publisher import Publisher
from cosmos_rl_transfer.pull.subscriber import Subscriber
from doubles.pretend_cuda import pretend_cuda

pytestmark = pytest.mark.cuda_dry


@pytest.fixture
def record():
    with pretend_cuda() as record:
        yield record


def on_gpu(weights):
    return {name: tensor.to("cuda") for name, tensor in weights.items()}


def in_compute_thread(work):
    """As the trainer's and the engine's thread, which have set their device."""
    with ThreadPoolExecutor(1, thread_name_prefix="compute", initializer=lambda: torch.cuda.set_device(0)) as thread:
        return thread.submit(work).result()


def assert_on_side_streams(record):
    assert not record.mismatches, record
    assert not record.stray, record
    assert not record.synchronisations, record
    assert not record.uploads, record
    assert not [stream for stream in record.streams if "default stream" in stream], record


def assert_version(live, version):
    for name, tensor in weights_at(version).items():
        assert torch.equal(live[name].held, tensor), (name, version)


async def moved(trained, engines, *, versions=(1, 2), staging="shadow", **options):
    """Publish versions to subscribers of `engines`, which read at the same time; return the publisher's buckets."""
    publisher = Publisher(trained, token=TOKEN, settings=sync(**{"transport": "shm", "bucket_bytes": 2048, **options}))
    subscribers = [
        Subscriber(publisher.address, live, token=TOKEN, settings=sync(timeout_s=10, staging=staging))
        for live in engines
    ]
    buckets = 0
    for version in versions:
        await publisher.fence()
        for name, tensor in weights_at(version).items():
            trained[name].held.copy_(tensor)
        await publisher.publish(version, trained)
        staged = await asyncio.gather(*(subscriber.stage(after=version - 1) for subscriber in subscribers))
        assert set(staged) == {version}
        for subscriber in subscribers:
            in_compute_thread(subscriber.apply)
        buckets += len(subscribers[0]._plan.stream(0, 0))
    for subscriber in subscribers:
        await subscriber.close()
    await publisher.close()
    return buckets


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("num_engines", [1, 3])
def test_a_bucket_is_copied_once_a_version_on_a_side_stream(record, transport, num_engines):
    trained, engines = on_gpu(weights_at(0)), [on_gpu(blank()) for _ in range(num_engines)]
    record.clear()
    buckets = asyncio.run(moved(trained, engines, transport=transport))
    for live in engines:
        assert_version(live, 2)
    assert_on_side_streams(record)
    down = sum(count for stream, count in record.streams.items() if stream.startswith("to the host"))
    assert down == 2 * buckets, record  # the bytes and the hashes
    published = [count for place, count in record.waits.items() if "publish/memory.py" in place]
    assert sum(published) == buckets, record


def test_an_engine_may_switch_inside_a_default_device(record):
    trained, live = on_gpu(weights_at(1)), on_gpu(blank())

    async def switch():
        publisher = Publisher(trained, token=TOKEN, settings=sync(bucket_bytes=2048, transport="shm"))
        subscriber = Subscriber(publisher.address, live, token=TOKEN, settings=sync(timeout_s=10, staging="in_place"))
        await publisher.publish(1, trained)
        await subscriber.stage(after=0)
        torch.cuda.set_device(0)
        with torch.device("cuda", 0):  # as a vLLM worker
            subscriber.apply()
        await subscriber.close()
        await publisher.close()

    asyncio.run(switch())
    assert_version(live, 1)


@pytest.mark.parametrize("options", [{"staging": "in_place"}, {"delta": True}])
def test_other_ways_to_stage_keep_to_the_side_stream(record, options):
    trained, live = on_gpu(weights_at(0)), on_gpu(blank())
    record.clear()
    asyncio.run(moved(trained, [live], versions=(1, 2, 3), **options))
    assert_version(live, 3)
    assert_on_side_streams(record)


def test_deltas_are_written_in_place_on_the_gpu(record):
    """Their positions are uploaded from pageable memory, and the old values read back."""
    trained, live = on_gpu(weights_at(0)), on_gpu(blank())

    async def change():
        publisher = Publisher(trained, token=TOKEN, settings=sync(bucket_bytes=2048, delta=True))
        subscriber = Subscriber(publisher.address, live, token=TOKEN, settings=sync(timeout_s=10, staging="in_place"))
        for version in (1, 2):
            await publisher.fence()
            trained["embed"].held.view(-1)[:5] = version
            await publisher.publish(version, trained)
            await subscriber.stage(after=version - 1)
            in_compute_thread(subscriber.apply)
        deltas = subscriber.pulled.num_deltas
        await subscriber.close()
        await publisher.close()
        return deltas

    assert asyncio.run(change())
    assert torch.equal(live["embed"].held, trained["embed"].held)
    assert not record.mismatches, record
    assert not record.stray, record
    assert not [stream for stream in record.streams if "default stream, weights" in stream], record


def test_a_fence_takes_its_copies_without_waiting_for_readers(record):
    trained, live = on_gpu(weights_at(1)), on_gpu(blank())

    async def leave():
        publisher = Publisher(trained, token=TOKEN, settings=sync(bucket_bytes=2048, transport="shm", patience_s=60.0))
        subscriber = Subscriber(publisher.address, live, token=TOKEN, settings=sync(timeout_s=10))
        await publisher.publish(1, trained)
        feed = subscriber._feeds()[0]
        feed.borrow(1, keep=True, base=-1)
        fenced = await publisher.fence()
        for tensor in trained.values():
            tensor.held.zero_()
        subscriber._puller.pull([feed], subscriber.pulled)
        in_compute_thread(lambda: subscriber._puller.landing.apply(pool=subscriber._pool))
        await subscriber.close()
        await publisher.close()
        return fenced

    fenced = asyncio.run(leave())
    assert fenced["sync_stall_s"] < 30
    assert fenced["sync_copied_bytes"] > 0
    assert_version(live, 1)


def test_publishing_waits_for_the_event_of_the_compute_thread(record, monkeypatch):
    trained = on_gpu(weights_at(1))
    waited = []
    stream = torch.cuda.Stream.func  # of the pretend device
    monkeypatch.setattr(stream, "wait_event", lambda self, event: waited.append((self.name, event)))

    async def publish(ready):
        publisher = Publisher(trained, token=TOKEN)
        await publisher.publish(1, trained, ready=ready)
        await publisher.close()

    ready = in_compute_thread(torch.cuda.Event)
    asyncio.run(publish(ready))
    assert waited == [("side stream", ready)]

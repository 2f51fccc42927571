"""Weights travel in the dtype of the engine, unless [sync] dtype says otherwise."""

import asyncio

import pytest
import torch
from transfer_samples import TOKEN, sync

from cosmos_rl_transfer.publish.publisher import Publisher
from cosmos_rl_transfer.pull.subscriber import Subscriber

NUMEL = 64 * 33


def masters(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(64, 33, generator=generator), "count": torch.tensor([seed])}


def engine(dtype):
    return {"w": torch.zeros(64, 33, dtype=dtype), "count": torch.zeros(1, dtype=torch.int64)}


async def moved(trained, engines, *, versions=1, changes=None, **options):
    """Publish versions to all engines; return the bytes and the deltas of each in the last version, and the metrics."""
    publisher = Publisher(trained, token=TOKEN, settings=sync(transport="shm", **options))
    subscribers = [Subscriber(publisher.address, live, token=TOKEN, settings=sync(timeout_s=10)) for live in engines]
    for version in range(versions):
        await publisher.fence()
        if changes is not None:
            changes(version)
        metrics = await publisher.publish(version, trained)
        for subscriber in subscribers:
            await subscriber.stage(after=version - 1)
            subscriber.apply()
    counts = [(subscriber.pulled.num_bytes, subscriber.pulled.num_deltas) for subscriber in subscribers]
    for subscriber in subscribers:
        await subscriber.close()
    await publisher.close()
    return counts, metrics


@pytest.mark.parametrize(
    ("dtype", "item_bytes", "wire_dtype"),
    [
        (torch.bfloat16, 2, None),
        (torch.float16, 2, None),
        (torch.float32, 4, None),
        (torch.float64, 4, None),  # not widened
        (torch.bfloat16, 4, "float32"),  # the override
        (torch.float32, 2, "bfloat16"),
    ],
)
def test_float32_masters_travel_in_the_engines_dtype(dtype, item_bytes, wire_dtype):
    trained, live = masters(1), engine(dtype)
    [(num_bytes, _)], _ = asyncio.run(moved(trained, [live], dtype=wire_dtype))
    assert NUMEL * item_bytes + 8 <= num_bytes < NUMEL * item_bytes + 8 + 64
    sent = trained["w"].to(torch.bfloat16 if wire_dtype == "bfloat16" else torch.float32)
    assert torch.equal(live["w"], sent.to(dtype))
    assert torch.equal(live["count"], trained["count"])


def test_engines_of_two_dtypes_each_get_their_own():
    trained, half, full = masters(1), engine(torch.bfloat16), engine(torch.float32)
    [(fewer, _), (more, _)], metrics = asyncio.run(moved(trained, [half, full], versions=2))
    assert fewer < more == pytest.approx(2 * fewer, rel=0.1)
    assert metrics["sync_bytes"] == NUMEL * 4 + 8  # of the one that joined last
    assert torch.equal(half["w"], trained["w"].bfloat16())
    assert torch.equal(full["w"], trained["w"])


@pytest.mark.parametrize("dtypes", [[torch.bfloat16], [torch.float32, torch.bfloat16], [torch.bfloat16, torch.float32]])
def test_the_copy_for_deltas_follows_the_engines(dtypes):
    trained, lives = masters(1), [engine(dtype) for dtype in dtypes]

    def change(version):
        trained["w"][version] += 1.0

    counts, _ = asyncio.run(moved(trained, lives, versions=4, changes=change, delta=True))
    for live, dtype, (num_bytes, num_deltas) in zip(lives, dtypes, counts):
        assert torch.equal(live["w"], trained["w"].to(dtype))
        if dtype == max(dtypes, key=lambda dtype: dtype.itemsize):
            assert num_deltas and num_bytes < NUMEL
        else:
            assert not num_deltas  # the copy has wider elements

"""Figure 5: every version arrives bit for bit, and every flipped bit is found and repaired by resending one bucket."""

from __future__ import annotations

import asyncio
import random
import time

import _support  # noqa: F401  (makes transfer_* importable)
from _metrics import Figure
from transfer_samples import BitFlips, Pair, assert_version

from cosmos_rl_transfer.transports.shm import SharedMemory
from cosmos_rl_transfer.transports.tcp import Tcp

NUM_BUCKETS = 5
"""Of `testing.Pair`'s tensors, at least."""


def metrics(versions: int, flips: int) -> list[Figure]:
    """Compare all tensors after each of `versions` syncs, and inject `flips` errors of one bit."""
    started = time.perf_counter()
    exact = asyncio.run(_exact(versions))
    seconds = time.perf_counter() - started
    repaired = asyncio.run(_repaired(flips))
    note = f"tensors of three dtypes, shm and tcp in turn, each compared with what was published; {seconds:.1f} s"
    return [
        Figure(metric="5 versions", value=versions, unit=""),
        Figure(metric="5 arrived to the bit", value=exact / versions, unit="of all", target=">= 1", note=note),
        Figure(metric="5 bits flipped", value=flips, unit=""),
        Figure(
            metric="5 flips found and mended by one bucket more",
            value=repaired / flips,
            unit="of all",
            target=">= 1",
            note="each in a random bucket while it is received; one more bucket travels, and the tensors are compared",
        ),
    ]


async def _exact(versions: int) -> int:
    """Return how many of so many versions arrived as they were published."""
    exact = 0
    async with Pair("shm") as fast, Pair("tcp", staging="in_place") as slow:
        for version in range(versions):
            pair = (fast, slow)[version % 2]
            await pair.publish(version)
            staged = await pair.subscriber.stage(after=version - 1)
            await asyncio.to_thread(pair.subscriber.apply)
            assert_version(pair.live, version)
            exact += staged == version
    return exact


async def _repaired(flips: int) -> int:
    """Return how many of so many flips cost one more bucket and nothing else."""
    draw, repaired = random.Random(0), 0
    for trial in range(flips):
        name, kind = (("shm", SharedMemory), ("tcp", Tcp))[trial % 2]
        bucket = draw.randrange(NUM_BUCKETS)
        async with Pair(name, reading=BitFlips(kind(), bucket=bucket, times=1)) as pair:
            await pair.publish(trial)
            await pair.subscriber.stage(after=-1)
            await asyncio.to_thread(pair.subscriber.apply)
            assert_version(pair.live, trial)
            repaired += pair.subscriber.pulled.repaired == [(0, bucket)]
    return repaired

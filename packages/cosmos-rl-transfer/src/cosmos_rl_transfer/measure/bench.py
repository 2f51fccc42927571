"""`python -m cosmos_rl_transfer bench`: a sync between two processes of this machine, beside memcpy.

round    memcpy of the same bytes        in this process, one thread
         publish                         here: subscribers may read
         stage                           there: pull and verify beside the live tensors
         apply                           there: write the live tensors
         fence                           here: nobody reads any more
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from cosmos_rl_core.observe.tables import table
from cosmos_rl_transfer.measure.follower import Follower, Following, SampleModel
from cosmos_rl_transfer.publish.publisher import Publisher

WARM_UP = 2
"""Rounds that are not counted: page faults, connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Medians of the parts of a sync, in seconds."""

    transport: str
    mib: int
    publish_s: float
    stage_s: float
    apply_s: float
    fence_s: float
    memcpy_s: float
    over_memcpy: float
    """All parts together over the memcpy of the same round; median over rounds."""

    @property
    def total_s(self) -> float:
        return self.publish_s + self.stage_s + self.apply_s + self.fence_s


def bench(transports: Sequence[str], *, mib: int, rounds: int) -> list[Timing]:
    """Return how long a sync of `mib` MiB takes over each transport. Raises what `Publisher` and `stage` do."""
    return [asyncio.run(_measured(name, SampleModel(mib), rounds)) for name in transports]


def render(timings: Sequence[Timing]) -> str:
    """Return a table for people."""
    header = ("transport", "publish", "stage", "apply", "fence", "sync", "memcpy", "sync / memcpy", "GB/s")
    rows = [
        (
            t.transport,
            *(f"{seconds * 1e3:.1f} ms" for seconds in (t.publish_s, t.stage_s, t.apply_s, t.fence_s, t.total_s)),
            f"{t.memcpy_s * 1e3:.1f} ms",
            f"{t.over_memcpy:.2f} x",
            f"{(t.mib << 20) / t.total_s / 1e9:.2f}",
        )
        for t in timings
    ]
    return f"{timings[0].mib} MiB of float32 between two processes, medians\n" + table(rows, header=header)


async def _measured(transport: str, model: SampleModel, rounds: int) -> Timing:
    weights, token = model.tensors(), secrets.token_bytes(16)
    source = np.ones(model.mib << 20, np.uint8)
    copy = np.empty_like(source)
    publisher = Publisher(weights, token=token, transport=transport)
    follower = Follower(Following(publisher.address, token, model, transport=transport))
    rows: list[tuple[float, float, float, float, float]] = []
    try:
        for version in range(WARM_UP + rounds):
            started = time.perf_counter()
            np.copyto(copy, source)
            copied = time.perf_counter() - started
            published = (await publisher.publish(version, weights))["sync_s"]
            synced = await asyncio.to_thread(follower.sync)
            fenced = (await publisher.fence())["sync_stall_s"]
            rows.append((published, synced.stage_s, synced.apply_s, fenced, copied))
    finally:
        follower.close()
        await publisher.close()
    kept = rows[WARM_UP:]
    publish_s, stage_s, apply_s, fence_s, memcpy_s = (median(column) for column in zip(*kept))
    return Timing(
        transport=transport,
        mib=model.mib,
        publish_s=publish_s,
        stage_s=stage_s,
        apply_s=apply_s,
        fence_s=fence_s,
        memcpy_s=memcpy_s,
        over_memcpy=median(sum(row[:4]) / row[4] for row in kept),
    )

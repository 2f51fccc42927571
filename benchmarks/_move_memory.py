"""Figure 4: the memory of both sides beside the weights, in buckets, for two sizes of a model."""

from __future__ import annotations

import asyncio
from pathlib import Path

from _metrics import Figure
from _move_follower import Follower, Following, SampleModel
from _move_speed import TOKEN

from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_transfer.publish.publisher import Publisher

BUCKET_BYTES = 16 << 20
TINY_BYTES = 64 << 10
SYNCS = 4


def metrics(sizes: tuple[int, int]) -> list[Figure]:
    """Return the peaks of both sides over shared memory and TCP, in buckets."""
    found = []
    for transport in ("shm", "tcp"):
        fixed = asyncio.run(_peaks(sizes[0], transport, TINY_BYTES))
        for mib in sizes:
            peaks = asyncio.run(_peaks(mib, transport, BUCKET_BYTES))
            for side, peak, other in zip(("trainer", "rollout"), peaks, fixed):
                name = f"4 {transport}, {mib} MiB: {side}'s extra memory"
                value = (peak - other) / (BUCKET_BYTES - TINY_BYTES)
                found.append(Figure(metric=name, value=value, unit="buckets", target="<= 2.05", note=NOTE))
        fixed_mib = max(fixed) / 2**20
        found.append(Figure(metric=f"4 {transport}: beside buckets", value=fixed_mib, unit="MiB", note=FIXED))
    return found


NOTE = (
    "growth of VmHWM from before the publisher or subscriber is made until after four syncs in place, with buckets of "
    "16 MiB, above the same with buckets of 64 KiB; two buckets, and 2.5 % for the allocator"
)
FIXED = "growth with buckets of 64 KiB: threads, connections, the plan"


async def _peaks(mib: int, transport: str, bucket_bytes: int) -> tuple[int, int]:
    """Return by how many bytes the peaks of the publisher's and the subscriber's processes grew."""
    model = SampleModel(mib)
    weights = model.tensors()
    here = _Peak("self")
    publisher = Publisher(weights, token=TOKEN, settings=SyncSection(transport=transport, bucket_bytes=bucket_bytes))
    follower = Follower(Following(publisher.address, TOKEN, model, transport=transport, staging="in_place"))
    there = _Peak(str(follower.pid))
    for version in range(SYNCS):
        await publisher.publish(version, weights)
        await asyncio.to_thread(follower.sync)
        await publisher.fence()
    grown = here.growth(), there.growth()
    follower.close()
    await publisher.close()
    return grown


class _Peak:
    """The rise of a process's resident memory above its present value."""

    def __init__(self, pid: str) -> None:
        self._folder = Path("/proc") / pid
        (self._folder / "clear_refs").write_text("5")  # resets the peak
        self._before = self._read("VmRSS")

    def growth(self) -> int:
        """Return bytes."""
        return self._read("VmHWM") - self._before

    def _read(self, key: str) -> int:
        lines = (self._folder / "status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith(f"{key}:"))
        return int(line.split()[1]) << 10

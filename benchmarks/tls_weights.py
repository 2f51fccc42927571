"""Weights over TCP with and without TLS, between two processes of this machine.

    .venv/bin/python benchmarks/tls_weights.py [--quick]

Each round publishes one version of 256 MiB to a subscriber in another process, over a plain link and over an
encrypted one by turns. Seconds are those of `stage`, which verifies every bucket; CPU time is that of both processes.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
from _metrics import Figure, report

from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_core.wire.certificates import make_bundles
from cosmos_rl_core.wire.tls import Tls
from cosmos_rl_transfer import Publisher, Subscriber

TOKEN = bytes(32)
TENSORS, NUMBERS = 16, 4 * 2**20
NUM_BYTES = TENSORS * NUMBERS * 4
SIDES = ("plain", "TLS")
NOTE = (
    "256 MiB of float32 in 16 tensors, transport tcp on the loopback interface, buckets of 4 MiB, digests verified; "
    "publisher, subscriber and kernel share the machine's cores"
)


@dataclass(frozen=True, kw_only=True)
class Pull:
    """One version."""

    seconds: float
    cpu_s: float
    """Of both processes."""


def weights(value: float) -> dict[str, torch.Tensor]:
    return {f"layer{i}": torch.full((NUMBERS,), value) for i in range(TENSORS)}


async def subscribe(address: str, tls: Tls | None) -> None:
    """For each line of standard input stage a version; print the seconds and this process's CPU time."""
    subscriber = Subscriber(
        address, weights(0.0), token=TOKEN, tls=tls, settings=SyncSection(transport="tcp", timeout_s=120)
    )
    version = -1
    while await asyncio.to_thread(sys.stdin.readline):
        begin, cpu_s = time.perf_counter(), time.process_time()
        version = await subscriber.stage(after=version)
        print(time.perf_counter() - begin, time.process_time() - cpu_s, flush=True)
    await subscriber.close()


class Side:
    """A publisher here and a subscriber in a process of its own."""

    def __init__(self, tls: Tls | None) -> None:
        self._weights, self._version = weights(0.0), -1
        self._publisher = Publisher(
            self._weights, token=TOKEN, tls=tls, settings=SyncSection(transport="tcp", timeout_s=120)
        )
        command = [sys.executable, __file__, "--subscribe", self._publisher.address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._say("" if tls is None else tls.bundle.encode().hex())

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    async def pull(self) -> Pull:
        """Publish a version and return the subscriber's figures."""
        assert self._process.stdout is not None
        await self._publisher.fence()
        self._version += 1
        for tensor in self._weights.values():
            tensor.fill_(float(self._version))
        cpu_s = time.process_time()
        await self._publisher.publish(self._version, self._weights)
        self._say("next")
        line = await asyncio.to_thread(self._process.stdout.readline)
        seconds, theirs = map(float, line.split())
        return Pull(seconds=seconds, cpu_s=theirs + time.process_time() - cpu_s)

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        await self._publisher.close()


async def measure(rounds: int) -> dict[str, list[Pull]]:
    _, tls = make_bundles(valid_days=1)
    sides = dict(zip(SIDES, (Side(None), Side(tls))))
    pulls: dict[str, list[Pull]] = {name: [] for name in SIDES}
    for number in range(rounds + 1):
        for name, side in sides.items():
            found = await side.pull()
            if number:  # the first one connects and allocates
                pulls[name].append(found)
    for side in sides.values():
        await side.close()
    return pulls


def figures(pulls: dict[str, list[Pull]]) -> list[Figure]:
    speed = {name: NUM_BYTES / 1e9 / statistics.median(one.seconds for one in found) for name, found in pulls.items()}
    cpu = {name: statistics.median(one.cpu_s for one in found) * 1e9 / NUM_BYTES for name, found in pulls.items()}
    rows = [Figure(metric=f"weights over TCP, {name}", value=speed[name], unit="GB/s", note=NOTE) for name in SIDES]
    rows += [Figure(metric=f"CPU time of both ends, {name}", value=cpu[name], unit="s/GB") for name in SIDES]
    rows.append(Figure(metric="speed: TLS over plain", value=speed["TLS"] / speed["plain"], unit="times"))
    rows.append(Figure(metric="CPU time: TLS over plain", value=cpu["TLS"] / cpu["plain"], unit="times"))
    return rows


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--subscribe"]:
        bundle = sys.stdin.readline().strip()
        asyncio.run(subscribe(arguments[1], Tls(bytes.fromhex(bundle).decode()) if bundle else None))
        return 0
    report("tls_weights", figures(asyncio.run(measure(5 if "--quick" in arguments else 15))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

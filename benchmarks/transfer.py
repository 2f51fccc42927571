"""Weight sync between two processes of this machine, next to a memcpy of the same bytes.

    python benchmarks/transfer.py [--quick]

One sync is publish (pack, hash), stage (lease, read, verify both hashes) and apply (write the live tensors): three
copies and four hashes. The sides alternate with the memcpy in every round; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch
from _figures import Figure, report

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer import Manifest, Publisher, Replicate, Shard, Subscriber
from cosmos_rl_transfer.digest import bucket_hash, run_sum
from cosmos_rl_transfer.plan import plan

TOKEN = b"benchmark"
WIDTH = 1024
NUM_TENSORS = 32


def model(mib: int, *, random: bool) -> dict[str, torch.Tensor]:
    """Return `mib` MiB of float32 in equal matrices, and one odd vector."""
    rows = mib * (1 << 20) // (4 * WIDTH * NUM_TENSORS)
    make = torch.rand if random else torch.zeros
    return {f"layer{i}": make(rows, WIDTH) for i in range(NUM_TENSORS)} | {"bias": make(7)}


def timed(work: Callable[[], object]) -> float:
    """Return the seconds one call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Follower:
    """The subscriber's process. It stages and applies one version each time it is told to."""

    def __init__(self, address: str, transport: str, mib: int) -> None:
        command = [sys.executable, __file__, "--follow", address, "--transport", transport, "--mib", str(mib)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def sync(self) -> tuple[float, float]:
        """Return the seconds of stage and of apply."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("go\n")
        stage, apply = self._process.stdout.readline().split()
        return float(stage), float(apply)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


async def follow(address: str, transport: str, mib: int) -> None:
    """Play the subscriber until standard input ends."""
    live = model(mib, random=False)
    subscriber, version = Subscriber(address, live, token=TOKEN, transport=transport), -1
    while await asyncio.to_thread(sys.stdin.readline):
        started = time.perf_counter()
        version = await subscriber.stage(after=version)
        staged = time.perf_counter()
        subscriber.apply()
        print(staged - started, time.perf_counter() - staged, flush=True)
    await subscriber.close()


async def syncs(mib: int, rounds: int) -> dict[str, list[tuple[float, float, float]]]:
    """Return (publish, stage, apply) seconds of every round for each way, and (copy, 0, 0) for memcpy."""
    weights = model(mib, random=True)
    flat = torch.cat([tensor.view(-1) for tensor in weights.values()]).numpy()
    copy = np.zeros_like(flat)
    ways = {"shm": ("shm", None), "tcp": ("tcp", None), "shm_bf16": ("shm", "bfloat16")}
    publishers = {
        way: Publisher(weights, token=TOKEN, transport=transport, wire_dtype=dtype)
        for way, (transport, dtype) in ways.items()
    }
    followers = {way: Follower(p.address, ways[way][0], mib) for way, p in publishers.items()}
    times: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ["memcpy", *ways]}
    for version in range(rounds + 2):
        times["memcpy"].append((timed(lambda: np.copyto(copy, flat)), 0.0, 0.0))
        for way, publisher in publishers.items():
            published = (await publisher.publish(version, weights))["sync_s"]
            times[way].append((published, *followers[way].sync()))
    for way, publisher in publishers.items():
        followers[way].close()
        await publisher.close()
    return {way: rows[2:] for way, rows in times.items()}  # the first two take page faults in both slots


def hashing() -> list[Figure]:
    """Speed of the two hashes on one core."""
    data = np.random.default_rng(0).integers(0, 1 << 62, 8 << 20, dtype=np.uint64)
    figures = []
    for name, work in (("tensor hash", lambda: run_sum(data, 0)), ("bucket hash", lambda: bucket_hash(data))):
        seconds = median(timed(work) for _ in range(7))
        figures.append(Figure(figure=f"{name}, one core", value=data.nbytes / seconds / 1e9, unit="GB/s"))
    return figures


def planning(num_tensors: int) -> Figure:
    """Time to plan hybrid-sharded 8 x 8 ranks to 32 tensor-parallel ranks."""
    specs = [WeightSpec(name=f"w{i}", shape=(768, 2048), dtype="bfloat16") for i in range(num_tensors)]
    source = Manifest.sharded(specs, mesh_shape=(8, 8), placements={s.name: [Replicate(), Shard(0)] for s in specs})
    target = Manifest.sharded(specs, mesh_shape=(32,), placements={s.name: [Shard(1)] for s in specs})
    seconds = timed(lambda: plan(source, target, bucket_bytes=8 << 20))
    return Figure(figure=f"plan {num_tensors} tensors, 64 ranks to 32", value=seconds, unit="s")


def sync_figures(times: dict[str, list[tuple[float, float, float]]], num_bytes: int) -> list[Figure]:
    """Medians, and the ratio to the memcpy of the same round."""
    copies = [sum(row) for row in times["memcpy"]]
    figures = [Figure(figure="memcpy", value=median(copies), unit="s")]
    targets = {"shm": "<= 4"}
    for way, rows in times.items():
        if way == "memcpy":
            continue
        totals = [sum(row) for row in rows]
        parts = zip(("publish", "stage", "apply"), zip(*rows))
        figures += [Figure(figure=f"{way} {name}", value=median(part), unit="s") for name, part in parts]
        figures.append(Figure(figure=f"{way} sync", value=median(totals), unit="s"))
        figures.append(Figure(figure=f"{way} sync", value=num_bytes / median(totals) / 1e9, unit="GB/s"))
        ratio = median(total / copy for total, copy in zip(totals, copies))
        figures.append(
            Figure(figure=f"{way} sync / memcpy", value=ratio, unit="x", target=targets.get(way, ""), note=NOTE)
        )
    return figures


NOTE = "a sync is three copies and four hashes, on up to two cores; the ratio is the median over rounds"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, or the subscriber's side of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 MiB instead of 512 MiB")
    parser.add_argument("--mib", type=int, help="size of the model")
    parser.add_argument("--follow", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--transport", default="shm", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    mib = given.mib or (64 if given.quick else 512)
    if given.follow:
        asyncio.run(follow(given.follow, given.transport, mib))
        return
    times = asyncio.run(syncs(mib, rounds=15 if given.quick else 9))
    size = mib << 20
    figures = sync_figures(times, size) + hashing() + [planning(100 if given.quick else 1000)]
    report("transfer", [Figure(figure="model", value=mib, unit="MiB"), *figures])


if __name__ == "__main__":
    main()

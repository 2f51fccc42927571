"""Figure 3: a sync over each transport, beside memcpy, a raw TCP stream, gloo and torchstore, in turn."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from statistics import median
from typing import Literal, Protocol

import numpy as np
from _metrics import Figure
from _move_alone import PROCESS_READ, compare
from _move_follower import Follower, Following, SampleModel
from _move_peer import Gloo, RawSocket
from _torchstore import torchstore_seconds

from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_transfer.content.digest import bucket_hash, tensor_sum
from cosmos_rl_transfer.doctor import MEMCPY, NIXL_OVER_TCP, RAW_STREAM
from cosmos_rl_transfer.layout.box import Box
from cosmos_rl_transfer.publish.publisher import Publisher
from cosmos_rl_transfer.transports.base import TransportUnavailable

TOKEN = b"benchmark"
WARM_UP = 2


@dataclass(frozen=True)
class Way:
    """A way to sync."""

    name: str
    transport: str
    staging: Literal["shadow", "in_place"] = "shadow"
    column_ranks: int = 1
    wire_dtype: Literal["float32", "bfloat16", "float16"] | None = None


WAYS = (
    Way("shm", "shm"),
    Way("shm, columns cut over 2", "shm", column_ranks=2),
    Way("shm, in place", "shm", "in_place"),
    Way("shm, bfloat16", "shm", wire_dtype="bfloat16"),
    Way("tcp", "tcp"),
    Way("nixl", "nixl"),
)


class Side(Protocol):
    """A baseline."""

    def seconds(self) -> float: ...

    def close(self) -> None: ...


class Memcpy:
    """One or two copies in this process, one thread."""

    def __init__(self, num_bytes: int, *, copies: int) -> None:
        self._copies = copies
        self._from = np.ones(num_bytes, np.uint8)
        self._to = [np.ones(num_bytes, np.uint8) for _ in range(copies)]

    def seconds(self) -> float:
        """Copy, and copy the copy."""
        started = time.perf_counter()
        source = self._from
        for target in self._to:
            np.copyto(target, source)
            source = target
        return time.perf_counter() - started

    def close(self) -> None:
        """Free the memory."""
        self._to.clear()


class Sync:
    """A publisher here and a follower in another process."""

    def __init__(self, way: Way, mib: int) -> None:
        model = SampleModel(mib, column_ranks=way.column_ranks)
        self._weights = model.tensors()
        self._publisher = Publisher(
            self._weights,
            token=TOKEN,
            settings=SyncSection(transport=way.transport, dtype=way.wire_dtype, timeout_s=60),
        )
        self._follower = Follower(
            Following(self._publisher.address, TOKEN, model, transport=way.transport, staging=way.staging)
        )
        self._in_place = way.staging == "in_place"
        self._version = -1
        self.apply_s: list[float] = []

    def seconds(self) -> float:
        """Publish; the follower pulls, verifies and writes in place; then fence."""
        return asyncio.run(self._sync())

    async def _sync(self) -> float:
        self._version += 1
        published = (await self._publisher.publish(self._version, self._weights))["sync_s"]
        synced = self._follower.sync()
        await self._publisher.fence()
        self.apply_s.append(synced.apply_s)
        return published + synced.stage_s + (synced.apply_s if self._in_place else 0.0)

    def close(self) -> None:
        """End both sides."""
        self._follower.close()
        asyncio.run(self._publisher.close())


def metrics(mib: int, rounds: int, *, install: bool) -> list[Figure]:
    """Return seconds of every way and every side, and their ratios."""
    sides: dict[str, Side] = {}
    missing: dict[str, str] = {}
    size = mib << 20
    makers = {
        "memcpy": lambda: Memcpy(size, copies=1),
        "two memcpys": lambda: Memcpy(size, copies=2),
        "raw recv_into": lambda: RawSocket(size),
        "gloo send and recv": lambda: Gloo(size),
        **{way.name: (lambda way=way: Sync(way, mib)) for way in WAYS},
    }
    with ExitStack() as stack:
        for name, make in makers.items():
            try:
                sides[name] = stack.enter_context(closing(make()))
            except TransportUnavailable as error:
                missing[name] = str(error)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(WARM_UP + rounds):
            for name, side in sides.items():
                side.seconds()  # caches, and a processor that slept through the others' turns
                times[name].append(side.seconds())
        applied = {name: side.apply_s[WARM_UP:] for name, side in sides.items() if isinstance(side, Sync)}
    times = {name: row[WARM_UP:] for name, row in times.items()}
    torchstore = torchstore_seconds(size, rounds, install=install)
    return [
        *(Figure(metric=f"3 {name}", value=median(row), unit="s", note=NOTE) for name, row in times.items()),
        *(Figure(metric=f"3 {name}", value=math.nan, unit="s", note=f"{name}: {why}") for name, why in missing.items()),
        Figure(metric="3 torchstore", value=torchstore.seconds, unit="s", note=torchstore.note),
        Figure(metric="3 shm: apply, in the pause", value=median(applied["shm"]), unit="s"),
        *_ratios(times),
        *_alone(mib, rounds),
        *_hashes(),
    ]


NOTE = (
    "publish, pull and verify on the other side (xxh3 of every bucket, additive hash of every tensor); 'in place' with "
    "the landing in the live tensors; sides take turns, two runs each of which the second counts, medians over rounds, "
    "ratios within a round"
)


def _ratios(times: dict[str, list[float]]) -> list[Figure]:
    pairs: Sequence[tuple[str, str, str]] = (
        ("shm", "two memcpys", "<= 1.5"),
        ("shm, columns cut over 2", "two memcpys", "<= 1.5"),
        ("shm, in place", "two memcpys", "<= 1.5"),
        ("nixl", "memcpy", "<= 1.3"),
    )
    faster = (("tcp", "raw recv_into", ">= 0.9"), ("tcp", "gloo send and recv", ">= 1"))
    return [
        *(_ratio(f"3 {a} / {b}", times.get(a), times.get(b), target) for a, b, target in pairs),
        *(_ratio(f"3 speed of {a} / {b}", times.get(b), times.get(a), target) for a, b, target in faster),
    ]


def _hashes() -> list[Figure]:
    """The two hashes of 4 MiB, which both sides compute over every byte; "cut": rows of 2 KiB out of 4 KiB."""
    data = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    rows = data.reshape(-1, 512)
    cut = Box((0, 512), rows.shape)
    works = {
        "xxh3": lambda: bucket_hash(data),
        "additive": lambda: tensor_sum(data, Box((0,), data.shape), data.shape),
        "additive, cut": lambda: tensor_sum(rows, cut, (len(rows), 1024)),
    }
    return [
        Figure(metric=f"3 hash: {name}", value=data.nbytes / median(_timed(work) for _ in range(25)) / 1e9, unit="GB/s")
        for name, work in works.items()
    ]


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _alone(mib: int, rounds: int) -> list[Figure]:
    """The transports alone: the same buckets repeatedly, without hashing and packing."""
    pairs = (
        ("tcp", RAW_STREAM, ">= 0.9"),
        ("tcp", NIXL_OVER_TCP, ">= 3"),
        ("nixl", MEMCPY, ">= 0.77"),
        (RAW_STREAM, NIXL_OVER_TCP, ""),
        ("nixl", PROCESS_READ, ""),
        (PROCESS_READ, MEMCPY, ""),
        ("shm", MEMCPY, ""),
    )
    names = dict.fromkeys(name for pair in pairs for name in pair[:2])
    try:
        found = compare(list(names), mib=mib, rounds=rounds)
    except TransportUnavailable as error:
        return [Figure(metric="3 transports alone", value=math.nan, unit="", note=str(error))]
    times = {name: list(speed.seconds) for name, speed in found.items()}
    return [
        *(Figure(metric=f"3 {n} alone", value=s.gigabytes_per_s, unit="GB/s", note=ALONE) for n, s in found.items()),
        *(_ratio(f"3 speed of {a} alone / {b}", times[b], times[a], target) for a, b, target in pairs),
    ]


ALONE = "alone: buckets between two processes without packing, hashes and landing; 0.77 is 1 / 1.3"


def _ratio(name: str, above: list[float] | None, below: list[float] | None, target: str) -> Figure:
    value = median(a / b for a, b in zip(above, below)) if above and below else math.nan
    return Figure(metric=name, value=value, unit="x", target=target)

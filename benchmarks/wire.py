"""The control channel, plain and over TLS, beside JSON over HTTP and a bare echo, under the load of 1,000 replicas.

    .venv/bin/python benchmarks/wire.py [--quick]

Each round starts a server process for one channel and opens 1,000 connections from this process. It sends
2,000 heartbeats a second on a fixed timetable (open loop), then as many as possible (one outstanding per
connection), then rollout groups of 8 x 512 terms from 16 of the connections. The channels alternate;
metrics are medians over the rounds. Latency is measured from the time a request was due, so it includes delays
of a late client or a slow reply, and the millisecond steps of the event loop's timers.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from _channels import CHANNELS, SERVERS, Channel, Heartbeat, Reply
from _metrics import Figure, report

from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup

NUM_REPLICAS = 1000
NUM_DELIVERING = 16
RATE = 2000
PEERS = {"wire": "wire", "tls": "wire over TLS", "http": "JSON/HTTP", "echo": "bare echo"}
NOTES = {
    "wire": (
        "wire: HMAC on every frame, both ways. Client and server share one machine's cores, so the rate "
        "reached depends on the client and on what else runs; one core can answer 1 / (server CPU a "
        "heartbeat)"
    ),
    "tls": "wire over TLS: the same channel with TLS 1.3, AES-256-GCM, certificates of P-256 on both sides",
    "http": (
        "JSON/HTTP: the simplest keep-alive HTTP/1.1 on asyncio streams with the standard json module and "
        "a bearer token, hand-written, so faster than a web framework. Upstream uses FastAPI with "
        "pydantic, not installed here; an earlier run on a loaded two-core machine gave it 1.9k "
        "requests/s saturated, p50 and p99 of 803 and 2462 ms when 2,000/s were asked for (1,052/s "
        "reached), and about 150 us of server CPU a request"
    ),
    "echo": (
        "bare echo: the same bytes on asyncio streams, read by their length and not decoded, answered with one "
        "float; no authentication. What the interpreter and the kernel take anyway, on this processor"
    ),
}
HEARTBEAT = Heartbeat(worker="rollout-000", progress=123_456, busy_s=98.25, leases=list(range(100_000, 100_012)))


@dataclass(frozen=True, kw_only=True)
class Round:
    """One channel's metrics of one round."""

    p50_ms: float
    p99_ms: float
    open_cpu_us: float
    """Server CPU a heartbeat at RATE."""
    heartbeats_per_s: float
    saturated_cpu_us: float
    groups_per_s: float
    group_cpu_us: float
    connections_per_s: float
    connection_cpu_us: float
    """Server CPU a connection, with its handshake and one heartbeat."""

    @property
    def one_core_per_s(self) -> float:
        return 1e6 / self.saturated_cpu_us


ROWS = (
    ("p50_ms", f"latency p50 at {RATE}/s", "ms"),
    ("p99_ms", f"latency p99 at {RATE}/s", "ms"),
    ("open_cpu_us", f"server CPU a heartbeat at {RATE}/s", "us"),
    ("heartbeats_per_s", "heartbeats, saturated", "requests/s"),
    ("saturated_cpu_us", "server CPU a heartbeat, saturated", "us"),
    ("one_core_per_s", "heartbeats one server core can answer", "requests/s"),
    ("groups_per_s", "rollout groups of 8 x 512 terms", "groups/s"),
    ("group_cpu_us", "server CPU a rollout group", "us"),
    ("connections_per_s", f"connections, {NUM_REPLICAS} opened 100 at a time", "connections/s"),
    ("connection_cpu_us", "server CPU a connection and a heartbeat", "us"),
)

RATIOS = (
    ("p99_ms", f"latency p99 at {RATE}/s", "wire", "echo", "<= 1.5"),
    ("saturated_cpu_us", "server CPU a heartbeat", "wire", "echo", "<= 1.25"),
    ("group_cpu_us", "server CPU a rollout group", "wire", "echo", "<= 2.5"),
    ("saturated_cpu_us", "server CPU a heartbeat", "http", "wire", ""),
    ("group_cpu_us", "server CPU a rollout group", "http", "wire", ">= 5"),
    ("p99_ms", f"latency p99 at {RATE}/s", "tls", "wire", ""),
    ("saturated_cpu_us", "server CPU a heartbeat", "tls", "wire", ""),
    ("group_cpu_us", "server CPU a rollout group", "tls", "wire", ""),
    ("connection_cpu_us", "server CPU a connection and a heartbeat", "tls", "wire", ""),
)
"""Metric, text, numerator, denominator, target: absolute times belong to a machine, ratios carry over."""


async def run_round(kind: str, *, open_s: float, saturated_s: float) -> Round:
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None and server.stdin is not None
    try:
        channels, connections_per_s, connection_cpu_us = await open_channels(kind, server.stdout.readline().strip())
        latencies, open_cpu_us = await open_loop(channels, seconds=open_s)
        heartbeats_per_s, saturated_cpu_us = await saturate(
            channels, lambda channel: channel.beat(HEARTBEAT), seconds=saturated_s
        )
        group = make_group(num_rollouts=8, num_terms=512)
        groups_per_s, group_cpu_us = await saturate(
            channels[:NUM_DELIVERING], lambda channel: channel.deliver(group), seconds=saturated_s
        )
        for channel in channels:
            channel.close()
    finally:
        server.stdin.close()
        server.wait(timeout=10)
    cuts = statistics.quantiles(latencies, n=100)
    return Round(
        p50_ms=1000 * cuts[49],
        p99_ms=1000 * cuts[98],
        open_cpu_us=open_cpu_us,
        heartbeats_per_s=heartbeats_per_s,
        saturated_cpu_us=saturated_cpu_us,
        groups_per_s=groups_per_s,
        group_cpu_us=group_cpu_us,
        connections_per_s=connections_per_s,
        connection_cpu_us=connection_cpu_us,
    )


async def open_channels(kind: str, address: str) -> tuple[list[Channel], float, float]:
    """Return the channels, connections a second, and the server's CPU microseconds a connection and heartbeat."""
    channels = [await CHANNELS[kind].open(address, NUM_REPLICAS)]
    cpu_before = (await channels[0].beat(HEARTBEAT)).cpu_s
    begin = time.perf_counter()
    for start in range(0, NUM_REPLICAS, 100):
        opening = (CHANNELS[kind].open(address, index) for index in range(start, start + 100))
        channels += await asyncio.gather(*opening)
    elapsed = time.perf_counter() - begin
    await asyncio.gather(*(channel.beat(HEARTBEAT) for channel in channels[1:]))
    cpu_s = (await channels[0].beat(HEARTBEAT)).cpu_s - cpu_before
    channels.pop(0).close()
    return channels, NUM_REPLICAS / elapsed, 1e6 * cpu_s / NUM_REPLICAS


async def open_loop(channels: Sequence[Channel], *, seconds: float) -> tuple[list[float], float]:
    """Send RATE heartbeats a second, each connection in its turn.

    Returns the latencies in seconds and the server's CPU microseconds a heartbeat.
    """
    cpu_before = (await channels[0].beat(HEARTBEAT)).cpu_s
    period = len(channels) / RATE
    begin = time.perf_counter() + 0.1
    latencies: list[float] = []

    async def replica(index: int) -> None:
        for turn in range(round(seconds / period)):
            due = begin + index / RATE + turn * period
            await asyncio.sleep(due - time.perf_counter())
            await channels[index].beat(HEARTBEAT)
            latencies.append(time.perf_counter() - due)

    await asyncio.gather(*(replica(index) for index in range(len(channels))))
    cpu_s = (await channels[0].beat(HEARTBEAT)).cpu_s - cpu_before
    return latencies, 1e6 * cpu_s / len(latencies)


async def saturate(
    channels: Sequence[Channel], ask: Callable[[Channel], Awaitable[Reply]], *, seconds: float
) -> tuple[float, float]:
    """Keep one request outstanding on every connection.

    Returns the requests a second and the server's CPU microseconds a request.
    """
    cpu_before = (await channels[0].beat(HEARTBEAT)).cpu_s
    begin = time.perf_counter()

    async def replica(channel: Channel) -> int:
        num_requests = 0
        while time.perf_counter() - begin < seconds:
            await ask(channel)
            num_requests += 1
        return num_requests

    num_requests = sum(await asyncio.gather(*(replica(channel) for channel in channels)))
    elapsed = time.perf_counter() - begin
    cpu_s = (await channels[0].beat(HEARTBEAT)).cpu_s - cpu_before
    return num_requests / elapsed, 1e6 * cpu_s / num_requests


def make_group(*, num_rollouts: int, num_terms: int) -> RolloutGroup:
    rng = np.random.default_rng(0)
    rollouts = tuple(
        Rollout(
            arrays={"tokens": rng.integers(0, 50_000, num_terms, dtype=np.int32)},
            rollout_logprobs=-rng.random(num_terms, dtype=np.float32),
            versions=np.full(num_terms, 7, np.int32),
            loss_mask=np.ones(num_terms, bool),
            reward=1.0,
        )
        for _ in range(num_rollouts)
    )
    return RolloutGroup(prompt=Prompt(sample_id=1, row={}), rollouts=rollouts)


async def serve_until_stdin_closes(kind: str) -> None:
    print(await SERVERS[kind](), flush=True)
    await asyncio.to_thread(sys.stdin.read)


def metrics(rounds: dict[str, list[Round]]) -> list[Figure]:
    def median(kind: str, field: str) -> float:
        return statistics.median(getattr(one, field) for one in rounds[kind])

    rows = [
        Figure(
            metric=f"{text}: {title}",
            value=median(kind, field),
            unit=unit,
            note=NOTES[kind],
        )
        for field, text, unit in ROWS
        for kind, title in PEERS.items()
    ]
    for field, text, over, under, target in RATIOS:
        value = median(over, field) / median(under, field)
        name = f"{text}: {PEERS[over]} over {PEERS[under]}"
        rows.append(Figure(metric=name, value=value, unit="times", target=target, note=NOTES[under]))
    return rows


def main(arguments: list[str]) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * NUM_REPLICAS)), hard))
    if arguments[:1] == ["--serve"]:
        asyncio.run(serve_until_stdin_closes(arguments[1]))
        return 0
    quick = "--quick" in arguments
    rounds: dict[str, list[Round]] = {kind: [] for kind in PEERS}
    for number in range(3 if quick else 5):
        for kind in PEERS:
            print(f"round {number + 1}: {PEERS[kind]} ...", flush=True)
            one = run_round(kind, open_s=2 if quick else 10, saturated_s=1.5 if quick else 5)
            rounds[kind].append(asyncio.run(one))
    report("wire", metrics(rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

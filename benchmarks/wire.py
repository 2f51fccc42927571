"""The control channel beside JSON over HTTP, under the load of 1,000 replicas.

    .venv/bin/python benchmarks/wire.py [--quick]

Each round starts a server process for one channel, opens 1,000 connections from this process, sends 2,000
requests a second on a fixed timetable (open loop), then as many as will go (one outstanding request a
connection). The channels alternate; figures are medians over the rounds. Latency counts from the moment a
request was due, so a late client or a slow answer cannot hide.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from _figures import Figure, report

from cosmos_rl_core.control.wire import Connection, Hello, connect, serve

TOKEN = bytes(32)
NUM_REPLICAS = 1000
RATE = 2000
PEERS = {"wire": "cosmos-rl wire", "http": "JSON over HTTP/1.1"}
QUOTED = (
    "JSON over HTTP/1.1 is a minimal keep-alive server on asyncio streams with the standard json module and a "
    "bearer token: the simplest stand-in, and faster than a web framework. Upstream uses FastAPI with pydantic; an "
    "earlier run on a loaded two-core machine gave 1.9k requests/s saturated, p50 / p99 of 803 / 2462 ms at "
    "2,000/s (1,052/s reached) and about 150 us of server CPU a request"
)
HONEST = (
    "both ends share one machine's cores; the client is asyncio too, so saturated figures are a lower bound"
)


class Request(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """About 110 bytes, as a heartbeat with its leases."""

    worker: str
    progress: int
    busy_s: float
    leases: list[int]


class Reply(msgspec.Struct, tag=True, frozen=True, array_like=True):
    progress: int
    cpu_s: float
    """CPU time the server has used so far."""


REQUEST = Request(worker="rollout-000", progress=123_456, busy_s=98.25, leases=list(range(100_000, 100_012)))


class Channel(Protocol):
    async def ask(self, request: Request) -> Reply: ...

    def close(self) -> None: ...


# -- the two channels


async def serve_wire() -> str:
    async def answer(connection: Connection) -> None:
        while True:
            request = await connection.receive()
            await connection.send(Reply(request.progress, time.process_time()))

    return (await serve("tcp://127.0.0.1:0", token=TOKEN, decode=Request, on_connect=answer)).address


class WireChannel:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, address: str, index: int) -> WireChannel:
        hello = Hello(name=f"rollout-{index}", role="rollout")
        return cls(await connect(address, token=TOKEN, hello=hello, decode=Reply, timeout_s=30))

    async def ask(self, request: Request) -> Reply:
        await self._connection.send(request)
        return await self._connection.receive()

    def close(self) -> None:
        self._connection.close()


async def serve_http() -> str:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head, body = await _read_http(reader)
                assert hmac.compare_digest(_header(head, b"authorization"), TOKEN.hex().encode())
                reply = {"progress": json.loads(body)["progress"], "cpu_s": time.process_time()}
                _write_http(writer, b"HTTP/1.1 200 OK", json.dumps(reply).encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionResetError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
    return "{}:{}".format(*server.sockets[0].getsockname())


class HttpChannel:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: str, index: int) -> HttpChannel:
        host, port = address.split(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def ask(self, request: Request) -> Reply:
        body = json.dumps(msgspec.structs.asdict(request)).encode()
        _write_http(self._writer, b"POST /heartbeat HTTP/1.1\r\nhost: controller", body)
        _, answer = await _read_http(self._reader)
        return Reply(**json.loads(answer))

    def close(self) -> None:
        self._writer.close()


def _write_http(writer: asyncio.StreamWriter, head: bytes, body: bytes) -> None:
    writer.write(
        head
        + b"\r\nauthorization: %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % (TOKEN.hex().encode(), len(body))
        + body
    )


async def _read_http(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    return head, await reader.readexactly(int(_header(head, b"content-length")))


def _header(head: bytes, name: bytes) -> bytes:
    return head.partition(b"\r\n" + name + b": ")[2].partition(b"\r\n")[0]


SERVERS: dict[str, Callable[[], Awaitable[str]]] = {"wire": serve_wire, "http": serve_http}
CHANNELS: dict[str, Any] = {"wire": WireChannel, "http": HttpChannel}


# -- the load


@dataclass(frozen=True, kw_only=True)
class Round:
    """One channel's figures of one round."""

    p50_ms: float
    p99_ms: float
    open_cpu_us: float
    """Server CPU a request at 2,000/s."""
    saturated_rps: float
    saturated_cpu_us: float


async def run_round(kind: str, *, open_s: float, saturated_s: float) -> Round:
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None and server.stdin is not None
    try:
        address = server.stdout.readline().strip()
        channels: list[Channel] = []
        for start in range(0, NUM_REPLICAS, 100):
            opening = (CHANNELS[kind].open(address, index) for index in range(start, start + 100))
            channels += await asyncio.gather(*opening)
        await asyncio.gather(*(channel.ask(REQUEST) for channel in channels))
        latencies, open_cpu_us = await open_loop(channels, seconds=open_s)
        saturated_rps, saturated_cpu_us = await saturate(channels, seconds=saturated_s)
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
        saturated_rps=saturated_rps,
        saturated_cpu_us=saturated_cpu_us,
    )


async def open_loop(channels: list[Channel], *, seconds: float) -> tuple[list[float], float]:
    """Send RATE requests a second, each connection in its turn.

    Returns the latencies in seconds and the server's CPU microseconds a request.
    """
    cpu_before = (await channels[0].ask(REQUEST)).cpu_s
    period = len(channels) / RATE
    begin = time.perf_counter() + 0.1

    latencies: list[float] = []

    async def replica(index: int) -> None:
        for turn in range(round(seconds / period)):
            due = begin + index / RATE + turn * period
            await asyncio.sleep(due - time.perf_counter())
            await channels[index].ask(REQUEST)
            latencies.append(time.perf_counter() - due)

    await asyncio.gather(*(replica(index) for index in range(len(channels))))
    cpu_s = (await channels[0].ask(REQUEST)).cpu_s - cpu_before
    return latencies, 1e6 * cpu_s / len(latencies)


async def saturate(channels: list[Channel], *, seconds: float) -> tuple[float, float]:
    """Keep one request outstanding on every connection; return requests/s and server CPU a request (us)."""
    cpu_before = (await channels[0].ask(REQUEST)).cpu_s
    begin = time.perf_counter()

    async def replica(channel: Channel) -> int:
        num_requests = 0
        while time.perf_counter() - begin < seconds:
            await channel.ask(REQUEST)
            num_requests += 1
        return num_requests

    num_requests = sum(await asyncio.gather(*(replica(channel) for channel in channels)))
    elapsed = time.perf_counter() - begin
    cpu_s = (await channels[0].ask(REQUEST)).cpu_s - cpu_before
    return num_requests / elapsed, 1e6 * cpu_s / num_requests


async def serve_until_stdin_closes(kind: str) -> None:
    print(await SERVERS[kind](), flush=True)
    await asyncio.to_thread(sys.stdin.read)


def figures(rounds: dict[str, list[Round]]) -> list[Figure]:
    def median(kind: str, field: str) -> float:
        return statistics.median(getattr(one, field) for one in rounds[kind])

    rows = []
    for field, text, unit, target in (
        ("p50_ms", f"latency p50 at {RATE}/s", "ms", ""),
        ("p99_ms", f"latency p99 at {RATE}/s", "ms", "<= 5"),
        ("open_cpu_us", f"server CPU a request at {RATE}/s", "us", ""),
        ("saturated_rps", "saturated", "requests/s", ">= 20000"),
        ("saturated_cpu_us", "server CPU a request, saturated", "us", ""),
    ):
        for kind, title in PEERS.items():
            rows.append(
                Figure(
                    figure=f"{title}: {text}",
                    value=median(kind, field),
                    unit=unit,
                    target=target if kind == "wire" else "",
                    note=HONEST if kind == "wire" else QUOTED,
                )
            )
    ratio = median("wire", "saturated_rps") / median("http", "saturated_rps")
    rows.append(Figure(figure="saturated, wire over HTTP", value=ratio, unit="times", note=HONEST))
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
    report("wire", figures(rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

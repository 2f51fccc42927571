"""The reward service under load on loopback, while its workers are killed.

    .venv/bin/python benchmarks/reward_service.py [--quick]

8 clients each keep one request outstanding against `cosmos-rl reward-server`, a process with two workers: 1 MB of
video in, its mean brightness out. 10,000 requests (500 with --quick), each with a brightness of its own, so that a
score of another request would be detected. After a third and after two thirds of them the busiest worker is killed
(SIGKILL). Latency is the time from the start of the upload to the score, restarts of workers included.
The floor is the same upload and fetch by the same clients against routes that read the body and reply, in turn with
slices of the run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from _metrics import Figure, report

from cosmos_rl_core.reward.client import RewardClient, ServiceAddress
from cosmos_rl_core.reward.request import GroupSpec, Header, RewardSpec

TOKEN = "benchmark"
NUM_CLIENTS = 8
SHAPE = (4, 256, 341, 3)
"""Frames, height, width, RGB: 1.05 MB."""
REWARD = """
def brightness(group):
    return [float(rollout.media["video"][0, 0, 0, 0]) for rollout in group.rollouts]
"""
SETTINGS = """
port = 0

[[rewards]]
name = "served:brightness"
workers = 2
"""
NUM_SLICES = 5


@dataclass(kw_only=True)
class Tally:
    """The outcomes of the requests of one side."""

    latencies_s: list[float] = field(default_factory=list)
    wrong: int = 0
    lost: int = 0
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    """Of the server and its workers that are alive."""

    @property
    def per_s(self) -> float:
        return len(self.latencies_s) / self.elapsed_s

    def percentile_ms(self, percent: int) -> float:
        return 1000 * statistics.quantiles(self.latencies_s, n=100)[percent - 1]


@contextmanager
def server(*command: str, cwd: Path) -> Iterator[tuple[str, int]]:
    """Run a server; yields the address it prints and its process id."""
    environment = {**os.environ, "WFM_REWARD_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *command], cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield next(word for word in process.stdout.readline().split() if word.startswith("http")), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


@asynccontextmanager
async def clients(url: str) -> AsyncIterator[list[RewardClient]]:
    address = ServiceAddress(enqueue_url=f"{url}/api/reward/enqueue", fetch_url=f"{url}/api/reward/fetch", token=TOKEN)
    made = [RewardClient(address, deadline_s=120) for _ in range(NUM_CLIENTS)]
    await asyncio.gather(*(client.__aenter__() for client in made))
    try:
        yield made
    finally:
        await asyncio.gather(*(client.__aexit__() for client in made))


async def drive(
    made: list[RewardClient], tally: Tally, *, count: int, before: Callable[[int], Awaitable[None]]
) -> None:
    """Have `count` more requests scored. `before` is called with the number of each before it is sent."""
    first = len(tally.latencies_s) + tally.lost + tally.wrong
    numbers = iter(range(first, first + count))
    clip = np.zeros(SHAPE, np.uint8)
    header = Header(
        groups=[GroupSpec(size=1, row={"caption": "a grey clip"})], rewards=[RewardSpec("brightness")], media="video"
    )

    async def client_loop(client: RewardClient) -> None:
        for number in numbers:
            await before(number)
            level = number % 251
            mine = clip.copy()
            mine[0, 0, 0, 0] = level
            start = time.perf_counter()
            try:
                scores = await client.score(header, {"video": [mine]})
            except (ConnectionError, TimeoutError) as error:
                print(f"request {number} is lost: {error}")
                tally.lost += 1
                continue
            if scores == {"brightness": [float(level)]}:
                tally.latencies_s.append(time.perf_counter() - start)
            else:
                tally.wrong += 1

    start = time.perf_counter()
    await asyncio.gather(*(client_loop(client) for client in made))
    tally.elapsed_s += time.perf_counter() - start


def workers_of(pid: int) -> list[int]:
    """Child processes, busiest first."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(map(int, children), key=cpu_s, reverse=True)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(folder: Path, *, num_requests: int) -> tuple[Tally, Tally, list[int]]:
    service, floor = Tally(), Tally()
    killed: list[int] = []
    due = [num_requests // 3, 2 * num_requests // 3]

    async def kill_when_due(number: int) -> None:
        if due and number >= due[0]:
            due.pop(0)
            killed.append(workers_of(pid)[0])
            os.kill(killed[-1], signal.SIGKILL)

    async def nothing(number: int) -> None:
        pass

    slice_size = num_requests // NUM_SLICES
    command = ("-c", "from cosmos_rl_core.cli.main import main; main()", "reward-server", "rewards.toml")
    with server(*command, cwd=folder) as (url, pid), server(__file__, "--floor", cwd=folder) as (floor_url, floor_pid):
        async with clients(url) as ours, clients(floor_url) as bare:
            warm = Tally()
            await drive(ours, warm, count=NUM_CLIENTS, before=nothing)
            for _ in range(NUM_SLICES):
                used = cpu_s(pid)
                await drive(ours, service, count=slice_size, before=kill_when_due)
                service.cpu_s += cpu_s(pid) - used
                used = cpu_s(floor_pid)
                await drive(bare, floor, count=slice_size // 5, before=nothing)
                floor.cpu_s += cpu_s(floor_pid) - used
    return service, floor, killed


def serve_floor() -> None:
    """Routes that read the body and return the expected reply, without workers."""
    import socket

    import msgspec
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from cosmos_rl_core.reward.request import Enqueued, Fetched, read_request

    levels: dict[str, float] = {}

    async def enqueue(request: Request) -> Response:
        body = await request.body()
        found = read_request(body)
        identity = found.header.id
        levels[identity] = float(found.places["video"].read(body)[0, 0, 0, 0, 0])
        return Response(msgspec.json.encode(Enqueued(uuid=identity, id=identity)))

    async def fetch(request: Request) -> Response:
        identity = msgspec.json.decode(await request.body())["uuid"]
        scores = {"brightness": [levels.pop(identity)]}
        return Response(msgspec.json.encode(Fetched(status="done", uuid=identity, id=identity, scores=scores)))

    app = Starlette(
        routes=[
            Route("/api/reward/enqueue", enqueue, methods=["POST"]),
            Route("/api/reward/fetch", fetch, methods=["POST"]),
        ]
    )
    with socket.create_server(("127.0.0.1", 0), backlog=512) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, loop="asyncio", log_level="error", access_log=False, lifespan="off")).run(
            sockets=[sock]
        )


def metrics(service: Tally, floor: Tally, killed: list[int]) -> list[Figure]:
    note = (
        "one machine's cores are shared by the clients, the server and its workers; the floor is the same HTTP with "
        "nothing behind it, by the same clients in the same run"
    )
    done = len(service.latencies_s)
    rows = [
        ("requests scored", done, "requests", ""),
        ("requests lost", service.lost, "requests", "<= 0"),
        ("scores of another request, or wrong", service.wrong, "requests", "<= 0"),
        ("workers killed meanwhile", len(killed), "workers", ">= 2"),
        ("throughput", service.per_s, "requests/s", ""),
        ("latency p50", service.percentile_ms(50), "ms", ""),
        ("latency p99", service.percentile_ms(99), "ms", ""),
        ("longest latency", 1000 * max(service.latencies_s), "ms", ""),
        ("server CPU a request", 1000 * service.cpu_s / done, "ms", ""),
        ("floor: throughput", floor.per_s, "requests/s", ""),
        ("floor: latency p99", floor.percentile_ms(99), "ms", ""),
        ("floor: server CPU a request", 1000 * floor.cpu_s / len(floor.latencies_s), "ms", ""),
        ("throughput over the floor's", service.per_s / floor.per_s, "times", ">= 0.5"),
    ]
    return [Figure(metric=name, value=value, unit=unit, target=target, note=note) for name, value, unit, target in rows]


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--floor"]:
        serve_floor()
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "served.py").write_text(REWARD)
        (folder / "rewards.toml").write_text(SETTINGS)
        num_requests = 500 if "--quick" in arguments else 10_000
        service, floor, killed = asyncio.run(measure(folder, num_requests=num_requests))
    report("reward_service", metrics(service, floor, killed))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

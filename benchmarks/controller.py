"""The controller under the load of 4,096 rollout replicas.

    .venv/bin/python benchmarks/controller.py [--quick] [--once] [--workers N] [--only restart]

The product's controller with its journal, sockets and status file in one process; 8 client processes with 512 fake
workers each (64 with --quick), which connect, beat, request leases, deliver references and reconnect as real ones do;
three fake policies that take every batch and vote at once. Phases:

    join       all connect at once, until the last one is ready
    steady     a heartbeat per worker and second, and RATE groups a second on a fixed timetable (open loop): each a
               request, a grant, and a delivery a second later. Latency runs from the time a request was due
    burst      20,480 leased groups are delivered at once; the grant of a request behind the deliveries of a worker
               proves that they are on disk
    restart    groups are delivered that no policy trains on, others are in work; the server gets SIGKILL and is started
               again at once. From the kill: until a worker is connected again, until all are, until the next commit.
               Then every group delivered before must be trained on, and none be leased again (the journal is read)
    kill       every lease of the window is held, then one client process gets SIGKILL: an eighth of the workers

Beside it two bounds. The bare wire: a process that decodes the same messages over the same connections and grants each
request at once, without ledger, journal and status. Wire and journal: the same, with a record of each grant and each
delivery, flushed as the controller's. The sides take turns; metrics are medians over the rounds, ratios those of the
sides of a round. CPU is the server process's own, over the messages that the clients sent and received.

Where clients and server share few processors, latencies by the clock say more about the machine than about the server.
So the clients' own lag is measured, from the time a request was due until it is sent, and the share of the time in
which the server's thread could have run and had no processor (/proc/PID/schedstat).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _fleet_journal import journal_of, sync_latencies
from _fleet_policy import FakePolicy
from _fleet_server import GROUPS_PER_STEP, NUM_POLICIES
from _metrics import Figure, report

from cosmos_rl_core.wire.handshake import read_token
from cosmos_rl_core.wire.listening import raise_descriptor_limit

HERE = Path(__file__).resolve().parent
NUM_PROCESSES = 8
RATE = 400
"""Groups a second of the steady phase."""
GENERATION_S = 1.0
BURST = 20_480
LATEST_S = 60.0
SIDES = ("bare", "journaled", "controller")
START_S = 0.5
"""Time to pass a command to all client processes before it begins."""


@dataclass(frozen=True, kw_only=True)
class Size:
    workers: int
    steady_s: float
    bursts: int
    rounds: int


FULL = Size(workers=4096, steady_s=12.0, bursts=3, rounds=3)
QUICK = Size(workers=512, steady_s=4.0, bursts=2, rounds=1)


@dataclass(frozen=True, kw_only=True)
class Round:
    """One side's metrics of one round; NaN for what only the controller has."""

    join_s: float
    join_cpu_us: float
    """Server CPU a worker."""
    refused: float
    messages_per_s: float
    cpu_us: float
    """Server CPU a message, steady."""
    p50_ms: float
    p99_ms: float
    lag_p99_ms: float
    """From the time a request was due until its client sent it."""
    waited_share: float
    """Share of the steady phase in which the server's thread waited for a processor."""
    ran_share: float
    """Share in which it ran."""
    sync_p99_ms: float
    """Of a write and fdatasync alone on the journal's disk, meanwhile."""
    delivered_per_s: float
    delivery_cpu_us: float
    burst_cpu_us: float
    """Server CPU a message, in a burst."""
    rss_mib: float
    regranted_s: float = math.nan
    serving_s: float = math.nan
    rejoined_s: float = math.nan
    committed_s: float = math.nan
    restart_cpu_s: float = math.nan
    """Server CPU from its start until all are connected again."""
    replayed_per_s: float = math.nan
    """Records of the journal, without the start of the interpreter."""
    lost: float = math.nan


class Clients:
    """The processes with the fake workers, and the policies."""

    def __init__(self, address: str, token_file: Path, workers: int) -> None:
        self._processes: list[asyncio.subprocess.Process] = []
        self._address, self._token_file, self._workers = address, token_file, workers
        self.policies: list[FakePolicy] = []

    async def start(self) -> None:
        each = self._workers // NUM_PROCESSES
        for index in range(NUM_PROCESSES):
            arguments = (self._address, str(self._token_file), str(index * each), str(each), str(self._workers))
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    str(HERE / "_fleet.py"),
                    *arguments,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    limit=2**24,
                )
            )
        await self.ask("counts")

    async def start_policies(self) -> None:
        token = read_token(self._token_file)
        self.policies = [await FakePolicy.open(self._address, token, index) for index in range(NUM_POLICIES)]

    async def policies_wait(self) -> None:
        """Return when the policies have taken all whole batches."""
        before = -1
        while before != (steps := self.policies[0].steps):
            before = steps
            await asyncio.sleep(2.0)

    async def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Send a command to all processes and return their answers."""
        return await asyncio.gather(*(self._ask(process, {"do": do, **arguments}) for process in self._processes))

    async def _ask(self, process: asyncio.subprocess.Process, command: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(command).encode() + b"\n")
        line = await process.stdout.readline()
        assert line, f"a client process ended in {command}"
        return json.loads(line)

    async def policies_reach(self, steps: int) -> float:
        """Return the time when the policies have taken as many steps."""
        deadline = time.monotonic() + LATEST_S
        while min(policy.steps for policy in self.policies) < steps:
            assert time.monotonic() < deadline, f"step {steps} was not committed within {LATEST_S:g} s"
            await asyncio.sleep(0.01)
        return time.monotonic()

    async def kill_last(self) -> None:
        """SIGKILL the last process."""
        process = self._processes.pop()
        process.kill()
        await process.wait()

    async def close(self) -> None:
        for policy in self.policies:
            policy.close()
        await self.ask("leave")
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


class ServerProcess:
    """A server of one side, its CPU time and memory."""

    def __init__(self, side: str, directory: Path) -> None:
        self.directory = directory
        self._command = [sys.executable, str(HERE / "_fleet_server.py"), side, str(directory)]
        self.address, self.replayed_per_s = "", math.nan
        self._start()

    def _start(self, *former: str) -> None:
        """former: the port of a server that was killed."""
        self._process = subprocess.Popen(
            [*self._command, *former], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address, records, seconds = self._process.stdout.readline().split()
        self.replayed_per_s = int(records) / float(seconds)

    def kill_and_start(self) -> float:
        """SIGKILL the process, start another one in its place, and return the time of the kill."""
        self._process.kill()
        killed_at = time.monotonic()
        self._process.wait()
        self._start(self.address.rpartition(":")[2])
        return killed_at

    @property
    def cpu_s(self) -> float:
        return time.clock_gettime((~self._process.pid << 3) | 2)  # CPUCLOCK_SCHED of another process

    def ran_and_waited_s(self) -> tuple[float, float]:
        """Return the seconds in which its first thread ran, and those in which it waited for a processor."""
        ran_ns, waited_ns, _ = map(int, Path(f"/proc/{self._process.pid}/schedstat").read_text().split())
        return 1e-9 * ran_ns, 1e-9 * waited_ns

    @property
    def rss_mib(self) -> float:
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@asynccontextmanager
async def side_running(side: str, size: Size) -> AsyncIterator[tuple[ServerProcess, Clients]]:
    directory = Path(tempfile.mkdtemp(prefix="controller-", dir=HERE / "out"))
    try:
        server = ServerProcess(side, directory)
        try:
            clients = Clients(server.address, directory / "token", size.workers)
            await clients.start()
            yield server, clients
        finally:
            server.close()  # before the policies, whose loss would be an error
        await clients.close()
    finally:
        shutil.rmtree(directory)


async def run_round(side: str, size: Size) -> Round:
    async with side_running(side, size) as (server, clients):
        joined = await join(server, clients, size)
        if side == "controller":
            await clients.start_policies()
        steady_state = await steady(server, clients, size)
        bursts = [await burst(server, clients, size) for _ in range(size.bursts)]
        rss_mib = server.rss_mib
        restarted = await restart(server, clients, size) if side == "controller" else {}
        killed = {"regranted_s": await kill(clients)} if side == "controller" else {}
        return Round(
            **joined,
            **steady_state,
            delivered_per_s=statistics.median(one[0] for one in bursts),
            delivery_cpu_us=statistics.median(one[1] for one in bursts),
            burst_cpu_us=statistics.median(one[2] for one in bursts),
            rss_mib=rss_mib,
            **restarted,
            **killed,
        )


async def join(server: ServerProcess, clients: Clients, size: Size) -> dict[str, float]:
    cpu_before = server.cpu_s
    answers = await clients.ask("join", begin=time.monotonic() + START_S)
    return {
        "join_s": max(answer["seconds"] for answer in answers),
        "join_cpu_us": 1e6 * (server.cpu_s - cpu_before) / size.workers,
        "refused": float(sum(answer["refused"] for answer in answers)),
    }


async def steady(server: ServerProcess, clients: Clients, size: Size) -> dict[str, float]:
    await asyncio.sleep(1.0)  # the policies have their mesh, the heartbeats their rhythm
    syncing = asyncio.create_task(sync_latencies(HERE / "out", size.steady_s))
    begin = time.monotonic() + START_S
    before = await count(clients)
    cpu_before, counted_at, shares_before = server.cpu_s, time.monotonic(), server.ran_and_waited_s()
    answers = await clients.ask("steady", begin=begin, seconds=size.steady_s, rate=RATE, generation_s=GENERATION_S)
    cpu_s, messages = server.cpu_s - cpu_before, await count(clients) - before
    elapsed = time.monotonic() - counted_at
    ran, waited = ((now - then) / elapsed for then, now in zip(shares_before, server.ran_and_waited_s()))
    cuts = statistics.quantiles((one for answer in answers for one in answer["latencies"]), n=100)
    lags = statistics.quantiles((one for answer in answers for one in answer["lags"]), n=100)
    return {
        "messages_per_s": messages / elapsed,
        "cpu_us": 1e6 * cpu_s / messages,
        "p50_ms": 1000 * cuts[49],
        "p99_ms": 1000 * cuts[98],
        "lag_p99_ms": 1000 * lags[98],
        "ran_share": ran,
        "waited_share": waited,
        "sync_p99_ms": 1000 * statistics.quantiles(await syncing, n=100)[98],
    }


async def burst(server: ServerProcess, clients: Clients, size: Size) -> tuple[float, float, float]:
    """Return durable deliveries a second, and the server's CPU microseconds a delivery and a message."""
    await clients.ask("lease", each=BURST // size.workers)
    before, cpu_before = await count(clients), server.cpu_s
    answers = await clients.ask("deliver", begin=time.monotonic() + START_S)
    delivered = sum(answer["delivered"] for answer in answers)
    cpu_us, messages = 1e6 * (server.cpu_s - cpu_before), await count(clients) - before
    return delivered / max(answer["seconds"] for answer in answers), cpu_us / delivered, cpu_us / messages


async def restart(server: ServerProcess, clients: Clients, size: Size) -> dict[str, float]:
    """Kill the server while groups of two steps or more wait and others are in work; check that none is lost."""
    each = -(-2 * GROUPS_PER_STEP // size.workers)
    await clients.ask("lease", each=each + 1)
    await clients.policies_wait()
    for policy in clients.policies:
        policy.votes.clear()
    before, regranted = clients.policies[0].steps, await count_regranted(clients)
    await clients.ask("deliver_some", each=each)
    killed_at = await asyncio.to_thread(server.kill_and_start)
    rejoined = await clients.ask("rejoined", generation=1)
    cpu_s = server.cpu_s
    for policy in clients.policies:
        policy.votes.set()
    committed_at = await clients.policies_reach(before + 1)
    await clients.policies_wait()
    found = journal_of(server.directory)
    return {
        "serving_s": min(one["first"] for one in rejoined) - killed_at,
        "rejoined_s": max(one["last"] for one in rejoined) - killed_at,
        "committed_s": committed_at - killed_at,
        "restart_cpu_s": cpu_s,
        "replayed_per_s": server.replayed_per_s,
        "lost": float(await count_regranted(clients) - regranted + found.lost + found.trained_twice),
    }


async def run_restart(size: Size) -> dict[str, float]:
    """Run the phase of the restart alone."""
    async with side_running("controller", size) as (server, clients):
        joined = await join(server, clients, size)
        await clients.start_policies()
        return {"workers": size.workers, "join_s": joined["join_s"], **await restart(server, clients, size)}


async def count_regranted(clients: Clients) -> int:
    """Return the number of leases that were not the first of their sample."""
    return sum(one["count"] for one in await clients.ask("regranted"))


async def kill(clients: Clients) -> float:
    """Return the seconds from the death of an eighth of the workers until others hold all their leases."""
    await clients.policies_wait()  # a step would make the held requests those of old weights
    held = await clients.ask("fill", each=100)
    lost, before = held[-1]["held"], await count_regranted(clients)
    killed_at = time.monotonic()
    await clients.kill_last()
    while True:
        found = await clients.ask("regranted")
        if sum(one["count"] for one in found) - before >= lost:
            return max(one["at"] for one in found) - killed_at
        assert time.monotonic() - killed_at < 60, f"{lost} leases of killed workers were not granted again: {found}"
        await asyncio.sleep(0.1)


async def count(clients: Clients) -> int:
    """Return the messages to and from the server so far."""
    answers = await clients.ask("counts")
    return sum(one["sent"] + one["received"] for one in answers) + sum(one.messages for one in clients.policies)


NOTES = {
    "controller": "controller: every grant waits for its record on disk (group commit), as in a run",
    "bare": "bare wire: the same messages without ledger, journal, status and policies: sockets, HMAC, msgpack",
    "journaled": "wire and journal: the bare wire, with a record on disk of each grant and delivery",
}
EACH = (
    ("join_s", "storm of joins: until all are ready", "s", ""),
    ("join_cpu_us", "storm of joins: server CPU a worker", "us", ""),
    ("messages_per_s", "steady: messages", "a second", ""),
    ("cpu_us", "steady: server CPU a message", "us", "<= 10"),
    ("ran_share", "steady: share of the time in which the server ran", "", ""),
    ("waited_share", "steady: share in which it waited for a processor", "", ""),
    ("lag_p99_ms", "steady: lag of the clients behind their timetable, p99", "ms", ""),
    ("p50_ms", "steady: lease -> grant p50", "ms", ""),
    ("p99_ms", "steady: lease -> grant p99", "ms", "<= 10"),
    ("sync_p99_ms", "steady: fdatasync alone on the same disk, p99", "ms", ""),
    ("delivered_per_s", "burst: deliveries of references, durable", "a second", ">= 20000"),
    ("delivery_cpu_us", "burst: server CPU a delivery", "us", ""),
    ("burst_cpu_us", "burst: server CPU a message", "us", "<= 10"),
    ("rss_mib", "memory of the server (RSS)", "MiB", "<= 200"),
    ("serving_s", "restart: SIGKILL until a worker is connected again", "s", "<= 5"),
    ("rejoined_s", "restart: SIGKILL until all workers are connected again", "s", "<= 5"),
    ("committed_s", "restart: SIGKILL until the next commit, after all are back", "s", ""),
    ("restart_cpu_s", "restart: server CPU until all workers are connected again", "s", ""),
    ("replayed_per_s", "restart: records of the journal replayed", "a second", ""),
    ("lost", "restart: groups lost, generated or trained again", "", "<= 0"),
    ("regranted_s", "an eighth killed: until others hold their leases", "s", "<= 3"),
)


RATIOS = (
    ("cpu_us", "steady: server CPU a message", "bare", "<= 2"),
    ("cpu_us", "steady: server CPU a message", "journaled", ""),
    ("p99_ms", "steady: lease -> grant p99", "journaled", "<= 2"),
    ("delivered_per_s", "burst: deliveries of references, durable", "bare", ">= 0.5"),
    ("delivered_per_s", "burst: deliveries of references, durable", "journaled", ">= 0.5"),
    ("delivery_cpu_us", "burst: server CPU a delivery", "bare", ""),
    ("delivery_cpu_us", "burst: server CPU a delivery", "journaled", "<= 2"),
)
"""What is compared within a round: the server's own work should cost no more than what it cannot do without."""


def metrics(rounds: dict[str, list[Round]]) -> list[Figure]:
    def median(side: str, field: str) -> float:
        return statistics.median(getattr(one, field) for one in rounds[side])

    rows = [
        Figure(
            metric=f"{text}: {side}",
            value=median(side, field),
            unit=unit,
            target=target if side == "controller" else "",
            note=NOTES[side],
        )
        for field, text, unit, target in EACH
        for side in SIDES
        if not math.isnan(median(side, field))
    ]
    for field, text, bound, target in RATIOS:
        ratio = statistics.median(
            getattr(ours, field) / getattr(other, field) for ours, other in zip(rounds["controller"], rounds[bound])
        )
        rows.append(Figure(metric=f"{text}: controller over {bound}", value=ratio, unit="times", target=target))
    return rows


def main(arguments: Sequence[str]) -> int:
    raise_descriptor_limit()
    size = QUICK if "--quick" in arguments else FULL
    if "--once" in arguments:
        size = replace(size, rounds=1)
    if "--workers" in arguments:
        size = replace(size, workers=int(arguments[arguments.index("--workers") + 1]))
    if "--only" in arguments:
        if arguments[arguments.index("--only") + 1 :][:1] != ["restart"]:
            raise SystemExit("--only restart is the phase that can run alone")
        print(asyncio.run(run_restart(size)))
        return 0
    (HERE / "out").mkdir(exist_ok=True)
    rounds: dict[str, list[Round]] = {side: [] for side in SIDES}
    for number in range(size.rounds):
        for side in SIDES:
            print(f"round {number + 1}: {side}, {size.workers} workers ...", flush=True)
            rounds[side].append(asyncio.run(run_round(side, size)))
            print(f"    {rounds[side][-1]}", flush=True)
    report("controller", metrics(rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

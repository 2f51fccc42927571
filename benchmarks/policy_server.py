"""The policy server with eight robots, beside a bare loop of the same messages.

    .venv/bin/python benchmarks/policy_server.py [--quick]

Each round starts a server process, ours or the bare loop, and eight connections of openpi's protocol from this process,
which alternate. Each sends an observation of two cameras of 224 x 224 pixels and waits for a chunk of 50 actions: ten
times a second on a fixed timetable, and then again at once. Figures are medians over the rounds. A pass of the policy
is a pause of 20 ms, so that no model competes for the processor.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop
from _metrics import Figure, report
from _policy_server import CAMERAS, PASS_S, SIDE, STATE
from websockets.asyncio.client import connect

from cosmos_rl_vla.serving.openpi import packed, unpacked

ROBOTS, EVERY_S = 8, 0.1
NOTES = (
    "bare loop: websockets without decoding, checks, batches or threads; a timer in place of the policy",
    "inference: the time that the policy works, on the robot's own pass or on the pass that it waits for",
    "own pass alone: the wait for the pass of others, at most one, counts as overhead",
)


@dataclass(frozen=True, kw_only=True)
class PolicyRound:
    """p99 in milliseconds of one server, at ten requests a second and robot, and saturated."""

    overhead_ms: float
    own_ms: float
    saturated_ms: float
    chunks_per_s: float


async def drive(port: int, *, seconds: float) -> PolicyRound:
    images = {f"observation/{name}": np.full((SIDE, SIDE, 3), 7, np.uint8) for name in CAMERAS}
    message = packed({**images, "observation/state": np.zeros(STATE, np.float32), "prompt": "open the door"})

    async def robot(number: int, rows: list[tuple[float, float]], *, every_s: float) -> None:
        async with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None) as connection:
            await connection.recv()
            await connection.send(message)  # the first is not measured
            await connection.recv()
            due = time.perf_counter() + number * EVERY_S / ROBOTS
            end = time.perf_counter() + seconds
            while (now := time.perf_counter()) < end:
                if every_s:
                    await asyncio.sleep(max(0.0, due - now))
                    due += every_s
                started = time.perf_counter()
                await connection.send(message)
                answer = unpacked(await connection.recv())
                took_ms, timing = 1000 * (time.perf_counter() - started), answer["server_timing"]
                rows.append((took_ms - timing["infer_ms"], timing["wait_ms"]))

    paced: list[tuple[float, float]] = []
    saturated: list[tuple[float, float]] = []
    for rows, every_s in ((paced, EVERY_S), (saturated, 0.0)):
        await asyncio.gather(*(robot(number, rows, every_s=every_s) for number in range(ROBOTS)))
    own, wait = np.array(paced).T
    return PolicyRound(
        overhead_ms=float(np.percentile(own - wait, 99)),
        own_ms=float(np.percentile(own, 99)),
        saturated_ms=float(np.percentile(np.subtract(*np.array(saturated).T), 99)),
        chunks_per_s=len(saturated) / seconds,
    )


def measure(kind: str, *, seconds: float) -> PolicyRound:
    command = [sys.executable, str(Path(__file__).with_name("_policy_server.py")), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            return uvloop.run(drive(int(server.stdout.readline()), seconds=seconds))
        finally:
            server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of two seconds")
    quick = parser.parse_args().quick
    rounds = {kind: [] for kind in ("bare", "ours")}
    for _ in range(1 if quick else 5):
        for kind, measured in rounds.items():
            measured.append(measure(kind, seconds=2 if quick else 10))
    figures = []
    for kind, name in (("ours", "policy server"), ("bare", "bare loop")):
        target = "<= 5" if kind == "ours" else ""
        rows = (
            ("overhead_ms", "round trip minus inference, p99 at 10/s", "ms", target),
            ("own_ms", "round trip minus own pass alone, p99 at 10/s", "ms", ""),
            ("saturated_ms", "round trip minus inference, p99 saturated", "ms", ""),
            ("chunks_per_s", f"chunks, saturated, passes of {1000 * PASS_S:g} ms", "1/s", ""),
        )
        for field, metric, unit, bound in rows:
            value = statistics.median(getattr(each, field) for each in rounds[kind])
            note = NOTES[len(figures) % len(NOTES)]
            figures.append(Figure(metric=f"{name}: {metric}", value=value, unit=unit, target=bound, note=note))
    report("policy_server", figures)


if __name__ == "__main__":
    main()

"""SIGKILL of one of three policies at a random instant, again and again: this framework, and torchft beside it."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import _elastic_toy as toy
from _elastic_runs import CACHE, ENVIRONMENT, PROGRAM, Lines, end, log_of, pid_of, started, wait_until, write_recipe

PEER = str(Path(__file__).with_name("_elastic_peer.py"))
SETTLED_STEPS = 20
"""Steps with all replicas before the next kill."""
WITHIN_S = 0.5
"""A kill comes at a random instant of so long a time."""
GIVEN_UP_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What followed one kill."""

    recovery_s: float
    """From the kill to the first commit of a step without the victim; infinite if none came."""
    survivors_lost: int = 0
    """Other replicas that died of it."""


def kill_ours(kills: int, draw: random.Random) -> tuple[list[Kill], float]:
    """Return what followed each kill, and the median step with all replicas, in seconds."""
    path, run_dir = write_recipe("kills", toy.recipe())
    log, lines = log_of("kills"), Lines(run_dir / "metrics.jsonl")
    found: list[Kill] = []
    step_s: list[float] = []
    with started([PROGRAM, "run", str(path)], log):
        for _ in range(kills):
            step_s += _settle(lines, log)
            time.sleep(draw.random() * WITHIN_S)
            pid = pid_of(run_dir, f"policy-{draw.randrange(toy.REPLICAS)}")
            assert pid is not None
            lines.new()
            os.kill(pid, signal.SIGKILL)
            found.append(Kill(recovery_s=_second_without(lines, time.monotonic())))
    return found, median(step_s)


def _second_without(lines: Lines, killed_at: float) -> float:
    """Return the seconds to the second reported step without the victim: the first may be a commit from before."""
    reported = 0
    while (waited_s := time.monotonic() - killed_at) < GIVEN_UP_S:
        reported += sum(row["members"] < toy.REPLICAS for row in lines.new())
        if reported >= 2:
            return waited_s
        time.sleep(0.001)
    return math.inf


def _settle(lines: Lines, log: Path) -> list[float]:
    """Wait for steps with all replicas and return their seconds."""
    seen: list[float] = []

    def enough() -> bool:
        seen.extend(row["step_s"] for row in lines.new() if row["members"] == toy.REPLICAS)
        return len(seen) > SETTLED_STEPS

    wait_until(enough, f"{SETTLED_STEPS} steps of {toy.REPLICAS} replicas", log=log)
    return seen[1:]


class Torchft:
    """A lighthouse and three replicas, which are started again when they die."""

    def __init__(self, python: str, stack: ExitStack) -> None:
        self._python = python
        self.log = log_of("torchft")
        with self.log.open("ab") as output:
            lighthouse = subprocess.Popen(
                [python, PEER, "lighthouse", str(toy.REPLICAS - 1)],
                env=ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )
        stack.callback(end, lighthouse)
        assert lighthouse.stdout is not None
        self._address = lighthouse.stdout.readline().decode().strip()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._lines: dict[int, Lines] = {}
        for place in range(toy.REPLICAS):
            self._start(place)
        stack.callback(self._close)

    def _start(self, place: int) -> None:
        out = CACHE / f"torchft-{place}.jsonl"
        out.unlink(missing_ok=True)
        with self.log.open("ab") as output:
            self._processes[place] = subprocess.Popen(
                [self._python, PEER, "replica", f"replica-{place}", self._address, str(out)],
                env=ENVIRONMENT,
                stdout=output,
                stderr=output,
            )
        self._lines[place] = Lines(out)

    def _close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def settle(self) -> list[float]:
        """Wait until every replica has committed steps of all replicas; return the seconds of the first one's."""
        times: dict[int, list[float]] = {place: [] for place in self._lines}

        def enough() -> bool:
            for place, lines in self._lines.items():
                times[place] += [row["time"] for row in lines.new() if row["participants"] == toy.REPLICAS]
            return min(map(len, times.values())) >= SETTLED_STEPS

        wait_until(enough, f"{SETTLED_STEPS} steps of {toy.REPLICAS} replicas", log=self.log)
        return [after - before for before, after in pairwise(times[0])]

    def kill(self, victim: int) -> Kill:
        for lines in self._lines.values():
            lines.new()
        self._processes[victim].kill()
        killed_at = time.monotonic()
        others = {place: lines for place, lines in self._lines.items() if place != victim}
        recovered_at = math.inf
        while math.isinf(recovered_at) and time.monotonic() - killed_at < GIVEN_UP_S:
            rows = [row for lines in others.values() for row in lines.new()]
            times = [row["time"] for row in rows if row["participants"] < toy.REPLICAS and row["time"] > killed_at]
            recovered_at = min(times, default=math.inf)
            if all(self._processes[place].poll() is not None for place in others):
                break
            time.sleep(0.001)
        lost = [place for place in others if self._processes[place].poll() is not None]
        for place in (victim, *lost):
            self._processes[place].wait()
            self._start(place)
        return Kill(recovery_s=recovered_at - killed_at, survivors_lost=len(lost))


def kill_torchft(python: str, kills: int, draw: random.Random) -> tuple[list[Kill], float]:
    """As `kill_ours`."""
    found: list[Kill] = []
    step_s: list[float] = []
    with ExitStack() as stack:
        peer = Torchft(python, stack)
        for _ in range(kills):
            step_s += peer.settle()
            time.sleep(draw.random() * WITHIN_S)
            found.append(peer.kill(draw.randrange(toy.REPLICAS)))
    return found, median(step_s)

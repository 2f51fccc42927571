"""Runs a command and reads the use of its processes from /proc: time to the first step, memory, CPU."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

POLL_S = 0.02
MEMORY_EVERY_S = 0.2
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Time and memory of a command, over all its processes."""

    first_step_s: float
    """From the command to the first line of its steps file."""
    cpu_s: Mapping[int, float]
    """CPU seconds until this many steps were done; two that end within a poll are one entry."""
    peak_rss: int
    """Bytes: each process's own peak (VmHWM), added up; pages that processes share count in each. 0 if not read."""
    peak_pss: int
    """Bytes: the most at one moment, shared pages counted once. 0 if not read."""


class CommandFailed(Exception):
    """The command failed; has the end of its output."""


def watch(
    command: Sequence[str], *, steps: Path, log: Path, environment: Mapping[str, str], timeout_s: float, memory: bool
) -> Watched:
    """Run `command` to its end. It writes a line per finished step to `steps`, which must not exist yet.

    memory: read memory too, which slows the command down: adding up the pages of its processes took 30 ms of a core.
    """
    started = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            tree = _follow(process, steps=steps, started=started, timeout_s=timeout_s, memory=memory)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        raise CommandFailed(f"{command[0]} ended with {process.returncode}:\n{end}")
    return Watched(
        first_step_s=tree.first_step_s,
        cpu_s=tree.cpu_s,
        peak_rss=sum(tree.peak_rss.values()),
        peak_pss=tree.peak_pss,
    )


@dataclass(slots=True)
class _Tree:
    """The peaks so far of a process and its descendants."""

    first_step_s: float = 0.0
    peak_pss: int = 0
    peak_rss: dict[int, int] = field(default_factory=dict)
    cpu_s: dict[int, float] = field(default_factory=dict)
    _cpu_of: dict[int, float] = field(default_factory=dict)
    """CPU seconds by process, those that ended included."""

    def look_at_memory(self, pids: Sequence[int]) -> None:
        pss = 0
        for pid in pids:
            self.peak_rss[pid] = _kibibytes(f"/proc/{pid}/status", "VmHWM") or self.peak_rss.get(pid, 0)
            pss += _kibibytes(f"/proc/{pid}/smaps_rollup", "Pss")
        self.peak_pss = max(self.peak_pss, pss)

    def look_at_cpu(self, pids: Sequence[int], *, steps: int) -> None:
        for pid in pids:
            self._cpu_of[pid] = _cpu_s(pid) or self._cpu_of.get(pid, 0.0)
        self.cpu_s[steps] = sum(self._cpu_of.values())


def _follow(process: subprocess.Popen[bytes], *, steps: Path, started: float, timeout_s: float, memory: bool) -> _Tree:
    tree = _Tree()
    done, memory_due = 0, started
    while process.poll() is None:
        now = time.perf_counter()
        if now > started + timeout_s:
            raise CommandFailed(f"{process.args!r} took longer than {timeout_s:g} s")
        lines = steps.read_bytes().count(b"\n") if steps.exists() else 0
        if lines > done:
            tree.first_step_s = tree.first_step_s or now - started
            tree.look_at_cpu(_descendants(process.pid), steps=lines)
            done = lines
        if memory and now >= memory_due:
            tree.look_at_memory(_descendants(process.pid))
            memory_due = now + MEMORY_EVERY_S
        time.sleep(POLL_S)
    return tree


def _descendants(pid: int) -> list[int]:
    """The process and its descendants that still run."""
    found = [pid]
    for parent in found:  # grows while it is read
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in _read(children).split()]
    return found


def _kibibytes(file: str, name: str) -> int:
    """A field of the form "Name:   123 kB", in bytes; 0 where the process is gone."""
    for line in _read(Path(file)).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu_s(pid: int) -> float:
    """User and system time so far; 0 where the process is gone."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""

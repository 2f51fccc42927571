"""Processes of a run on this machine, found by the log that they write to, and the stacks of their threads.

py-spy reads another process's stacks, which needs permission to trace it. Without py-spy or permission the process gets
SIGURG, on which workers write the stacks of all threads to their log (`processes.write_stacks_on_signal`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cosmos_rl_core.processes import STACKS

DUMP_S = 10.0
WRITE_S = 5.0
"""Maximum wait for the stacks in the log."""
STEP_S = 0.05
QUIET_S = 0.5
"""A log without a new byte for this long has all stacks; lines of ranks pass through their agent."""
FIRST_LINE = b"Current thread 0x"
"""In each dump of faulthandler, once."""
DISK_LOOKS, DISK_S = 3, 0.1
"""Number of looks, and seconds between them, at a process that waits for a disk."""
STATES = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "Z": "has ended", "D": "waits for a disk"}


HEAD = re.compile(r"(?:Current t|T)hread (?:0x[0-9a-f]+|\d+)(?: \(\w+\): \"(?P<name>.*)\")?")
FRAME = re.compile(r"File \"(?P<file>.+)\", line (?P<line>\d+) in (?P<name>\S+)")
SPIED = re.compile(r"^    (?P<name>\S.*) \((?P<file>.+):(?P<line>\d+)\)$")
IDLE = (
    "/threading.py",
    "/concurrent/futures/",
    "/asyncio/",
    "/selectors.py",
    "<frozen runpy>",
    "cosmos_rl_core/processes.py",
    "cosmos_rl_core/observe/trace.py",
    "cosmos_rl_core/observe/machine.py",
    "cosmos_rl_core/workers/main.py",
    "cosmos_rl_core/workers/rank_main.py",
)
"""Files whose frames are those of a thread that waits for work, or begin every thread."""


class InspectedProcess(NamedTuple):
    """A process of a worker, or one that it has started."""

    pid: int
    worker: str
    rank: str
    """Of a policy of several ranks; empty in others."""
    state: str
    """As in /proc/PID/stat."""
    writes_stacks: bool
    """Whether it has a handler for the signal."""

    @property
    def title(self) -> str:
        rank = f" rank {self.rank}" if self.rank else ""
        return f"{self.worker}{rank}, process {self.pid}"

    @property
    def trouble(self) -> str:
        """ "process 12 is stopped (SIGSTOP)"; empty for one that runs."""
        return f"process {self.pid} {STATES[self.state]}" if self.state in STATES else ""


def worker_processes(run_dir: Path) -> list[InspectedProcess]:
    """Return the processes of a run's workers on this machine, by worker and pid; none elsewhere than on Linux."""
    logs = {os.path.realpath(path): path.stem for path in run_dir.glob("logs/*.log")}
    parents: dict[int, int] = {}
    workers: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # it has ended, or is of another user
            pid = int(entry.name)
            parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if (log := os.readlink(entry / "fd" / "2")) in logs:
                workers[pid] = logs[log]
    mains = {pid for pid, worker in workers.items() if workers.get(parents[pid]) != worker}
    for pid in parents:  # ranks write to their agent
        ancestor = parents[pid]
        while ancestor in parents and ancestor not in workers:
            ancestor = parents[ancestor]
        if pid not in workers and ancestor in workers:
            workers[pid] = workers[ancestor]
    processes = [one for pid, worker in workers.items() if (one := _process(pid, worker)) is not None]
    ranked = {one.worker for one in processes if one.rank}
    # without the ranks' agent; of its children that have ended, whose variables are gone, each was a rank
    ended = {one.pid for one in processes if one.state == "Z" and one.worker in ranked and parents[one.pid] in mains}
    processes = [one for one in processes if one.rank or one.worker not in ranked or one.pid in ended]
    processes = [_watched(one, is_main=one.pid in mains | ended) for one in processes]
    return sorted(processes, key=lambda one: (one.worker, one.rank, one.pid))


def _process(pid: int, worker: str) -> InspectedProcess | None:
    place = Path(f"/proc/{pid}")
    try:
        state = (place / "stat").read_text().rpartition(")")[2].split()[0]
        caught = next(line.split()[1] for line in (place / "status").read_text().splitlines() if "SigCgt" in line)
        variables = (place / "environ").read_bytes().split(b"\0")
        command = (place / "cmdline").read_bytes()
    except (OSError, StopIteration):
        return None
    ranks = [word.partition(b"=")[2].decode() for word in variables if word.startswith(b"RANK=")]
    rank = ranks[0] if ranks and b"rank_main" in command else ""
    return InspectedProcess(pid, worker, rank, state, bool(int(caught, 16) >> (STACKS - 1) & 1))


def _watched(process: InspectedProcess, *, is_main: bool) -> InspectedProcess:
    """Return the process; with the state "R" if that of /proc is no trouble.

    Every process reads a disk now and then: one is said to wait for it if it is seen so DISK_LOOKS times. A zombie is a
    fault only of a worker's main process or a rank; other children that have ended wait for their parent.
    """
    if process.state == "Z" and not is_main:
        return process._replace(state="R")
    for _ in range(DISK_LOOKS - 1):
        if process.state != "D":
            break
        time.sleep(DISK_S)
        again = _process(process.pid, process.worker)
        process = process._replace(state=again.state if again else "Z")
    return process


def stacks_of(processes: Iterable[InspectedProcess], run_dir: Path) -> str:
    """Return the stacks of processes, each under a title, with the way they were read."""
    parts = []
    spy = _py_spy()
    for process in processes:
        if process.trouble:
            parts.append(f"{process.title}: no stacks, as it {STATES[process.state]}")
            continue
        text = _spied(spy, process.pid) if spy else ""
        text = text or (
            _signalled(process, run_dir / "logs" / f"{process.worker}.log") if process.writes_stacks else ""
        )
        if text:
            parts.append(f"{process.title}\n{busy_threads(text)}")
    return "\n\n".join(parts)


def busy_threads(text: str) -> str:
    """Return the threads that do not wait for work, innermost call first, of the output of faulthandler or py-spy."""
    threads: list[tuple[str, list[tuple[str, str]]]] = []
    for line in text.splitlines():
        if (match := FRAME.search(line) or SPIED.search(line)) and threads:
            place = f"{'/'.join(match['file'].split('/')[-3:])}:{match['line']}"
            threads[-1][1].append((f"/{match['file']}", f"{match['name']} ({place})"))
        elif match := HEAD.search(line):
            threads.append((match["name"] or "", []))
    shown = []
    for name, frames in threads:
        while frames and any(part in frames[-1][0] for part in IDLE):
            frames.pop()
        if frames:
            shown.append("\n".join([f"  thread {name}".rstrip(), *(f"    {frame}" for _, frame in frames)]))
    if not threads:
        return text.rstrip()  # a message
    return "\n".join(shown) or f"  all {len(threads)} threads wait for work"


def _py_spy() -> str:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy") or ""


def _spied(spy: str, pid: int) -> str:
    """Return the output of py-spy; empty if it may not trace the process."""
    try:
        done = subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=DUMP_S)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


def _signalled(process: InspectedProcess, log: Path) -> str:
    """Return the lines that a process adds to its log on the signal."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        try:
            os.kill(process.pid, STACKS)
        except ProcessLookupError:
            return "it has ended meanwhile"
        text, deadline, last = b"", time.monotonic() + WRITE_S, time.monotonic()
        while time.monotonic() < deadline and (FIRST_LINE not in text or time.monotonic() - last < QUIET_S):
            if new := file.read():
                text, last = text + new, time.monotonic()
            else:
                time.sleep(STEP_S)
    if FIRST_LINE not in text:
        return f"no answer to {signal.Signals(STACKS).name} within {WRITE_S:g} s: it is in code that blocks signals"
    return text.decode(errors="replace")

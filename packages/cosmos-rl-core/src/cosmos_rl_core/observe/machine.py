"""system/NAME.jsonl: processor time and memory of each process of a run, and the state of its machine.

with machine_log(run_dir, "rollout-0"):     # samples every few seconds, in a thread, until the end
    ...

A process counts itself and the processes that it has started: simulators, an engine's. One process of each machine adds
the machine's state: the one that holds the lock system/HOST.lock; after its end another one takes it. A process
writes into its own machine's directory of the run, as it does its spans.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from cosmos_rl_core.gpus import Gpu, Nvml
from cosmos_rl_core.observe.thinned import ThinnedLog
from cosmos_rl_core.processes import cpu_s, process_tree, resident_bytes

FOLDER = "system"
EVERY_S = 5.0
"""First interval of samples; it doubles when a file is full."""
MOST_LINES, MOST_BYTES = 2000, 2**20
"""Of a file: then every second line is dropped."""


class MachineMetrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A machine: amounts now, rates since the last sample."""

    cpus: int
    cpu: float
    """Busy processors: 2.0 are two."""
    memory: int
    """Bytes that no program can get."""
    memory_total: int
    disk_free: int
    """Bytes, where the run's directory is."""
    disk_total: int
    received: float
    """Bytes a second, of all interfaces but loopback."""
    sent: float
    gpus: tuple[Gpu, ...] = ()


class MachineSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of system/NAME.jsonl."""

    time: float
    """In Unix seconds."""
    process: str
    host: str
    pid: int
    cpu: float
    """Processors that the process and those that it has started have kept busy since the last sample."""
    memory: int
    """Their resident bytes; pages that several share are counted in each."""
    processes: int = 1
    """Their number."""
    machine: MachineMetrics | None = None
    """Of one process of each machine."""


@contextlib.contextmanager
def machine_log(run_dir: Path, process: str, *, alone: bool = False) -> Iterator[None]:
    """Write system/PROCESS.jsonl while the body runs, and a last line at its end.

    alone: without the processes that it has started, such as those of a controller, which are counted by themselves.
    """
    log = _Log(run_dir, process, alone=alone)
    ended = threading.Event()
    thread = threading.Thread(target=log.run, args=(ended,), name="machine", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Log:
    def __init__(self, run_dir: Path, process: str, *, alone: bool) -> None:
        self._run_dir, self._folder = run_dir, run_dir / FOLDER
        self._process, self._alone = process, alone
        self._host = socket.gethostname()
        self._lock: IO[bytes] | None = None
        self._nvml = Nvml(None)
        self._before = _Counts.now(self._tree())

    def _tree(self) -> list[int]:
        return [os.getpid()] if self._alone else process_tree(os.getpid())

    def run(self, ended: threading.Event) -> None:
        """Sample until the event is set. A directory that is full or removed ends the samples, not the run."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as resources:
            self._folder.mkdir(exist_ok=True)
            path = self._folder / f"{self._process}.jsonl"
            log = ThinnedLog(path, every_s=EVERY_S, most_lines=MOST_LINES, most_bytes=MOST_BYTES)
            is_over = False
            while not is_over:
                is_over = ended.wait(log.every_s)
                log.add(msgspec.json.encode(self._sample(resources)))

    def _sample(self, resources: contextlib.ExitStack) -> MachineSample:
        tree = self._tree()
        before, now = self._before, _Counts.now(tree)
        self._before = now
        elapsed = max(now.at - before.at, 1e-3)
        cpu = sum(seconds - before.cpu_s.get(pid, 0.0) for pid, seconds in now.cpu_s.items())
        return MachineSample(
            time=round(time.time(), 2),
            process=self._process,
            host=self._host,
            pid=os.getpid(),
            cpu=round(cpu / elapsed, 3),
            memory=sum(map(resident_bytes, tree)),
            processes=len(tree),
            machine=self._machine(before, now, elapsed) if self._holds_lock(resources) else None,
        )

    def _holds_lock(self, resources: contextlib.ExitStack) -> bool:
        """Return whether this process samples the machine; the first one that asks does, until it ends."""
        if self._lock is not None:
            return True
        name = re.sub(r"[^\w.-]", "_", self._host)
        lock = (self._folder / f"{name}.lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        self._lock = resources.enter_context(lock)
        self._nvml = Nvml.open()
        return True

    def _machine(self, before: _Counts, now: _Counts, elapsed: float) -> MachineMetrics:
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in _text("/proc/meminfo").splitlines()}
        disk = shutil.disk_usage(self._run_dir)
        return MachineMetrics(
            cpus=os.cpu_count() or 1,
            cpu=round((now.busy_s - before.busy_s) / elapsed, 3),
            memory=sizes.get("MemTotal", 0) - sizes.get("MemAvailable", 0),
            memory_total=sizes.get("MemTotal", 0),
            disk_free=disk.free,
            disk_total=disk.total,
            received=round((now.received - before.received) / elapsed, 1),
            sent=round((now.sent - before.sent) / elapsed, 1),
            gpus=self._nvml.read(),
        )


class _Counts(NamedTuple):
    """Counters of the kernel, from which rates follow."""

    at: float
    cpu_s: dict[int, float]
    """By process."""
    busy_s: float
    received: int
    sent: int

    @classmethod
    def now(cls, tree: Sequence[int]) -> _Counts:
        return cls(time.monotonic(), {pid: cpu_s(pid) for pid in tree}, busy_s(), *network_bytes())


def busy_s(stat: str = "/proc/stat") -> float:
    """Return the seconds that the machine's processors have worked since its start: all but idle and waiting."""
    words = _text(stat).partition("\n")[0].split()[1:9]  # user nice system idle iowait irq softirq steal
    ticks = [int(word) for number, word in enumerate(words) if number not in (3, 4)]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def network_bytes(table: str = "/proc/net/dev") -> tuple[int, int]:
    """Return the bytes that were received and sent since the start, on all interfaces but loopback."""
    received = sent = 0
    for line in _text(table).splitlines()[2:]:
        name, _, numbers = line.partition(":")
        words = numbers.split()
        if name.strip() != "lo" and len(words) > 8:
            received, sent = received + int(words[0]), sent + int(words[8])
    return received, sent


def _text(path: str) -> str:
    """The content of a file of /proc; empty elsewhere than on Linux."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""

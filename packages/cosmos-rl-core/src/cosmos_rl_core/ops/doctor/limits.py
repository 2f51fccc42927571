"""Checks of processors, memory, open files, shared memory and disk, with the limits of a container."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cosmos_rl_core.interfaces import Check
from cosmos_rl_core.processes import rdma_devices

MIB, GIB = 2**20, 2**30
CGROUP = Path("/sys/fs/cgroup")
SHARED = Path("/dev/shm")
FEW_FILES = 4096
LITTLE_SHARED, SMALL_SHARED = 64 * MIB, 2 * GIB
"""The first is the default of container runtimes."""
LITTLE_DISK, SMALL_DISK = GIB, 20 * GIB
WRITTEN = 64 * MIB
SLOW_DISK = 100e6
"""Bytes per second."""


def processors(cgroup: Path = CGROUP) -> Iterator[Check]:
    """Yield the usable processors, and whether thread pools are larger."""
    usable, quota = len(os.sched_getaffinity(0)), cpu_quota(cgroup)
    least = min(usable, quota or usable)
    text = f"{usable} usable" + (f", of which the container may use {quota:g}" if quota and quota < usable else "")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    num_threads = int(threads) if threads.isdecimal() else usable
    if num_threads > least:
        chosen = f"OMP_NUM_THREADS={threads}" if threads.isdecimal() else "torch's default"
        fix = f"OMP_NUM_THREADS={max(1, int(least))}, or [policy] threads and [rollout] threads"
        yield Check("note", "processors", f"{text}; {chosen} starts {num_threads} threads in each process", fix)
    else:
        yield Check("ok", "processors", text)


def cpu_quota(cgroup: Path) -> float | None:
    """Return the processors that a container may use, as of cgroup v2 or v1; None without a limit."""
    words = _words(cgroup / "cpu.max")
    if not words:
        words = _words(cgroup / "cpu/cpu.cfs_quota_us") + _words(cgroup / "cpu/cpu.cfs_period_us")
    if len(words) != 2 or not words[0].isdecimal():  # "max", or -1
        return None
    return int(words[0]) / int(words[1])


def memory(cgroup: Path = CGROUP, meminfo: Path = Path("/proc/meminfo")) -> Iterator[Check]:
    """Yield the free memory, within the limit of the container."""
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines()}
    total, free = sizes["MemTotal"], sizes["MemAvailable"]
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    limit = memory_limit(cgroup)
    if limit is not None and limit < total:
        text += f"; the container may use {limit / GIB:.1f} GiB"
        free = min(free, limit)
    if free < 2 * GIB:
        fix = "end other processes, or raise the container's limit: the kernel kills processes beyond it (SIGKILL)"
        yield Check("bad", "memory", text, fix)
    else:
        yield Check("ok", "memory", text)


def memory_limit(cgroup: Path) -> int | None:
    """Return the bytes that a container may use, as of cgroup v2 or v1; None without a limit."""
    words = _words(cgroup / "memory.max") or _words(cgroup / "memory/memory.limit_in_bytes")
    return int(words[0]) if words and words[0].isdecimal() else None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def open_files() -> Iterator[Check]:
    """Yield the limit of open files: a connection or shared buffer takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        fix = f"raise the hard limit, ulimit -Hn, to {FEW_FILES} or more"
        yield Check("bad", "open files", f"at most {hard}", fix)
    else:
        yield Check("ok", "open files", f"{_limit(soft)}, which processes of a run raise to {_limit(hard)}")


def locked_memory(devices: list[str] | None = None, limit: int | None = None) -> Iterator[Check]:
    """Yield the limit of locked memory, which RDMA needs. devices, limit: instead of this machine's."""
    devices = rdma_devices() if devices is None else devices
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    unlimited = limit == resource.RLIM_INFINITY
    text = "unlimited" if unlimited else f"{limit / MIB:.0f} MiB"
    if devices and not unlimited:
        fix = "ulimit -l unlimited; docker: --ulimit memlock=-1"
        yield Check("bad", "locked memory", f"{text}, and {', '.join(devices)} registers more", fix)
    else:
        yield Check("ok", "locked memory", text if devices else f"{text}; no RDMA device needs it")


def shared_memory(place: Path = SHARED, *, total: int | None = None) -> Iterator[Check]:
    """Yield the size of /dev/shm. Weights do not use it; NCCL, vLLM and simulators do. total: instead of it, bytes."""
    if total is None:
        if not place.is_dir():
            yield Check("bad", "shared memory", f"{place} does not exist", "mount a tmpfs there")
            return
        total = shutil.disk_usage(place).total
    text, fix = f"{place} has {total / GIB:.1f} GiB", "docker: --shm-size=16g; Kubernetes: an emptyDir of medium Memory"
    if total <= LITTLE_SHARED:
        text = f"{place} has {total / MIB:.0f} MiB: NCCL, vLLM and simulators fail with a bus error"
        yield Check("bad", "shared memory", text, fix)
    elif total < SMALL_SHARED:
        yield Check("note", "shared memory", text, fix)
    else:
        yield Check("ok", "shared memory", text)


def disk(folder: Path) -> Iterator[Check]:
    """Yield free space of the folder of runs, or the nearest one that exists, and the speed of a write with fsync."""
    place = next(each for each in (folder.resolve(), *folder.resolve().parents) if each.is_dir())
    free = shutil.disk_usage(place).free
    fix = "[run] output_dir on another disk"
    if free < LITTLE_DISK:
        yield Check("bad", "disk", f"{place} has {free / GIB:.1f} GiB free", fix)
        return
    try:
        speed = write_speed(place)
    except OSError as error:
        yield Check("bad", "disk", f"{place} cannot be written: {error.strerror}", fix)
        return
    text = f"{place} has {free / GIB:.1f} GiB free and writes {speed / 1e6:.0f} MB/s"
    if speed < SLOW_DISK:
        yield Check("note", "disk", f"{text}: checkpoints are slow", fix)
    elif free < SMALL_DISK:
        yield Check("note", "disk", text, f"{fix}, or a smaller [checkpoint] keep")
    else:
        yield Check("ok", "disk", text)


def write_speed(folder: Path, *, size: int = WRITTEN) -> float:
    """Return the bytes per second of one write with fsync. The file is removed. Raises OSError."""
    block = os.urandom(MIB)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".cosmos-rl-doctor-") as file:
        begun = time.perf_counter()
        for _ in range(size // MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return size / (time.perf_counter() - begun)


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)

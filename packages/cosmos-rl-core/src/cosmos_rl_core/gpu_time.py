"""Turns on the GPUs of a machine: either the policy's ranks use them, or the rollout replicas ([run] colocate).

    <run>/turn/rank-I   exclusive: rank I has its turn       shared: a rollout replica has its turn
    <run>/turn/idle     shared by each rank that does not want its turn

A rollout replica needs the files of all ranks, a rank its own alone, so that each rank may end its turn by itself. A
rollout never waits while it holds a file: with that, and as a rank waits for one file only, no circle of waits exists.
The locks are flock(2): the kernel releases those of a process that dies, and wakes the waiting ones.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Sequence
from pathlib import Path

FOLDER = "turn"


class RankGpuTime:
    """When one policy rank has its GPU: its turns."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._own, self._idle_file = _files(run_dir, ranks=rank + 1)[rank], run_dir / FOLDER / "idle"
        self._lock = self._idle = -1
        self.is_waiting = False
        """Whether it waits for its turn."""

    async def take(self) -> None:
        """Wait until no rollout replica has its turn; `RolloutGpuTime.wanted` returns in those meanwhile."""
        self._idle = _unlock(self._idle)
        self.is_waiting = True
        try:
            self._lock = await _locked(self._own, fcntl.LOCK_EX)
        finally:
            self.is_waiting = False

    def give(self) -> None:
        """End the turn."""
        self._idle = _lock(self._idle_file, fcntl.LOCK_SH)  # rollouts hold this file for an instant at most
        self._lock = _unlock(self._lock)

    def close(self) -> None:
        """Release all locks."""
        self._lock, self._idle = _unlock(self._lock), _unlock(self._idle)


class RolloutGpuTime:
    """When one rollout replica has its GPUs. The turns of several replicas overlap."""

    def __init__(self, run_dir: Path, *, ranks: int) -> None:
        """ranks: number of the policy's."""
        self._files, self._idle_file = _files(run_dir, ranks=ranks), run_dir / FOLDER / "idle"
        self._locks: list[int] = []
        self.is_waiting = False
        """Whether it waits for its turn."""

    async def take(self) -> None:
        """Wait until no rank has its turn."""
        self.is_waiting = True
        try:
            while (busy := self._try_all()) is not None:
                _unlock(await _locked(busy, fcntl.LOCK_SH))
        finally:
            self.is_waiting = False

    def give(self) -> None:
        """End the turn."""
        self._locks = [fd for fd in self._locks if _unlock(fd) >= 0]

    async def wanted(self) -> None:
        """Wait until no rank is idle: they want their turn, or they are gone."""
        _unlock(await _locked(self._idle_file, fcntl.LOCK_EX))

    def _try_all(self) -> Path | None:
        """Lock all files, or none: then return one that a rank holds."""
        for file in self._files:
            try:
                self._locks.append(_lock(file, fcntl.LOCK_SH | fcntl.LOCK_NB))
            except BlockingIOError:
                self.give()
                return file
        return None


def _files(run_dir: Path, *, ranks: int) -> Sequence[Path]:
    (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
    return [run_dir / FOLDER / f"rank-{rank}" for rank in range(ranks)]


async def _locked(file: Path, kind: int) -> int:
    """Wait for a lock in a thread of its own and return its descriptor. A cancelled wait leaves no lock behind."""
    loop = asyncio.get_running_loop()
    lock: asyncio.Future[int] = loop.create_future()

    def deliver(fd: int, error: OSError | None) -> None:
        if lock.cancelled():
            _unlock(fd)
        elif error is None:
            lock.set_result(fd)
        else:
            lock.set_exception(error)

    def wait() -> None:
        fd, error = -1, None
        try:
            fd = _lock(file, kind)
        except OSError as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(deliver, fd, error)
        except RuntimeError:  # the loop was closed meanwhile
            _unlock(fd)

    threading.Thread(target=wait, name="turn", daemon=True).start()
    return await lock


def _lock(file: Path, kind: int) -> int:
    """Open and lock a file; return the descriptor. Raises BlockingIOError with LOCK_NB if it is taken."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, kind)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unlock(fd: int) -> int:
    """Release a lock, also for copies of the descriptor in forked children; return -1."""
    if fd >= 0:
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
    return -1

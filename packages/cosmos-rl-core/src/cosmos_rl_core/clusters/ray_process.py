"""A process that is started again after a crash and ends with the process that has started it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from cosmos_rl_core.processes import ChildProcess

PAUSE_S = 1.0
"""Seconds between the crash of a process and its next start."""
_TIED = (
    "import ctypes, os, sys; parent, number = map(int, sys.argv[1:3]); ctypes.CDLL(None).prctl(1, number); "
    "os.getppid() == parent or sys.exit(1); os.execvp(sys.argv[3], sys.argv[3:])"
)
"""Asks Linux for a signal at the end of the parent (PR_SET_PDEATHSIG), and becomes the command."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A process and the rules of its restarts."""

    name: str
    """Of its actor: "policy-0", or "policy-0.1" for machine 1 of a replica over several."""
    command: tuple[str, ...]
    first: tuple[str, ...] = ()
    """Further arguments of the first start."""
    preamble: tuple[str, ...] = ()
    """Lines of shell before the command."""
    log: str
    restarts: int
    """Maximum number of restarts."""
    last: tuple[int, ...]
    """Exit codes after which it is not started again."""


class Restarted:
    """Runs a job in the calling thread; the other methods may be called from any thread."""

    def __init__(self, job: Job, environment: Mapping[str, str]) -> None:
        self._job = job
        self._environment = environment
        self._child: ChildProcess | None = None
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.starts = 0
        """Number of starts."""

    def run(self, arguments: Callable[[], Sequence[str]] = lambda: ()) -> int:
        """Run the process until it is not to be started again, and return its last exit code, 137 after SIGKILL.

        arguments: further arguments of each start. The process ends when the calling thread does.
        """
        while True:
            code = self._run_once([*self._job.command, *arguments(), *(() if self.starts else self._job.first)])
            if self._ending.is_set() or code in self._job.last or self.starts > self._job.restarts:
                return code
            self._ending.wait(PAUSE_S)

    def _run_once(self, command: Sequence[str]) -> int:
        lines = "\n".join([*self._job.preamble, 'exec "$@"'])
        tied = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), str(int(signal.SIGHUP))]
        with Path(self._job.log).open("ab") as log:
            with self._lock:
                if self._ending.is_set():
                    return 128 + signal.SIGTERM
                self.starts += 1
                child = ChildProcess(
                    [*tied, "bash", "-c", lines, "bash", *command], environment=self._environment, output=log
                )
                self._child = child
            status = child.wait()
            code = child.exit_code or 0
            if code:
                log.write(f"{self._job.name}: {status}\n".encode())
        return 128 - code if code < 0 else code

    def restart(self) -> None:
        """End the process at once; it is started again if restarts are left."""
        self._signal(signal.SIGHUP)

    def end(self) -> None:
        """Ask the process to save and leave; it is not started again."""
        self._ending.set()
        self._signal(signal.SIGTERM)

    def last(self) -> None:
        """Do not start it again."""
        self._ending.set()

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            if self._child is not None and self._child.exit_code is None:
                os.kill(self._child.pid, number)


class Meeting:
    """The address at which the machines of a replica meet: another one for each start of the replica."""

    def __init__(self, restart: Callable[[], None]) -> None:
        """restart: ends the replica's part of this machine, which then calls `open` again."""
        self._restart = restart
        self._address = ""
        self._given: set[int] = set()
        self._changed = threading.Condition()

    def open(self, address: str) -> None:
        """Begin a start of the replica."""
        with self._changed:
            self._address = address
            self._given.clear()
            self._changed.notify_all()

    def address(self, machine: int) -> str:
        """Return the address for a machine, which asks again when its part of the replica has ended.

        Waits for the next start then, as a replica without one of its parts has failed.
        """
        with self._changed:
            if machine in self._given:
                self._address = ""
                self._given.clear()
                self._restart()
            self._changed.wait_for(lambda: self._address)
            self._given.add(machine)
            return self._address

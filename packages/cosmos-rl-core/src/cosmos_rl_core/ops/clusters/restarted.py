"""Processes that are started again after a crash, and end with the process that has started them.

job = ProcessJob(name="rollout-0", command=("cosmos-rl", "worker", ...), restarts=3)
code = await RestartedProcess(job, environment()).run()

processes = Processes(preamble=["module load cuda"], variables={}, restarts=3)
code = await processes.keep("rollout-0", ["cosmos-rl", "worker", ...], gpus=["0"])
processes.terminate()
await processes.end(grace_s=60.0)
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from cosmos_rl_core.processes import ChildProcess, all_ended, environment

PAUSE_S = 1.0
"""Seconds between the crash of a process and its next start."""
USER_ERROR = 2
"""Exit code after which a worker is not started again, as after 0."""
_TIED = (
    "import ctypes, os, sys; parent, number = map(int, sys.argv[1:3]); ctypes.CDLL(None).prctl(1, number); "
    "os.getppid() == parent or sys.exit(1); os.execvp(sys.argv[3], sys.argv[3:])"
)
"""Asks Linux for a signal at the end of the parent (PR_SET_PDEATHSIG), and becomes the command."""


class ProcessJob(msgspec.Struct, frozen=True, kw_only=True):
    """A process and the rules of its restarts."""

    name: str
    """Of the process in messages, such as "policy-0", or "policy-0.1" for machine 1 of a replica over several."""
    command: tuple[str, ...]
    first: tuple[str, ...] = ()
    """Further arguments of the first start."""
    preamble: tuple[str, ...] = ()
    """Lines of shell before the command."""
    log: str = ""
    """File to which its output is appended; default: the output of this process."""
    restarts: int
    """Maximum number of restarts."""
    last: tuple[int, ...] = (0, USER_ERROR)
    """Exit codes after which it is not started again."""


class RestartedProcess:
    """Runs a job. Methods other than `run` may be called from any thread, also before and after it."""

    def __init__(self, job: ProcessJob, environment: Mapping[str, str]) -> None:
        self._job = job
        self._environment = environment
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.child: ChildProcess | None = None
        """The process of the last start."""
        self.starts = 0
        """Number of starts."""

    @property
    def is_last(self) -> bool:
        """Whether the process is not started again, as the run has asked it to leave or has ended."""
        return self._ending.is_set()

    async def run(self, arguments: Callable[[], Sequence[str]] = lambda: ()) -> int:
        """Run the process until it is not to be started again, and return its last exit code, 137 after SIGKILL.

        arguments: further arguments of each start. On Linux, the process ends when the thread of the event loop does.
        """
        while True:
            code = await self._run_once([*self._job.command, *arguments(), *(() if self.starts else self._job.first)])
            if code in self._job.last:
                return code
            if self.starts > self._job.restarts:
                self._say(f"not started again, after {self.starts} starts ([elastic] restart_workers)")
                return code
            if not self._ending.is_set():
                await asyncio.sleep(PAUSE_S)
            if self._ending.is_set():
                return code

    @property
    def is_ending(self) -> bool:
        """Whether it was asked to end, or not to be started again."""
        return self._ending.is_set()

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

    def kill(self) -> None:
        """Kill the process and all it has started; it is not started again."""
        self._ending.set()
        with self._lock:
            if self.child is not None and self.child.exit_code is None:
                self.child.kill()

    async def _run_once(self, command: Sequence[str]) -> int:
        lines = "\n".join([*self._job.preamble, 'exec "$@"'])
        tied = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), str(int(signal.SIGHUP))]
        with self._output() as output:
            with self._lock:
                if self._ending.is_set():
                    return 128 + signal.SIGTERM
                self.starts += 1
                child = self.child = ChildProcess(
                    [*(tied if sys.platform == "linux" else ()), "bash", "-c", lines, "bash", *command],
                    environment=self._environment,
                    output=output,
                )
            status = await child.ended()
            code = child.exit_code or 0
        if code:
            self._say(status)
        return 128 - code if code < 0 else code

    def _say(self, text: str) -> None:
        with self._output() as output:
            output.write(f"{self._job.name}: {text}\n".encode())

    def _output(self) -> IO[bytes]:
        if self._job.log:
            return Path(self._job.log).open("ab", buffering=0)
        return open(sys.stdout.fileno(), "wb", buffering=0, closefd=False)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            if self.child is not None and self.child.exit_code is None:
                os.kill(self.child.pid, number)


class Processes:
    """Restarted processes of this machine by name. Their output is that of this process."""

    def __init__(self, *, preamble: Sequence[str], variables: Mapping[str, str], restarts: int) -> None:
        """preamble: lines of shell before each process. restarts: of each process, after crashes."""
        self._preamble = tuple(preamble)
        self._variables = variables
        self._restarts = restarts
        self._by_name: dict[str, RestartedProcess] = {}

    async def keep(
        self,
        name: str,
        command: Sequence[str],
        *,
        first: Sequence[str] = (),
        last: Collection[int] = (0, USER_ERROR),
        gpus: Sequence[str] = (),
        given_up: Callable[[int], None] = lambda code: None,
    ) -> int:
        """Run a command, again after crashes, and return its exit code, as a shell would.

        first: arguments of the first start alone. last: exit codes that are no crashes. gpus: those it sees; default:
        all. given_up: called with the code of a process that failed, and is not started again though nobody has ended
        it.
        """
        job = ProcessJob(
            name=name,
            command=tuple(command),
            first=tuple(first),
            preamble=self._preamble,
            restarts=self._restarts,
            last=tuple(last),
        )
        process = self._by_name[name] = RestartedProcess(job, {**environment(gpus=gpus), **self._variables})
        code = await process.run()
        if code and not process.is_ending:
            given_up(code)
        return code

    def terminate(self, names: Sequence[str] | None = None) -> None:
        """Send SIGTERM to the processes of these names, by default to all, and start none of any name again."""
        for name, process in self._by_name.items():
            if names is None or name in names:
                process.end()
            else:
                process.last()

    def kill(self, names: Sequence[str] | None = None) -> None:
        """Kill the processes of these names, by default all, and start them not again."""
        for name, process in self._by_name.items():
            if names is None or name in names:
                process.kill()

    async def end(self, *, grace_s: float) -> None:
        """Wait for all processes, and kill those that still run after `grace_s`. None is started again."""
        for process in self._by_name.values():
            process.last()
        running = [process.child for process in self._by_name.values() if process.child is not None]
        if not await all_ended(running, timeout_s=grace_s):
            self.kill()
            await all_ended(running)

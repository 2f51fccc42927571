"""The owner of child processes: starts them by name, watches them, starts them again, and ends them.

    supervisor = ProcessSupervisor()
    supervisor.start(ProcessSpec(name="rollout-0", command=(...), log="logs/rollout-0.log"))
    end = await supervisor.next_end()               # its owner decides: supervisor.start(spec) again, or not

    code = await supervisor.keep(spec)              # or: started again after crashes, as its spec says
    supervisor.terminate()
    await supervisor.stop(grace_s=60.0)

The launcher of `cosmos-rl run` has one, for its controller and its workers; so has each machine of `cosmos-rl node`,
and each actor of Ray. No process outlives the supervisor's by more than `orphan_s`: an `OrphanGuard` runs beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cosmos_rl_core.processes import ChildProcess, OrphanGuard, environment, last_lines

PAUSE_S = 1.0
"""Seconds between the crash of a process and its next start."""
USER_ERROR = 2
"""Exit code of an error that the user must correct."""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A process and the rules of its restarts."""

    name: str
    """Of the process in messages, such as "policy-0", or "policy-0.1" for machine 1 of a replica over several."""
    command: tuple[str, ...]
    first: tuple[str, ...] = ()
    """Further arguments of the first start of `keep`."""
    preamble: tuple[str, ...] = ()
    """Lines of shell before the command."""
    variables: dict[str, str] = {}
    """Its environment variables beside those of the supervisor's process."""
    log: str = ""
    """File to which its output is appended; empty: it has the output of the supervisor's process."""
    inherited: tuple[int, ...] = ()
    """Descriptors of the supervisor's process that it inherits."""
    orphan_s: float = 0.0
    """Maximum seconds that it runs after the end of the supervisor's process."""
    restarts: int = 0
    """Maximum number of restarts by `keep`."""
    last: tuple[int, ...] = (0, USER_ERROR)
    """Exit codes after which `keep` does not start it again."""
    data: bytes = b""
    """Of its owner, for another owner that takes its place."""


class ProcessEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a process."""

    name: str
    exit_code: int
    """As subprocess reports it: -9 after SIGKILL."""
    status: str
    """"exit code 1" or "signal SIGKILL"."""
    last_lines: str = ""
    """The end of its log, if it has one of its own."""


@dataclass(slots=True, eq=False)
class _Supervised:
    """The state of a process."""

    spec: ProcessSpec
    child: ChildProcess | None = None
    """The process of the last start."""
    starts: int = 0
    is_last: bool = False
    """Whether `keep` does not start it again, as it was asked to end, or not to be started again."""

    @property
    def running(self) -> ChildProcess | None:
        return self.child if self.child is not None and self.child.exit_code is None else None


class ProcessSupervisor:
    """Owns the child processes of one event loop."""

    def __init__(self) -> None:
        self._by_name: dict[str, _Supervised] = {}
        self._ends: asyncio.Queue[ProcessEnd] = asyncio.Queue()
        self._watches: dict[ChildProcess, asyncio.Task[ProcessEnd]] = {}
        """The tasks that wait for the ends of the running processes."""
        self._guard: OrphanGuard | None = None
        """Runs while there are processes."""

    def start(self, specs: Sequence[ProcessSpec]) -> None:
        """Start processes, or start them again; `next_end` returns their ends. Raises OSError."""
        for spec in specs:
            process = self._by_name[spec.name] = _Supervised(spec)
            self._spawn(process, spec.command).add_done_callback(self._report)

    async def next_end(self) -> ProcessEnd:
        """Wait for the end of a process that `start` has started, and return it."""
        return await self._ends.get()

    async def keep(self, spec: ProcessSpec, *, arguments: Callable[[], Awaitable[Sequence[str]]] | None = None) -> int:
        """Run a process, again after crashes, and return its last exit code as a shell would: 137 after SIGKILL.

        arguments: returns further arguments of each start. A crash, and the last one, is reported in the process's log.
        """
        process = self._by_name[spec.name] = _Supervised(spec)
        while True:
            further = [] if arguments is None else await arguments()
            if process.is_last:
                return 128 + signal.SIGTERM
            first = () if process.starts else spec.first
            end = await asyncio.shield(self._spawn(process, [*spec.command, *further, *first]))
            code = end.exit_code if end.exit_code >= 0 else 128 - end.exit_code
            if code:
                self._write(spec, end.status)
            if code in spec.last:
                return code
            if process.starts > spec.restarts:
                self._write(spec, f"not started again, after {process.starts} starts ([elastic] restart_workers)")
                return code
            if not process.is_last:
                await asyncio.sleep(PAUSE_S)
            if process.is_last:
                return code

    def starts(self, name: str) -> int:
        """Return the number of times that a process was started; 0 for an unknown one."""
        process = self._by_name.get(name)
        return 0 if process is None else process.starts

    def is_last(self, name: str) -> bool:
        """Return whether a process was asked to end, or not to be started again."""
        process = self._by_name.get(name)
        return process is not None and process.is_last

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process, if it runs."""
        for process in self._named([name]):
            if (child := process.running) is not None:
                os.kill(child.pid, number)

    def end_restarts(self, names: Collection[str] | None = None) -> None:
        """Let `keep` not start the processes of these names again, by default all."""
        for process in self._named(names):
            process.is_last = True

    def terminate(self, names: Collection[str] | None = None) -> None:
        """Send SIGTERM to the processes of these names, by default to all, on which they save and leave."""
        self.end_restarts(names)
        for process in self._named(names):
            self.send(process.spec.name, signal.SIGTERM)

    def kill(self, names: Collection[str] | None = None, *, restart: bool = False) -> None:
        """Kill the processes of these names, by default all, and everything that they have started.

        restart: whether `keep` may start them again.
        """
        for process in self._named(names):
            process.is_last = process.is_last or not restart
            if (child := process.running) is not None:
                child.kill()

    def forget(self, name: str) -> None:
        """Forget a process that has ended."""
        self._by_name.pop(name, None)

    async def stop(self, *, grace_s: float) -> None:
        """Wait for all processes, and kill those that still run after `grace_s`. None is started again."""
        self.end_restarts()
        if self._watches:
            _, late = await asyncio.wait(self._watches.values(), timeout=grace_s)
            if late:
                self.kill()
                await asyncio.wait(late)

    def _named(self, names: Collection[str] | None) -> list[_Supervised]:
        return [process for name, process in self._by_name.items() if names is None or name in names]

    def _spawn(self, process: _Supervised, command: Sequence[str]) -> asyncio.Task[ProcessEnd]:
        """Start a process and return the task that waits for its end."""
        spec = process.spec
        if spec.preamble:
            command = ["bash", "-c", "\n".join([*spec.preamble, 'exec "$@"']), "bash", *command]
        with contextlib.ExitStack() as opened:
            if spec.log:
                Path(spec.log).parent.mkdir(parents=True, exist_ok=True)
            child = process.child = ChildProcess(
                command,
                environment={**environment(), **spec.variables},
                output=opened.enter_context(Path(spec.log).open("ab")) if spec.log else None,
                keeps=spec.inherited,
            )
        process.starts += 1
        self._guard = self._guard or OrphanGuard()
        self._guard.watch(child.pid, grace_s=spec.orphan_s)
        watch = self._watches[child] = asyncio.create_task(self._watch(spec, child))
        return watch

    async def _watch(self, spec: ProcessSpec, child: ChildProcess) -> ProcessEnd:
        status = await child.ended()
        assert child.exit_code is not None and self._guard is not None
        del self._watches[child]
        if self._watches:
            self._guard.forget(child.pid)
        else:
            self._guard.close()
            self._guard = None
        lines = last_lines(Path(spec.log)) if spec.log else ""
        return ProcessEnd(name=spec.name, exit_code=child.exit_code, status=status, last_lines=lines)

    def _report(self, watch: asyncio.Task[ProcessEnd]) -> None:
        if not watch.cancelled():  # the event loop ends
            self._ends.put_nowait(watch.result())

    def _write(self, spec: ProcessSpec, text: str) -> None:
        """Write a line into the log of a process."""
        line = f"{spec.name}: {text}\n".encode()
        if spec.log:
            with Path(spec.log).open("ab") as log:
                log.write(line)
        else:
            sys.stdout.flush()
            os.write(sys.stdout.fileno(), line)

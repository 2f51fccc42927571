"""Worker processes of this machine: started, watched and killed for a controller, which may be replaced.

LocalWorkers --start, kill, forget--> Keeper --Ended--> LocalWorkers.ended

The keeper restarts nothing by itself. It remembers an ended process until the controller starts it again or forgets it,
so that a later controller gets the report too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from cosmos_rl_core.imports import WORKER
from cosmos_rl_core.processes import ChildProcess, OrphanGuard, all_ended, environment, last_lines
from cosmos_rl_core.wire.handshake import keep_secret
from cosmos_rl_core.workers.node import Node, WorkerAddress, to_arguments

ROLLOUT_GRACE_S, POLICY_GRACE_S = 10.0, 60.0
"""Maximum seconds that a worker runs after the end of its keeper's process. A policy may save meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The parameters of one worker process."""

    address: WorkerAddress
    """Its `controller` and `launcher` are set by the keeper."""
    node: Node
    gpus: tuple[str, ...]
    """Visible GPUs; empty on a machine without GPUs."""
    starts: int = 1
    """Number of starts, this one included."""

    @property
    def name(self) -> str:
        return self.address.name


class WorkerEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The end of a worker process."""

    name: str
    exit_code: int
    status: str
    """"exit code 1" or "signal SIGKILL"."""
    last_lines: str


class Present(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The workers of a keeper."""

    began: bool
    """Whether any worker was ever started."""
    workers: tuple[WorkerSpec, ...]
    """The oldest first, including those that have ended and were not forgotten."""
    ended: tuple[WorkerEnded, ...]
    to: int = 0
    """Process id of the controller."""


class Keeper(Protocol):
    """Keeps the worker processes of one run."""

    async def attach(
        self, controller: str, *, secrets: Mapping[str, str], on_end: Callable[[WorkerEnded], None]
    ) -> Present:
        """Work for the controller at this address from now on.

        secrets: content of files by their paths; a removed one is written again before a worker starts. on_end: called
        for each process that ends from now on.
        """
        ...

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        """Start these workers, all or none if the controller dies meanwhile. Raises OSError."""
        ...

    def kill(self, names: Sequence[str]) -> None:
        """Kill the processes of these workers."""
        ...

    def forget(self, name: str) -> None:
        """Forget a worker that has ended."""
        ...


class ProcessKeeper:
    """Implements `Keeper` in this process. Used in an event loop."""

    def __init__(self, *, log_dir: Path, python_path: Sequence[str] = (), policy_keeps: tuple[int, ...] = ()) -> None:
        """python_path: folders for a recipe's "module:attribute" names. policy_keeps: descriptors inherited by policy
        processes, so that a lock is held until they end.
        """
        self._log_dir = log_dir
        self._python_path = tuple(python_path)
        self._policy_keeps = policy_keeps
        self._controller = ""
        self._secrets: Mapping[str, str] = {}
        self._on_end: Callable[[WorkerEnded], None] = lambda end: None
        self._began = False
        self._specs: dict[str, WorkerSpec] = {}
        self._processes: dict[str, ChildProcess] = {}
        self._ended: dict[str, WorkerEnded] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._guard: OrphanGuard | None = None
        """Runs while there are workers."""

    async def attach(
        self, controller: str, *, secrets: Mapping[str, str], on_end: Callable[[WorkerEnded], None]
    ) -> Present:
        self._controller, self._secrets, self._on_end = controller, secrets, on_end
        return Present(began=self._began, workers=tuple(self._specs.values()), ended=tuple(self._ended.values()))

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        self._began = True
        for spec in workers:
            self._specs[spec.name] = spec
            self._ended.pop(spec.name, None)
            self._spawn(spec)

    def kill(self, names: Sequence[str]) -> None:
        for name in names:
            process = self._processes.get(name)
            if process is not None and process.exit_code is None:
                process.kill()

    def forget(self, name: str) -> None:
        for by_name in (self._specs, self._processes, self._ended):
            by_name.pop(name, None)
        if not self._specs:
            self._close_guard()

    async def all_ended(self, *, grace_s: float) -> None:
        """Wait until all processes have ended; kill the remaining ones after `grace_s`."""
        running = list(self._processes.values())
        if not await all_ended(running, timeout_s=grace_s):
            self.kill_all()
            await all_ended(running)
        await asyncio.gather(*self._watchers)
        self._close_guard()

    def kill_all(self) -> None:
        self.kill(list(self._processes))

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def _spawn(self, spec: WorkerSpec) -> None:
        with contextlib.suppress(OSError):  # the worker reports an unreadable file
            for path, text in self._secrets.items():
                keep_secret(Path(path), text)
        address = replace(spec.address, controller=self._controller, launcher=os.getpid())
        log = self._log_dir / f"{spec.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._guard = self._guard or OrphanGuard()
        with log.open("ab") as output:
            process = self._processes[spec.name] = ChildProcess(
                [*WORKER, *to_arguments(address, spec.node)],
                environment=environment(self._python_path, threads=address.threads, gpus=spec.gpus),
                output=output,
                keeps=self._policy_keeps if address.role == "policy" else (),
            )
        self._guard.watch(process.pid, grace_s=POLICY_GRACE_S if address.role == "policy" else ROLLOUT_GRACE_S)
        watcher = asyncio.create_task(self._watch(spec, process, log))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, spec: WorkerSpec, process: ChildProcess, log: Path) -> None:
        status = await process.ended()
        code = process.exit_code
        assert code is not None
        if self._guard is not None:
            self._guard.forget(process.pid)
        end = WorkerEnded(name=spec.name, exit_code=code, status=status, last_lines=last_lines(log))
        self._ended[spec.name] = end
        self._on_end(end)

    def _close_guard(self) -> None:
        if self._guard is not None:
            self._guard.close()
            self._guard = None

"""Worker processes on this machine: start, watch, restart, stop. Each death is reported with the end of its log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cosmos_rl_core.imports import PYTHON
from cosmos_rl_core.processes import ChildProcess, all_ended, environment, last_lines
from cosmos_rl_core.wire.handshake import keep_token
from cosmos_rl_core.workers.node import Node, WorkerAddress, to_arguments


@dataclass(slots=True, kw_only=True)
class WorkerProcess:
    """One worker and how often it was started."""

    address: WorkerAddress
    node: Node
    log: Path
    gpus: Sequence[str]
    """Visible GPUs; empty on a machine without GPUs."""
    starts: int = 0
    process: ChildProcess | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker that ended before it was stopped."""

    name: str
    role: str
    status: str
    """"exit code 1" or "signal SIGKILL"."""
    last_lines: str
    restarting: bool


@dataclass(slots=True)
class LocalWorkers:
    """The workers of one run. `on_death` is called for each one that ends before `stop`."""

    controller: str
    token_file: Path
    log_dir: Path
    restart_workers: int
    """Maximum restarts of a dead rollout worker; a policy worker is never restarted."""
    on_death: Callable[[Death], None]
    python_path: tuple[str, ...] = ()
    """Folders for a recipe's "module:attribute" names."""
    token: bytes = b""
    """Content of `token_file`; a removed file is written again before a worker starts."""
    policy_keeps: tuple[int, ...] = ()
    """Descriptors inherited by a policy process, so that a lock is held until it ends."""
    _workers: dict[str, WorkerProcess] = field(default_factory=dict)
    _watchers: set[asyncio.Task[None]] = field(default_factory=set)
    _stopping: bool = False

    def start(self, role: str, *, threads: int | None, gpus: Sequence[Sequence[str]], node: Node | None = None) -> None:
        """Start a replica of a role for each entry of `gpus`, which it sees.

        `threads` are for each process, `node` says what this machine holds of each.
        """
        for i, visible in enumerate(gpus):
            address = self.address(role, f"{role}-{i}", threads=threads)
            log = self.log_dir / f"{address.name}.log"
            worker = self._workers[address.name] = WorkerProcess(
                address=address, node=node or Node(), log=log, gpus=visible
            )
            self._spawn(worker)

    def address(self, role: str, name: str, *, threads: int | None) -> WorkerAddress:
        """Return the command-line parameters of a worker of this run, on any machine."""
        return WorkerAddress(
            controller=self.controller, role=role, name=name, token_file=self.token_file, threads=threads
        )

    async def stop(self, *, grace_s: float) -> None:
        """Wait for all workers to leave; kill the remaining ones after `grace_s`."""
        self._stopping = True
        running = [worker.process for worker in self._workers.values() if worker.process is not None]
        if not await all_ended(running, timeout_s=grace_s):
            self.kill()
            await all_ended(running)
        await asyncio.gather(*self._watchers)

    def kill(self) -> None:
        """End every worker now; the agent of several ranks ends those first."""
        self._stopping = True
        for worker in self._workers.values():
            if worker.process is not None and worker.process.exit_code is None:
                if worker.node.num_ranks > 1:
                    worker.process.terminate()
                else:
                    worker.process.kill()

    def pid(self, name: str) -> int:
        process = self._workers[name].process
        assert process is not None
        return process.pid

    def _spawn(self, worker: WorkerProcess) -> None:
        if self.token:
            with contextlib.suppress(OSError):  # the worker reports an unreadable file
                keep_token(self.token_file, self.token)
        worker.log.parent.mkdir(parents=True, exist_ok=True)
        with worker.log.open("ab") as log:
            worker.process = ChildProcess(
                [*PYTHON, "-m", "cosmos_rl_core.workers.main", *to_arguments(worker.address, worker.node)],
                environment=environment(self.python_path, threads=worker.address.threads, gpus=worker.gpus),
                output=log,
                keeps=self.policy_keeps if worker.address.role == "policy" else (),
            )
        worker.starts += 1
        watcher = asyncio.create_task(self._watch(worker, worker.process))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, worker: WorkerProcess, process: ChildProcess) -> None:
        status = await process.ended()
        if self._stopping or process.exit_code == 0:
            return
        role = worker.address.role
        restarting = role == "rollout" and worker.starts <= self.restart_workers and process.exit_code != 2
        self.on_death(
            Death(
                name=worker.address.name,
                role=role,
                status=status,
                last_lines=last_lines(worker.log),
                restarting=restarting,
            )
        )
        if restarting:
            self._spawn(worker)


def share_threads(
    *, cores: int, policy: int | None, rollout: int | None, rollout_replicas: int, overlap: bool
) -> tuple[int, int]:
    """Return the CPU threads of a policy and of a rollout replica, by default from the number of cores.

    Roles that work at the same time share the cores; roles that alternate (max_staleness = 0) each get all of them.
    """
    if not overlap:
        return policy or cores, rollout or max(1, cores // rollout_replicas)
    half = max(1, cores // 2)
    return policy or half, rollout or max(1, (cores - half) // rollout_replicas)

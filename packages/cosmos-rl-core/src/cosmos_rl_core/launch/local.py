"""[run] placement = "local": worker processes on this machine, watched, restarted and stopped.

Each death is reported with the end of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import IO

from cosmos_rl_core.control.protocol import Role
from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.imports import PYTHON
from cosmos_rl_core.launch.external import ExternalWorkers
from cosmos_rl_core.launch.gpus import GpuSupply, gpus_per_rollout
from cosmos_rl_core.launch.placement import STOP_GRACE_S, Added, Launch, threads
from cosmos_rl_core.optional import NamesModules
from cosmos_rl_core.plugins import locate
from cosmos_rl_core.processes import ChildProcess, all_ended, environment, last_lines, machine_gpus
from cosmos_rl_core.recipe.load import load_domain
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.rollout.spool.store import clear_spools, spool_root
from cosmos_rl_core.wire.handshake import keep_secret
from cosmos_rl_core.wire.tls import TLS_FILE, Tls
from cosmos_rl_core.workers.fork_server import ENTRY, ForkedProcess, ForkServer, opened
from cosmos_rl_core.workers.node import Node, WorkerAddress, policy_node, to_arguments


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
    leaving: bool = False
    """Whether it shall leave, so that its end is no death."""

    def kill(self) -> None:
        """End it now; the agent of several ranks ends those first."""
        if self.process is not None and self.process.exit_code is None:
            if self.node.num_ranks > 1:
                self.process.hang_up()
            else:
                self.process.kill()


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
    """Implements `placement.Workers`. `on_death` is called for each worker that ends before `leave`."""

    controller: str
    token_file: Path
    log_dir: Path
    restart_workers: int
    """Maximum restarts of a worker; a policy replica of several machines is never restarted."""
    on_death: Callable[[Death], None]
    python_path: tuple[str, ...] = ()
    """Folders for a recipe's "module:attribute" names."""
    token: bytes = b""
    """Content of `token_file`; a removed file is written again before a worker starts."""
    tls: Tls | None = None
    """Certificate of workers; None without TLS. Its file is `tls_file`, and is written again too."""
    tls_file: Path | None = None
    policy_keeps: tuple[int, ...] = ()
    """Descriptors inherited by a policy process, so that a lock is held until it ends."""
    fork_server: ForkServer | None = None
    """Forks workers of one process; without one, and after its end, they are started as commands."""
    spools: Path | None = None
    """Folder of this machine's spools, removed when the workers have left."""
    supply: GpuSupply | None = None
    """GPUs of workers that are added."""
    rollout_threads: Callable[[int], int | None] = lambda number: None
    """Returns the CPU threads of a rollout worker that is added, with so many of them on this machine."""
    is_taken: Callable[[str], bool] = lambda name: False
    """Returns whether a worker of this run has or had the name."""
    guests: ExternalWorkers | None = None
    """Workers of other machines that have joined the run."""
    _first: dict[str, WorkerProcess] = field(default_factory=dict)
    """The first worker of each role, whose settings apply to those that are added."""
    _workers: dict[str, WorkerProcess] = field(default_factory=dict)
    _watchers: set[asyncio.Task[None]] = field(default_factory=set)
    _stopping: bool = False

    def start(
        self,
        role: str,
        *,
        threads: int | None,
        gpus: Sequence[Sequence[str]],
        processes_per_gpu: int = 1,
        node: Node | None = None,
    ) -> None:
        """Start a replica of a role for each entry of `gpus`, the GPUs that are visible to it.

        threads: CPU threads of each process. node: this machine's part of each replica; default: all of it.
        """
        for i, visible in enumerate(gpus):
            address = replace(self.address(role, f"{role}-{i}", threads=threads), processes_per_gpu=processes_per_gpu)
            self._start(address, node or Node(), visible)

    def names(self, role: Role) -> list[str]:
        return [name for name, worker in self._workers.items() if worker.address.role == role and not worker.leaving]

    def has(self, name: str) -> bool:
        return name in self._workers

    def check(self, more: Mapping[Role, int], *, without: Sequence[str]) -> None:
        self._assign(more, without=without)

    def add(self, more: Mapping[Role, int]) -> Added:
        started = []
        assert self.supply is not None
        for role, gpus in self._assign(more).items():
            first = self._first[role]
            number = len(self.names(role)) + len(gpus)
            for visible in gpus:
                name = next(f"{role}-{i}" for i in count() if not self._has_had(f"{role}-{i}"))
                shared = Counter(gpu for worker in self._workers.values() for gpu in worker.gpus)
                address = replace(
                    first.address,
                    name=name,
                    threads=self.rollout_threads(number) if role == "rollout" else first.address.threads,
                    processes_per_gpu=1
                    if self.supply.in_turns
                    else max((shared[gpu] + 1 for gpu in visible), default=1),
                )
                self._start(address, first.node, visible)
                started.append(name)
        return Added(names=started)

    def dismiss(self, name: str, *, connected: bool) -> None:
        if (worker := self._workers.get(name)) is not None:
            worker.leaving = True
            if not connected:
                worker.kill()

    def _assign(self, more: Mapping[Role, int], *, without: Sequence[str] = ()) -> dict[Role, list[Sequence[str]]]:
        for role, number in more.items():
            if number and (machines := self._first[role].node.num_nodes) > 1:
                raise UserError(f"a {role} replica of {machines} machines cannot be added to a run")
        assert self.supply is not None
        in_use = {name: worker.gpus for name, worker in self._workers.items() if worker.gpus and name not in without}
        return self.supply.assign(more, in_use=in_use)

    def _has_had(self, name: str) -> bool:
        return name in self._workers or self.is_taken(name) or (self.log_dir / f"{name}.log").exists()

    def _start(self, address: WorkerAddress, node: Node, gpus: Sequence[str]) -> None:
        log = self.log_dir / f"{address.name}.log"
        worker = self._workers[address.name] = WorkerProcess(address=address, node=node, log=log, gpus=gpus)
        self._first.setdefault(address.role, worker)
        self._spawn(worker)

    def address(self, role: str, name: str, *, threads: int | None) -> WorkerAddress:
        """Return the command-line parameters of a worker of this run, on any machine."""
        return WorkerAddress(
            controller=self.controller,
            role=role,
            name=name,
            token_file=self.token_file,
            tls_file=self.tls_file,
            threads=threads,
        )

    async def leave(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Wait until all workers have left; kill the remaining ones after `grace_s`."""
        self._stopping = True
        running = [worker.process for worker in self._workers.values() if worker.process is not None]
        if not await all_ended(running, timeout_s=grace_s):
            self.kill()
            await all_ended(running)
        await asyncio.gather(*self._watchers)
        if self.guests is not None:
            await self.guests.leave()
        if self.spools is not None:
            clear_spools(self.spools)

    def kill(self) -> None:
        """End every worker now."""
        self._stopping = True
        for worker in self._workers.values():
            worker.kill()
        if self.guests is not None:
            self.guests.kill()

    def pid(self, name: str) -> int:
        process = self._workers[name].process
        assert process is not None
        return process.pid

    def _spawn(self, worker: WorkerProcess) -> None:
        if self.token:
            with contextlib.suppress(OSError):  # the worker reports an unreadable file
                keep_secret(self.token_file, self.token.hex())
                if self.tls is not None and self.tls_file is not None:
                    keep_secret(self.tls_file, self.tls.bundle)
        worker.log.parent.mkdir(parents=True, exist_ok=True)
        with worker.log.open("ab") as log:
            worker.process = self._process(worker, log)
        worker.starts += 1
        watcher = asyncio.create_task(self._watch(worker, worker.process))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    def _process(self, worker: WorkerProcess, log: IO[bytes]) -> ChildProcess:
        arguments = to_arguments(worker.address, worker.node)
        variables = environment(self.python_path, threads=worker.address.threads, gpus=worker.gpus)
        keeps = self.policy_keeps if worker.address.role == "policy" else ()
        if self.fork_server is not None and worker.node.num_ranks == 1:
            forked = self.fork_server.start(arguments, environment=variables, output=log, keeps=keeps)
            if forked is not None:
                return forked
        return ChildProcess([*PYTHON, "-m", ENTRY, *arguments], environment=variables, output=log, keeps=keeps)

    async def _watch(self, worker: WorkerProcess, process: ChildProcess) -> None:
        status = await process.ended()
        if self._stopping:
            return
        name = worker.address.name
        if process.exit_code == 0 or worker.leaving:
            del self._workers[name]
            return
        if isinstance(process, ForkedProcess) and not process.started:
            self.fork_server = None  # it has ended
            worker.starts -= 1
            self._spawn(worker)
            return
        can_restart = worker.node.num_nodes == 1 and process.exit_code != 2
        restarting = can_restart and worker.starts <= self.restart_workers
        if not restarting:
            del self._workers[name]
        death = Death(
            name=name,
            role=worker.address.role,
            status=status,
            last_lines=last_lines(worker.log),
            restarting=restarting,
        )
        self.on_death(death)
        if restarting:
            self._spawn(worker)


@contextlib.contextmanager
def fork_server(
    config: RunConfig, directory: Path, *, python_path: Sequence[str], begun: ForkServer | None
) -> Iterator[ForkServer | None]:
    """Import for the run's workers, in the server that has begun to if there is one.

    None for workers that must not be forked, and where there are not two to share the imports.
    """
    node = policy_node(config.policy, bind=config.run.bind)
    workers = 0 if config.is_sft else config.rollout.replicas + (node.num_ranks == 1)
    domain = load_domain(config.run.domain)
    modules: Sequence[str] = ()
    if config.run.placement == "local" and workers > 1:
        modules = domain.worker_modules(config) if isinstance(domain, NamesModules) else ()
    if not modules:
        if begun is not None:
            begun.close()  # the processor is the workers'
        yield None
        return
    sync = locate("cosmos_rl.weight_sync", config.sync.backend).partition(":")[0]
    with opened(python_path) if begun is None else contextlib.nullcontext(begun) as server:
        if server is not None:
            server.load((sync, *modules), log=directory / "logs" / "imports.log")
        yield server


async def start_processes(launch: Launch) -> LocalWorkers:
    """Start every worker of this machine; print the commands for the other machines."""
    config, controller, observer = launch.config, launch.controller, launch.observer

    def on_death(death: Death) -> None:
        role = "policy" if death.role == "policy" else "rollout"
        others = {*workers.names(role), *(peer.name for peer in controller.peers.of_role(role))} - {death.name}
        if death.restarting:
            then = "starting it again"
        elif others:
            then = f"it is given up, and the run continues with {', '.join(sorted(others))}"
        else:
            then = "the run cannot continue without it"
        report = f"{death.name} died ({death.status}); {then}. The end of logs/{death.name}.log:\n{death.last_lines}"
        if death.restarting or others:
            observer.note(report)
            controller.ended(death.name)
        else:
            controller.outcome.fail(WorkerFailed(report))

    spools = spool_root(config.rollout.spool.directory, launch.directory)
    clear_spools(spools)  # left over by a killed run
    workers = LocalWorkers(
        controller=launch.address,
        token_file=launch.directory / "token",
        token=launch.token,
        tls=launch.tls,
        tls_file=launch.directory / TLS_FILE if launch.tls else None,
        log_dir=launch.directory / "logs",
        restart_workers=config.elastic.restart_workers,
        on_death=on_death,
        python_path=launch.python_path,
        policy_keeps=(launch.lock,),
        fork_server=launch.fork_server,
        spools=spools,
        supply=GpuSupply(
            visible=machine_gpus(os.environ),
            per_worker={
                "policy": launch.policy_node.ranks_per_node,
                "rollout": 0 if config.is_sft else gpus_per_rollout(config),
            },
            share=config.run.share_gpus,
            in_turns=config.run.colocate,
        ),
        rollout_threads=lambda number: threads(config, rollouts=number)[1],
        is_taken=controller.ledger.members.by_name.__contains__,
        guests=ExternalWorkers(controller.peers),
    )
    node = launch.policy_node
    policy, rollout = threads(config)
    a_rank = max(1, policy // node.ranks_per_node)
    gpus = launch.gpus
    if any(gpus.policies):
        observer.note(f"GPUs: {gpus}")
    workers.start("policy", threads=a_rank, gpus=gpus.policies, node=node)
    address = workers.address("policy", "policy-0", threads=config.policy.threads and a_rank)
    for index, command in enumerate(node.commands_for_others(address, python_path=launch.python_path), 1):
        observer.note(f"machine {index} of policy-0 joins by: {command}")
    workers.start("rollout", threads=rollout, gpus=gpus.rollouts, processes_per_gpu=gpus.processes_per_gpu)
    return workers

"""[run] placement = "local": the workers of this machine, of which those that die are started again.

Each death is reported with the end of its log. The processes belong to a `supervised.keeper.Keeper`, which may outlive
this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from cosmos_rl_core.control.lifecycle import WorkerProcesses
from cosmos_rl_core.control.protocol import Role
from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.launch.external import ExternalWorkers
from cosmos_rl_core.launch.gpus import GpuSupply, gpus_per_rollout
from cosmos_rl_core.launch.placement import STOP_GRACE_S, Added, Launch, threads
from cosmos_rl_core.launch.supervised.keeper import Keeper, Present, ProcessKeeper, WorkerEnded, WorkerSpec
from cosmos_rl_core.processes import machine_gpus
from cosmos_rl_core.rollout.spool.store import clear_spools, spool_root
from cosmos_rl_core.wire.tls import TLS_FILE
from cosmos_rl_core.workers.node import Node, WorkerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker that ended before it was stopped."""

    name: str
    role: str
    status: str
    """"exit code 1" or "signal SIGKILL"."""
    last_lines: str
    restarting: bool
    left: bool = False
    """Whether it has left in good order, after SIGTERM, and the run cannot go on without it."""


@dataclass(slots=True, kw_only=True)
class LocalWorkers(WorkerProcesses):
    """Implements `placement.Workers`. `on_death` is called for each worker that ends before `leave`."""

    keeper: Keeper
    token_file: Path
    log_dir: Path
    restart_workers: int
    """Maximum restarts of a worker; of a policy replica over several machines, of this machine's part."""
    on_death: Callable[[Death], None]
    tls_file: Path | None = None
    """File with the certificate of workers; None without TLS."""
    spools: Path | None = None
    """Folder of this machine's spools, removed when the workers have left."""
    supply: GpuSupply | None = None
    """GPUs of workers that are added."""
    rollout_threads: Callable[[int], int | None] = lambda number: None
    """Returns the CPU threads of a rollout worker that is added, with so many of them on this machine."""
    is_taken: Callable[[str], bool] = lambda name: False
    """Returns whether a worker of this run has or had the name."""
    is_missed: Callable[[str], bool] = lambda name: False
    """Returns whether the run stands still without this worker, which has left."""
    guests: ExternalWorkers | None = None
    """Workers of other machines that have joined the run."""
    note: Callable[[str], None] = lambda text: None
    """Prints a message."""
    _first: dict[str, WorkerSpec] = field(default_factory=dict)
    """The first worker of each role, whose settings apply to those that are added."""
    _workers: dict[str, WorkerSpec] = field(default_factory=dict)
    _leaving: set[str] = field(default_factory=set)
    """Workers that shall leave, so that their end is no death."""
    _stopping: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def replicas(
        self,
        role: str,
        *,
        threads: int | None,
        gpus: Sequence[Sequence[str]],
        processes_per_gpu: int = 1,
        node: Node | None = None,
    ) -> list[WorkerSpec]:
        """Return a replica of a role for each entry of `gpus`, the GPUs that are visible to it.

        threads: CPU threads of each process. node: this machine's part of each replica; default: all of it.
        """
        specs = []
        for i, visible in enumerate(gpus):
            address = replace(self.address(role, f"{role}-{i}", threads=threads), processes_per_gpu=processes_per_gpu)
            specs.append(WorkerSpec(address=address, node=node or Node(), gpus=tuple(visible)))
        if specs:
            self._first[role] = specs[0]
        return specs

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        """Start these workers, or start them again."""
        self._workers |= {spec.name: spec for spec in workers}
        self.keeper.start(workers)

    def take_over(self, present: Present) -> None:
        """Continue with the workers of a dead controller."""
        self._workers = {spec.name: spec for spec in present.workers}
        for end in present.ended:
            self.ended(end, counts=False)

    def names(self, role: Role) -> list[str]:
        of_role = (name for name, spec in self._workers.items() if spec.address.role == role)
        return [name for name in of_role if name not in self._leaving]

    def has(self, name: str) -> bool:
        return name in self._workers

    def check(self, more: Mapping[Role, int], *, without: Sequence[str]) -> None:
        self._assign(more, without=without)

    def add(self, more: Mapping[Role, int]) -> Added:
        added: list[WorkerSpec] = []
        assert self.supply is not None
        for role, gpus in self._assign(more).items():
            first = self._first[role]
            number = len(self.names(role)) + len(gpus)
            for visible in gpus:
                present = {**self._workers, **{spec.name: spec for spec in added}}
                name = next(f"{role}-{i}" for i in count() if not self._has_had(f"{role}-{i}", present))
                shared = Counter(gpu for spec in present.values() for gpu in spec.gpus)
                address = replace(
                    first.address,
                    name=name,
                    threads=self.rollout_threads(number) if role == "rollout" else first.address.threads,
                    processes_per_gpu=1
                    if self.supply.in_turns
                    else max((shared[gpu] + 1 for gpu in visible), default=1),
                )
                added.append(replace(first, address=address, gpus=tuple(visible)))
        self.start(added)
        return Added(names=[spec.name for spec in added])

    def dismiss(self, name: str, *, connected: bool) -> None:
        if name in self._workers:
            self._leaving.add(name)
            if not connected:
                self.keeper.kill([name])

    def end_silent(self, name: str) -> None:
        """Kill a worker that does not answer, as in a call that keeps Python's lock; it is started again."""
        if name in self._workers and name not in self._leaving:
            self.note(f"{name} has not answered for too long and is killed")
            self.keeper.kill([name])

    def _assign(self, more: Mapping[Role, int], *, without: Sequence[str] = ()) -> dict[Role, list[Sequence[str]]]:
        for role, number in more.items():
            if number and (machines := self._first[role].node.num_nodes) > 1:
                raise UserError(f"a {role} replica of {machines} machines cannot be added to a run")
        assert self.supply is not None
        in_use = {name: spec.gpus for name, spec in self._workers.items() if spec.gpus and name not in without}
        return self.supply.assign(more, in_use=in_use)

    def _has_had(self, name: str, present: Mapping[str, WorkerSpec]) -> bool:
        return name in present or self.is_taken(name) or (self.log_dir / f"{name}.log").exists()

    def address(self, role: str, name: str, *, threads: int | None) -> WorkerAddress:
        """Return the command-line parameters of a worker of this run; the keeper adds the controller's address."""
        return WorkerAddress(
            role=role,
            name=name,
            run=self.token_file.parent,
            token_file=self.token_file,
            tls_file=self.tls_file,
            threads=threads,
        )

    async def leave(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Wait until all workers have left; kill the remaining ones after `grace_s`."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_ended(), grace_s)
        if self._workers:
            self.kill()
            await self._all_ended()
        if self.guests is not None:
            await self.guests.leave()
        if self.spools is not None:
            clear_spools(self.spools)

    async def _all_ended(self) -> None:
        while self._workers:
            self._changed.clear()
            await self._changed.wait()

    def kill(self) -> None:
        """End every worker now."""
        self._stopping = True
        self.keeper.kill(list(self._workers))
        if self.guests is not None:
            self.guests.kill()

    def ended(self, end: WorkerEnded, *, counts: bool = True) -> None:
        """Receive the end of a process: report it and start the worker again, unless it has left and is not missed.

        counts: whether a restart is one of `restart_workers`.
        """
        spec = self._workers[end.name]
        left = end.exit_code == 0
        if self._stopping or end.name in self._leaving or (left and not self.is_missed(end.name)):
            return self._forget(end.name)
        restarting = end.exit_code != 2 and (not counts or spec.starts <= self.restart_workers)
        if not restarting:
            self._forget(end.name)
        role = spec.address.role
        self.on_death(
            Death(
                name=end.name,
                role=role,
                status=end.status,
                last_lines=end.last_lines,
                restarting=restarting,
                left=left,
            )
        )
        if restarting:
            self.start([replace(spec, starts=spec.starts + counts)])

    def _forget(self, name: str) -> None:
        del self._workers[name]
        self._leaving.discard(name)
        self.keeper.forget(name)
        self._changed.set()


async def start_processes(launch: Launch) -> LocalWorkers:
    """Start every worker of this machine; print the commands for the other machines."""
    config, controller, observer = launch.config, launch.controller, launch.observer

    def on_end(end: WorkerEnded) -> None:
        try:
            workers.ended(end)
        except Exception as error:  # it would be lost with the task that has called this
            controller.outcome.fail(error)

    keeper = launch.supervised or ProcessKeeper(
        log_dir=launch.directory / "logs",
        python_path=launch.python_path,
        policy_keeps=(launch.lock,),
    )
    workers = _local_workers(launch, keeper)
    controller.lifecycle.processes = workers
    secrets = {str(workers.token_file): launch.token.hex()}
    if launch.tls is not None and workers.tls_file is not None:
        secrets[str(workers.tls_file)] = launch.tls.bundle
    present = await keeper.attach(launch.address, secrets=secrets, on_end=on_end)
    node = launch.policy_node
    policy, rollout = threads(config)
    a_rank = max(1, policy // node.ranks_per_node)
    gpus = launch.gpus
    first = [
        *workers.replicas("policy", threads=a_rank, gpus=gpus.policies, node=node),
        *workers.replicas("rollout", threads=rollout, gpus=gpus.rollouts, processes_per_gpu=gpus.processes_per_gpu),
    ]
    if present.began:
        workers.take_over(present)
        return workers
    if any(gpus.policies):
        observer.note(f"GPUs: {gpus}")
    assert workers.spools is not None
    clear_spools(workers.spools)  # left over by a killed run
    workers.start(first)
    address = replace(
        workers.address("policy", "policy-0", threads=config.policy.threads and a_rank), controller=launch.address
    )
    others = node.commands_for_others(address, python_path=launch.python_path, restarts=config.elastic.restart_workers)
    for index, command in enumerate(others, 1):
        observer.note(f"machine {index} of policy-0 joins by: {command}")
    return workers


def _local_workers(launch: Launch, keeper: Keeper) -> LocalWorkers:
    config, controller = launch.config, launch.controller

    def others_than(name: str, role: Role) -> set[str]:
        guests = {peer.name for peer in controller.peers.of_role(role) if not peer.leaving}
        return {*workers.names(role), *guests} - {name}

    def is_missed(name: str) -> bool:
        is_rollout = name in workers.names("rollout")  # without a policy the run has ended
        return is_rollout and not controller.scheduler.is_over and not others_than(name, "rollout")

    def on_death(death: Death) -> None:
        others = others_than(death.name, "policy" if death.role == "policy" else "rollout")
        report = _describe(death, others)
        if death.restarting or others:
            launch.observer.note(report)
            controller.lifecycle.ended(death.name)
        else:
            controller.outcome.fail(WorkerFailed(report), worker=death.name)

    workers = LocalWorkers(
        keeper=keeper,
        token_file=launch.directory / "token",
        tls_file=launch.directory / TLS_FILE if launch.tls else None,
        log_dir=launch.directory / "logs",
        restart_workers=config.elastic.restart_workers,
        on_death=on_death,
        is_missed=is_missed,
        spools=spool_root(config.rollout.spool.directory, launch.directory),
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
        note=launch.observer.note,
    )
    return workers


def _describe(death: Death, others: Collection[str]) -> str:
    if death.restarting:
        then = "starting it again"
    elif others:
        then = f"it is given up, and the run continues with {', '.join(sorted(others))}"
    else:
        then = "the run cannot continue without it"
    if death.left:
        return f"no {death.role} worker is left: {death.name} has left on request; {then}"
    return f"{death.name} died ({death.status}); {then}. The end of logs/{death.name}.log:\n{death.last_lines}"

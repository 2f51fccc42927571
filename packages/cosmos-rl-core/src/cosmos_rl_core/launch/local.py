"""[run] placement = "local": the workers of this machine, of which those that die are started again.

Each death is reported with the end of its log. The processes belong to a `ProcessSupervisor`: that of the launcher of
`cosmos-rl run`, which outlives this process, or one here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import msgspec

from cosmos_rl_core.control.lifecycle import WorkerProcesses
from cosmos_rl_core.control.protocol import Role
from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.gpus import machine_gpus
from cosmos_rl_core.imports import WORKER
from cosmos_rl_core.launch.external import ExternalWorkers
from cosmos_rl_core.launch.gpus import GpuSupply, gpus_per_rollout
from cosmos_rl_core.launch.placement import STOP_GRACE_S, Added, Launch, Workers, threads
from cosmos_rl_core.launch.supervised.link import ControllerTask
from cosmos_rl_core.processes import child_variables
from cosmos_rl_core.rollout.spool.store import clear_spools, spool_root
from cosmos_rl_core.supervisor import USER_ERROR, ProcessEnd, ProcessSpec, ProcessSupervisor
from cosmos_rl_core.wire.handshake import keep_secret
from cosmos_rl_core.wire.tls import TLS_FILE
from cosmos_rl_core.workers.node import Node, WorkerAddress, to_arguments

ROLLOUT_GRACE_S, POLICY_GRACE_S = 10.0, 60.0
"""Maximum seconds that a worker runs after the end of the process that owns it. A policy may save meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The parameters of one worker process."""

    address: WorkerAddress
    node: Node
    gpus: tuple[str, ...]
    """Visible GPUs; empty on a machine without GPUs."""
    starts: int = 1
    """Number of starts, this one included."""

    @property
    def name(self) -> str:
        return self.address.name

    @property
    def data(self) -> bytes:
        """The content for `of`, which the owner of the process keeps for a later controller."""
        return msgspec.msgpack.encode(self, enc_hook=str)  # str: of a Path

    @classmethod
    def of(cls, data: bytes) -> WorkerSpec:
        return msgspec.msgpack.decode(data, type=cls, dec_hook=lambda kind, value: kind(value))


class LocalWorkers(Workers, WorkerProcesses):
    """Decides which workers are started, started again, and missed. Another object owns the processes."""

    def __init__(self, launch: Launch) -> None:
        self._launch, self._controller, self._config = launch, launch.controller, launch.config
        self._task = launch.supervised.task if launch.supervised else None
        self._processes = launch.supervised or ProcessSupervisor()
        self._guests = ExternalWorkers(launch)
        """Workers of other machines that have joined the run."""
        self._supply = _supply(launch)
        """GPUs of workers that are added."""
        self._first: dict[str, WorkerSpec] = {}
        """The first worker of each role, whose settings apply to those that are added."""
        self._workers: dict[str, WorkerSpec] = {}
        self._leaving: set[str] = set()
        """Workers that shall leave, so that their end is no death."""
        self._stopping = False
        self._changed = asyncio.Event()

    def begin(self) -> None:
        """Start the workers of a new run, or continue with those of a dead controller; from then on receive ends."""
        policy, rollout = threads(self._config)
        node, gpus = self._launch.policy_node, self._launch.gpus
        a_rank = max(1, policy // node.ranks_per_node)
        first = [
            *self.replicas("policy", threads=a_rank, gpus=gpus.policies, node=node),
            *self.replicas("rollout", threads=rollout, gpus=gpus.rollouts, processes_per_gpu=gpus.processes_per_gpu),
        ]
        if self._task is not None and self._task.began:
            self.take_over(self._task)
        else:
            clear_spools(self._spools)  # left over by a killed run
            self.start(first)
            self._print_others(self._config.policy.threads and a_rank)
        self._watching = asyncio.create_task(self._watch())

    def _print_others(self, threads: int | None) -> None:
        """Print the GPUs of this machine's workers, and the commands for the other machines of the policy."""
        launch = self._launch
        if any(launch.gpus.policies):
            launch.observer.note(f"GPUs: {launch.gpus}")
        policy = replace(self.address("policy", "policy-0", threads=threads), controller=launch.address)
        others = launch.policy_node.commands_for_others(
            policy, python_path=launch.python_path, restarts=self._config.elastic.restart_workers
        )
        for index, command in enumerate(others, 1):
            launch.observer.note(f"machine {index} of policy-0 joins by: {command}")

    async def _watch(self) -> None:
        """Receive the ends of processes. An error here ends the run."""
        try:
            while True:
                self.ended(await self._processes.next_end())
        except Exception as error:
            self._controller.outcome.fail(error)

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
        replicas = []
        for i, visible in enumerate(gpus):
            address = replace(self.address(role, f"{role}-{i}", threads=threads), processes_per_gpu=processes_per_gpu)
            replicas.append(WorkerSpec(address=address, node=node or Node(), gpus=tuple(visible)))
        if replicas:
            self._first[role] = replicas[0]
        return replicas

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        """Start these workers, or start them again."""
        self._workers |= {spec.name: spec for spec in workers}
        self._restore_secrets()
        self._processes.start([self._process(spec) for spec in workers])

    def _restore_secrets(self) -> None:
        """Write those of the run's files again that were removed and that a worker reads."""
        token_file, tls = self._launch.directory / "token", self._launch.tls
        with contextlib.suppress(OSError):  # the worker reports an unreadable file
            keep_secret(token_file, self._launch.token.hex())
            if tls is not None:
                keep_secret(token_file.with_name(TLS_FILE), tls.bundle)

    def _process(self, spec: WorkerSpec) -> ProcessSpec:
        """Return the process of a worker of this controller."""
        launch, launcher = self._launch, self._task.launcher if self._task else os.getpid()
        address = replace(spec.address, controller=launch.address, launcher=launcher)
        is_policy = address.role == "policy"
        return ProcessSpec(
            name=spec.name,
            command=(*WORKER, *to_arguments(address, spec.node)),
            variables=child_variables(launch.python_path, threads=address.threads, gpus=spec.gpus),
            log=str(self._log(spec.name)),
            inherited=(launch.lock,) if is_policy else (),  # the launcher has it under the same number
            orphan_s=POLICY_GRACE_S if is_policy else ROLLOUT_GRACE_S,
            data=spec.data,
        )

    def _log(self, name: str) -> Path:
        return self._launch.directory / "logs" / f"{name}.log"

    def take_over(self, task: ControllerTask) -> None:
        """Continue with the workers of a dead controller."""
        self._workers = {spec.name: WorkerSpec.of(spec.data) for spec in task.workers}
        for end in task.ended:
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
                    threads=threads(self._config, rollouts=number)[1] if role == "rollout" else first.address.threads,
                    processes_per_gpu=1
                    if self._supply.in_turns
                    else max((shared[gpu] + 1 for gpu in visible), default=1),
                )
                added.append(replace(first, address=address, gpus=tuple(visible)))
        self.start(added)
        return Added(names=[spec.name for spec in added])

    def dismiss(self, name: str, *, connected: bool) -> None:
        if name in self._workers:
            self._leaving.add(name)
            if not connected:
                self._processes.kill([name])

    def end_silent(self, name: str) -> None:
        """Kill a worker that does not answer, as in a call that keeps Python's lock; it is started again."""
        if name in self._workers and name not in self._leaving:
            self._launch.observer.note(f"{name} has not answered for too long and is killed")
            self._processes.kill([name])

    def _assign(self, more: Mapping[Role, int], *, without: Sequence[str] = ()) -> dict[Role, list[Sequence[str]]]:
        for role, number in more.items():
            if number and (machines := self._first[role].node.num_nodes) > 1:
                raise UserError(f"a {role} replica of {machines} machines cannot be added to a run")
        in_use = {name: spec.gpus for name, spec in self._workers.items() if spec.gpus and name not in without}
        return self._supply.assign(more, in_use=in_use)

    def _has_had(self, name: str, present: Mapping[str, WorkerSpec]) -> bool:
        return name in present or name in self._controller.ledger.members.by_name or self._log(name).exists()

    def address(self, role: str, name: str, *, threads: int | None) -> WorkerAddress:
        """Return the command-line parameters of a worker of this run, without its controller."""
        run = self._launch.directory
        tls_file = run / TLS_FILE if self._launch.tls else None
        return WorkerAddress(
            role=role, name=name, run=run, token_file=run / "token", tls_file=tls_file, threads=threads
        )

    async def leave(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Wait until all workers have left; kill the remaining ones after `grace_s`."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_ended(), grace_s)
        if self._workers:
            self.kill()
            await self._all_ended()
        self._watching.cancel()
        await self._guests.leave()
        clear_spools(self._spools)

    @property
    def _spools(self) -> Path:
        """Folder of this machine's spools, removed before the workers start and when they have left."""
        return spool_root(self._config.rollout.spool.directory, self._launch.directory)

    async def _all_ended(self) -> None:
        while self._workers:
            self._changed.clear()
            await self._changed.wait()

    def kill(self) -> None:
        """End every worker now."""
        self._stopping = True
        self._processes.kill(list(self._workers))
        self._guests.kill()

    def ended(self, end: ProcessEnd, *, counts: bool = True) -> None:
        """Receive the end of a process: report it and start the worker again, unless it has left and is not missed.

        counts: whether a restart is one of [elastic] restart_workers: of a policy replica over several machines, those
        of this machine's part.
        """
        spec = self._workers[end.name]
        left, role = end.exit_code == 0, spec.address.role
        if self._stopping or end.name in self._leaving or (left and not self._is_missed(end.name)):
            return self._forget(end.name)
        most = self._config.elastic.restart_workers
        restarting = end.exit_code != USER_ERROR and (not counts or spec.starts <= most)
        if not restarting:
            self._forget(end.name)
        others = self._others(end.name, "policy" if role == "policy" else "rollout")
        report = _report(end, role, restarting=restarting, others=others)
        if restarting or others:
            self._launch.observer.note(report)
            self._controller.lifecycle.ended(end.name)
        else:
            self._controller.outcome.fail(WorkerFailed(report), worker=end.name)
        if restarting:
            self.start([replace(spec, starts=spec.starts + counts)])

    def _others(self, name: str, role: Role) -> set[str]:
        """Return the other workers of a role, here and on other machines."""
        guests = {peer.name for peer in self._controller.peers.of_role(role) if not peer.leaving}
        return {*self.names(role), *guests} - {name}

    def _is_missed(self, name: str) -> bool:
        """Return whether the run stands still without this worker, which has left."""
        is_rollout = name in self.names("rollout")  # without a policy the run has ended
        return is_rollout and not self._controller.scheduler.is_over and not self._others(name, "rollout")

    def _forget(self, name: str) -> None:
        del self._workers[name]
        self._leaving.discard(name)
        self._processes.forget(name)
        self._changed.set()


def _supply(launch: Launch) -> GpuSupply:
    config = launch.config
    return GpuSupply(
        visible=machine_gpus(os.environ, config.run.device),
        per_worker={
            "policy": launch.policy_node.ranks_per_node,
            "rollout": 0 if config.is_sft else gpus_per_rollout(config),
        },
        share=config.run.share_gpus,
        in_turns=config.run.colocate,
    )


def _report(end: ProcessEnd, role: str, *, restarting: bool, others: Collection[str]) -> str:
    """Return the message of a death. others: workers of the same role that remain."""
    if restarting:
        then = "starting it again"
    elif others:
        then = f"it is given up, and the run continues with {', '.join(sorted(others))}"
    else:
        then = "the run cannot continue without it"
    if end.exit_code == 0:
        return f"no {role} worker is left: {end.name} has left on request; {then}"
    return f"{end.name} died ({end.status}); {then}. The end of logs/{end.name}.log:\n{end.last_lines}"


async def start_processes(launch: Launch) -> LocalWorkers:
    """Start every worker of this machine; print the commands for the other machines."""
    workers = LocalWorkers(launch)
    launch.controller.lifecycle.processes = workers
    workers.begin()
    return workers

"""Starts the workers of a run: processes on this machine (`local`), or tasks in the controller's process (`inline`).

workers = await start_processes(launch)
...
await workers.leave()          once the controller has sent them Stop
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.server import Controller
from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.launch.local import Death, LocalWorkers, share_threads
from cosmos_rl_core.launch.observer import RunObserver
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.processes import allot, machine_gpus
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.rollout.spool.store import clear_spools, spool_root
from cosmos_rl_core.wire.channel import ConnectionClosed, Hello, connect
from cosmos_rl_core.workers.node import Node

STOP_GRACE_S = 60.0
"""Maximum seconds for a worker to leave after Stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Inputs for starting the workers of a run."""

    config: RunConfig
    directory: Path
    controller: Controller
    address: str
    """Address of the controller."""
    token: bytes
    policy_node: Node
    """This machine's part of the policy replica."""
    python_path: tuple[str, ...]
    rewards: Mapping[str, Any]
    """Reward functions by label that exist only in this process."""
    observer: RunObserver
    lock: int
    """Descriptor of the run directory's lock; a policy process keeps it until it ends, as it may be saving."""


class Workers(Protocol):
    """The workers of one run."""

    async def leave(self) -> None:
        """Wait until all workers have left; end the others."""
        ...

    def kill(self) -> None:
        """End all workers now."""
        ...


class Processes:
    """Workers in separate processes."""

    def __init__(self, workers: LocalWorkers, spools: Path) -> None:
        """spools: folder of this machine's spools, removed when the workers have left."""
        self._workers = workers
        self._spools = spools

    async def leave(self) -> None:
        await self._workers.stop(grace_s=STOP_GRACE_S)
        clear_spools(self._spools)

    def kill(self) -> None:
        self._workers.kill()


class Tasks:
    """Workers in the controller's own process."""

    def __init__(self, tasks: list[asyncio.Task[None]]) -> None:
        self._tasks = tasks

    async def leave(self) -> None:
        _, late = await asyncio.wait(self._tasks, timeout=STOP_GRACE_S)
        for task in late:  # the run's own error, if there is one, must not give way to a TimeoutError
            task.cancel()

    def kill(self) -> None:
        """Do nothing: tasks end with the process."""


async def start_processes(launch: Launch) -> Workers:
    """Start every worker of this machine; print the commands for the other machines."""
    config, controller, observer = launch.config, launch.controller, launch.observer

    def on_death(death: Death) -> None:
        then = "starting it again" if death.restarting else "the run cannot continue without it"
        report = f"{death.name} died ({death.status}); {then}. The end of logs/{death.name}.log:\n{death.last_lines}"
        if death.restarting:
            observer.note(report)
        else:
            controller.fail(WorkerFailed(report))

    workers = LocalWorkers(
        controller=launch.address,
        token_file=launch.directory / "token",
        token=launch.token,
        log_dir=launch.directory / "logs",
        restart_workers=config.elastic.restart_workers,
        on_death=on_death,
        python_path=launch.python_path,
        policy_keeps=(launch.lock,),
    )
    spools = spool_root(config.rollout.spool.directory, launch.directory)
    clear_spools(spools)  # left over by a killed run
    node = launch.policy_node
    policy, rollout = threads(config)
    a_rank = max(1, policy // node.ranks_per_node)
    replicas = 0 if config.is_sft else config.rollout.replicas
    gpus = allot(machine_gpus(os.environ), [node.ranks_per_node, *[1] * replicas])
    workers.start("policy", threads=a_rank, gpus=gpus[:1], node=node)
    address = workers.address("policy", "policy-0", threads=config.policy.threads and a_rank)
    for index, command in enumerate(node.commands_for_others(address, python_path=launch.python_path), 1):
        observer.note(f"machine {index} of policy-0 joins by: {command}")
    workers.start("rollout", threads=rollout, gpus=gpus[1:])
    return Processes(workers, spools)


async def start_tasks(launch: Launch) -> Workers:
    """Run every worker beside the controller. Raises UserError for a policy replica of several ranks."""
    # Imports take seconds in which the loop answers nobody: before there is a connection with a deadline.
    import torch

    from cosmos_rl_core.workers import policy, rollout, steps  # noqa: F401
    from cosmos_rl_core.workers.context import WorkerContext
    from cosmos_rl_core.workers.main import serve_role

    if launch.policy_node.num_ranks > 1:
        raise UserError(
            f'[run] placement = "inline" has one process, but [policy.parallel] needs {launch.policy_node.num_ranks} '
            'ranks; set placement = "local"'
        )

    build_lock = threading.Lock()

    async def work(role: str, name: str) -> None:
        hello = Hello(name=name, role=role)
        connection = await connect(launch.address, token=launch.token, hello=hello, decode=p.ToWorker, timeout_s=10.0)
        timeline = Timeline(process=name)
        context = WorkerContext(
            name=name,
            token=launch.token,
            timeline=timeline,
            threads=None,
            shares_process=True,
            build_lock=build_lock,
            rewards=launch.rewards,
        )
        try:
            await serve_role(role, context, connection)
        except ConnectionClosed as error:  # nothing starts it again here
            launch.controller.fail(WorkerFailed(f"{name}: {error}"))

    config = launch.config
    torch.manual_seed(config.run.seed)
    names = ["policy-0", *([] if config.is_sft else [f"rollout-{i}" for i in range(config.rollout.replicas)])]
    return Tasks([asyncio.create_task(work(name.partition("-")[0], name)) for name in names])


def threads(config: RunConfig) -> tuple[int, int]:
    """Return the CPU threads of a policy replica on this machine and of a rollout process."""
    cores = len(os.sched_getaffinity(0))
    if config.is_sft:
        return config.policy.threads or cores, 1
    return share_threads(
        cores=cores,
        policy=config.policy.threads,
        rollout=config.rollout.threads,
        rollout_replicas=config.rollout.replicas,
        overlap=config.sync.max_staleness > 0,
    )

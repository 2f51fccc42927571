"""The interface of a [run] placement, and the placement "inline": workers as tasks in the controller's process.

workers = await start(launch)  `start_tasks`, `local.start_processes`; `run.PLACEMENTS` has all of them
...
await workers.leave()          once the controller has sent them Stop
"""

from __future__ import annotations

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.server import Controller
from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.launch.gpus import AssignedGpus, gpus_per_rollout
from cosmos_rl_core.launch.observer import RunObserver
from cosmos_rl_core.launch.supervised.link import LauncherLink
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.wire.channel import ConnectionClosed, Hello, connect
from cosmos_rl_core.wire.tls import Tls
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
    tls: Tls | None
    """Certificate of workers; None without TLS."""
    policy_node: Node
    """This machine's part of the policy replica."""
    gpus: AssignedGpus
    """GPUs of the workers of this machine."""
    python_path: tuple[str, ...]
    rewards: Mapping[str, Any]
    """Reward functions by label that exist only in this process."""
    observer: RunObserver
    lock: int
    """Descriptor of the run directory's lock; a policy process keeps it until it ends, as it may be saving."""
    supervised: LauncherLink | None = None
    """Link to the process that owns the workers; None: they are children of this process."""


@dataclass(frozen=True, slots=True)
class Added:
    """Workers that a placement adds to a run."""

    names: Sequence[str] = ()
    """Those that were started."""
    commands: Sequence[str] = ()
    """Commands of those that somebody else must start."""


class Workers(ABC):
    """The workers of one run. A placement without processes of its own on this machine overrides `leave` and `kill`."""

    def names(self, role: p.Role) -> list[str]:
        """Return the workers of a role whose processes run here, the oldest first; also those not connected yet."""
        return []

    def has(self, name: str) -> bool:
        """Return whether this process runs here, also one that shall leave."""
        return False

    def check(self, more: Mapping[p.Role, int], *, without: Sequence[str]) -> None:  # noqa: B027  nothing by default
        """Raise UserError if `more` workers cannot be added, by role, once those of `without` have left."""

    def add(self, more: Mapping[p.Role, int]) -> Added:
        """Start `more` workers, by role, under new names. Raises UserError as `check`."""
        return Added()

    def dismiss(self, name: str, *, connected: bool) -> None:  # noqa: B027
        """Expect the end of a worker that the controller drains; end it here unless it is `connected`."""

    @abstractmethod
    async def leave(self) -> None:
        """Wait until all workers have left; end the others."""

    @abstractmethod
    def kill(self) -> None:
        """End all workers now."""


class InlineWorkers(Workers):
    """Tasks in the controller's own process."""

    def __init__(self, tasks: list[asyncio.Task[None]]) -> None:
        self._tasks = tasks

    def check(self, more: Mapping[p.Role, int], *, without: Sequence[str]) -> None:
        raise UserError('[run] placement = "inline" has a fixed number of workers; set placement = "local"')

    async def leave(self) -> None:
        _, late = await asyncio.wait(self._tasks, timeout=STOP_GRACE_S)
        for task in late:  # a TimeoutError here would replace the run's own error
            task.cancel()

    def kill(self) -> None:
        """Do nothing: tasks end with the process."""


async def start_tasks(launch: Launch) -> Workers:
    """Run every worker beside the controller. Raises UserError for a policy replica of several ranks."""
    # Imports block the loop for seconds, so they come before any connection with a deadline.
    import torch

    from cosmos_rl_core.parallel.device import use_device
    from cosmos_rl_core.workers import policy, rollout, steps  # noqa: F401
    from cosmos_rl_core.workers.connection import LastingConnection
    from cosmos_rl_core.workers.context import WorkerContext
    from cosmos_rl_core.workers.main import serve_role

    if launch.policy_node.num_ranks > 1:
        raise UserError(
            f'[run] placement = "inline" has one process, but [policy.parallel] needs {launch.policy_node.num_ranks} '
            'ranks; set placement = "local"'
        )
    if launch.config.policy.replicas > 1:
        raise UserError(
            f'[run] placement = "inline" has one policy, but [policy] replicas = {launch.config.policy.replicas}; set '
            'placement = "local"'
        )

    build_lock = threading.Lock()
    to_thread = ThreadPoolExecutor(thread_name_prefix="asyncio", initializer=use_device)
    asyncio.get_running_loop().set_default_executor(to_thread)

    async def work(role: str, name: str) -> None:
        hello = Hello(name=name, role=role)
        connection = await connect(
            launch.address, token=launch.token, hello=hello, decode=p.ToWorker, timeout_s=10.0, tls=launch.tls
        )
        timeline = Timeline(process=name)
        context = WorkerContext(
            name=name,
            token=launch.token,
            tls=launch.tls,
            controller=launch.address,
            timeline=timeline,
            threads=None,
            processes_per_gpu=1 if launch.config.run.colocate else len(names),
            shares_process=True,
            log_file=launch.directory / "logs" / f"{name}.log",
            build_lock=build_lock,
            rewards=launch.rewards,
        )
        try:
            lasting = LastingConnection(connection, connect=None, leaving=context.leaving)
            await serve_role(role, context, lasting)
        except ConnectionClosed as error:  # nothing starts it again here
            launch.controller.outcome.fail(WorkerFailed(f"{name}: {error}"), worker=name)

    config = launch.config
    torch.manual_seed(config.run.seed)
    names = ["policy-0", *([] if config.is_sft else [f"rollout-{i}" for i in range(config.rollout.replicas)])]
    return InlineWorkers([asyncio.create_task(work(name.partition("-")[0], name)) for name in names])


def threads(config: RunConfig, *, rollouts: int | None = None) -> tuple[int, int]:
    """Return the CPU threads of a policy replica on this machine and of a rollout process, one of each GPU.

    rollouts: rollout replicas on this machine; default: as in the recipe.
    """
    cores = len(os.sched_getaffinity(0))
    if config.is_sft:
        return config.policy.threads or cores, 1
    return share_threads(
        cores=cores,
        policy=config.policy.threads,
        rollout=config.rollout.threads,
        rollout_replicas=(rollouts or config.rollout.replicas) * gpus_per_rollout(config),
        overlap=config.sync.max_staleness > 0 and not config.run.colocate,
    )


def share_threads(
    *, cores: int, policy: int | None, rollout: int | None, rollout_replicas: int, overlap: bool
) -> tuple[int, int]:
    """Return the CPU threads of a policy and of a rollout replica, by default from the number of cores.

    Roles that work at the same time share the cores; roles that alternate (max_staleness = 0, colocate) each get all
    of them.
    """
    if not overlap:
        return policy or cores, rollout or max(1, cores // rollout_replicas)
    half = max(1, cores // 2)
    return policy or half, rollout or max(1, (cores - half) // rollout_replicas)

"""What a worker does once it is connected: learn its recipe, run its role beside its heartbeat, leave cleanly.

The same coroutines run in a process of their own (`local`) and side by side in one process (`inline`).
"""

from __future__ import annotations

import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cosmos_rl_core.config.load import load_config, load_domain
from cosmos_rl_core.config.run import RunConfig
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.client import ControllerClient
from cosmos_rl_core.control.wire import Connection
from cosmos_rl_core.interfaces import Domain
from cosmos_rl_core.observe.trace import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a worker process has before it knows its recipe."""

    name: str
    connection: Connection
    token: bytes
    timeline: Timeline
    threads: int | None
    """CPU threads of the tensor work; None leaves torch's own choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What every role builds itself from."""

    context: WorkerContext
    config: RunConfig
    domain: Domain
    client: ControllerClient
    compute: ThreadPoolExecutor
    """One thread for all tensor work."""
    run_dir: Path
    resume_from: Path | None

    def prepare_torch(self) -> None:
        """Fix threads and seed; called in the compute thread before anything is built."""
        import torch

        if self.context.threads is not None:
            torch.set_num_threads(self.context.threads)
        torch.manual_seed(self.config.run.seed)


class Role(Protocol):
    """A role of a worker."""

    async def run(self) -> None:
        """Build the parts, work until the run is over, put things away."""
        ...

    def pulse(self) -> p.Heartbeat:
        """What the next heartbeat says; may be asked for before anything is built."""
        ...


async def run_role(role: str, context: WorkerContext) -> None:
    """Receive the recipe, run `policy` or `rollout` to the end, say goodbye."""
    from cosmos_rl_core.launch.policy_role import PolicyRole
    from cosmos_rl_core.launch.rollout_role import RolloutRole

    welcome = await context.connection.receive()
    assert isinstance(welcome, p.Welcome)
    config = load_config(tomllib.loads(welcome.config))
    client = ControllerClient(context.connection)
    with ThreadPoolExecutor(1, thread_name_prefix="compute") as compute:
        assignment = Assignment(
            context=context,
            config=config,
            domain=load_domain(config.run.domain),
            client=client,
            compute=compute,
            run_dir=Path(welcome.run_dir),
            resume_from=Path(welcome.resume_from) if welcome.resume_from else None,
        )
        worker: Role = {"policy": PolicyRole, "rollout": RolloutRole}[role](assignment)
        try:
            await client.beside(worker.run(), pulse=worker.pulse)
            await context.connection.send(p.Goodbye())
            context.connection.close()
        finally:
            context.timeline.write(assignment.run_dir / "logs" / f"{context.name}.trace.json")

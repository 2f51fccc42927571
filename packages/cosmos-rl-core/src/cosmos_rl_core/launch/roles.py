"""What a worker does once it is connected: learn its recipe, run its role beside its heartbeat, leave cleanly.

The same coroutines run in a process of their own (`local`) and side by side in one process (`inline`).
"""

from __future__ import annotations

import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from cosmos_rl_core.config.load import load_config, load_domain
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.client import ControllerClient
from cosmos_rl_core.launch.assignment import Assignment, WorkerContext


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
    # torch comes with the roles' parts: a worker that cannot connect fails before that
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

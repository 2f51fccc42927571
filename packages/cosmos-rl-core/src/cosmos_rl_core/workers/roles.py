"""Run a connected worker: receive the recipe, run the role beside the heartbeat, leave cleanly.

The same coroutines run in a process of their own (`local`), side by side in one process (`inline`), and in every rank
of a policy replica of several (`follow`, in those that are not connected).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.recipe.load import load_config, load_domain
from cosmos_rl_core.wire.channel import Connection
from cosmos_rl_core.workers.client import ControllerClient
from cosmos_rl_core.workers.context import Assignment, WorkerContext, collector_paused


class Role(Protocol):
    """A role of a worker."""

    async def run(self) -> None:
        """Build the parts, work until the run is over, put things away."""
        ...

    def pulse(self) -> p.Heartbeat:
        """What the next heartbeat says; may be asked for before anything is built."""
        ...


async def run_role(role: str, context: WorkerContext, connection: Connection) -> None:
    """Receive the recipe, run `policy` or `rollout` to the end, say goodbye."""
    with collector_paused():  # torch comes with the roles' parts: a worker that cannot connect fails before that
        from cosmos_rl_core.workers.policy import PolicyRole
        from cosmos_rl_core.workers.rollout import RolloutRole
        from cosmos_rl_core.workers.steps import DirectLink

    welcome = await connection.receive()
    if context.ranks is not None:
        await context.ranks.broadcast(welcome)
    if isinstance(welcome, p.Stop):  # the run ended while this worker came
        connection.close()
        return
    client = ControllerClient(connection)
    with _assigned(context, welcome) as assignment:
        worker: Role
        if role == "policy":
            worker = PolicyRole(assignment, DirectLink(client, context.ranks))
        else:
            worker = RolloutRole(assignment, client)
        await client.beside(worker.run(), pulse=worker.pulse)
        await connection.send(p.Goodbye())
        connection.close()


async def follow(context: WorkerContext) -> None:
    """Run the policy in a rank that reaches the controller through rank 0."""
    from cosmos_rl_core.workers.policy import PolicyRole
    from cosmos_rl_core.workers.steps import FollowerLink

    assert context.ranks is not None
    welcome = await context.ranks.receive()
    if isinstance(welcome, p.Stop):
        return
    with _assigned(context, welcome) as assignment:
        await PolicyRole(assignment, FollowerLink(context.ranks)).run()


@contextmanager
def _assigned(context: WorkerContext, welcome: p.ToWorker) -> Iterator[Assignment]:
    """Read the recipe; write the timeline at the end, however it comes."""
    assert isinstance(welcome, p.Welcome)
    config, run_dir = load_config(tomllib.loads(welcome.config)), Path(welcome.run_dir)
    compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
    finished = False
    try:
        yield Assignment(
            context=context,
            config=config,
            domain=load_domain(config.run.domain),
            compute=compute,
            run_dir=run_dir,
            resume_from=welcome.resume_from,
            last_step=welcome.last_step or None,
            kept=tuple(welcome.kept),
        )
        finished = True
    finally:
        context.timeline.write(run_dir / "logs" / f"{context.name}.trace.json")
        compute.shutdown(wait=finished or context.ranks is None)  # a rank that failed may never get an answer

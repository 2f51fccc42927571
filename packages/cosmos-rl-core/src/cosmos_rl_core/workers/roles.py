"""Run a connected worker: receive the recipe, run the role while sending heartbeats, send Goodbye.

The same coroutines run in separate processes (`local`), concurrently in one process (`inline`), and in every rank of
a policy replica of several ranks (`follow`, in the ranks that are not connected).
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
        """Build the parts, work until the run is over, release resources."""
        ...

    def pulse(self) -> p.Heartbeat:
        """Return the next heartbeat; may be called before anything is built."""
        ...


async def run_role(role: str, context: WorkerContext, connection: Connection) -> None:
    """Receive the recipe, run `policy` or `rollout` to the end, send Goodbye."""
    with collector_paused():  # imports torch; a worker that cannot connect fails earlier
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
    """Run the policy role in a rank that is connected to the controller through rank 0."""
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
    """Load the recipe; write the timeline at the end, also after an error."""
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
        compute.shutdown(wait=finished or context.ranks is None)  # a failed rank's collective may never return

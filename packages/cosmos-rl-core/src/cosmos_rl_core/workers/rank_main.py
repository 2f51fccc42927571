"""Entry point of one rank of a policy replica, started by `workers.agent`.

Rank 0 is connected to the controller. A rank that fails writes its error to a file and exits; its agent reports it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from functools import partial
from pathlib import Path

from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.parallel.device import use_device
from cosmos_rl_core.processes import end_after, write_stacks_on_signal
from cosmos_rl_core.wire.advertised import worker_address
from cosmos_rl_core.workers.context import WorkerContext
from cosmos_rl_core.workers.failure import Failure
from cosmos_rl_core.workers.main import connect_to, follow, run_role
from cosmos_rl_core.workers.node import AGENT_PID, LEFT_FILE, Node, WorkerAddress, from_arguments
from cosmos_rl_core.workers.ranks import Ranks

LISTEN_S = 0.5
"""Seconds between two looks of rank 0 for requests of other machines."""


def main() -> None:
    worker, node = from_arguments(sys.argv[1:], program="rank")
    write_stacks_on_signal()
    end_after(int(os.environ[AGENT_PID]))  # nobody else ends the ranks of an agent that was killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides about stops; the agent ends ranks by SIGTERM
    asyncio.run(_work(worker, node))


async def _work(worker: WorkerAddress, node: Node) -> None:
    """Run the rank and exit, without joining threads: after a failure they may wait for other ranks."""
    code = 0
    timeline = Timeline(process=f"{worker.name} rank {os.environ['RANK']}")
    try:
        await _run(worker, node, timeline)
    except Exception as error:
        failure = Failure.of(error, timeline)
        if not failure.user or failure.out_of_memory:
            traceback.print_exc()
        failure.write(Path(os.environ["TORCHELASTIC_ERROR_FILE"]))
        code = failure.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _run(worker: WorkerAddress, node: Node, timeline: Timeline) -> None:
    leads = os.environ["RANK"] == "0"
    use_device()  # this thread's; publishing runs in it
    leaving = asyncio.Event()
    connection = await connect_to(worker, leaving=leaving) if leads else None
    ranks = await asyncio.to_thread(Ranks.join, timeout_s=node.collective_timeout_s, store=node.store)
    context = WorkerContext(
        name=worker.name if leads else f"{worker.name}.{ranks.rank}",
        token=worker.token(),
        tls=worker.tls(),
        controller=worker.controller,
        timeline=timeline,
        threads=worker.threads,
        address=worker_address(worker.controller),
        ranks=ranks,
        leaving=leaving,
    )
    terminated = asyncio.Event()
    listening = asyncio.create_task(_listen(context, ranks, node, terminated))
    if connection is not None:
        await run_role(worker.role, context, connection)
    else:
        await follow(context)
    listening.cancel()
    if any(await ranks.gather(b"left" if terminated.is_set() else b"")):
        Path(os.environ[LEFT_FILE]).touch()
    await ranks.leave()


async def _listen(context: WorkerContext, ranks: Ranks, node: Node, terminated: asyncio.Event) -> None:
    """Pass the signals of the agents to rank 0, which leaves or saves with all others.

    terminated: set in rank 0 when an agent got SIGTERM.
    """

    def leave() -> None:
        context.leaving.set()
        terminated.set()

    requests = {"leave": (signal.SIGUSR2, leave), "save": (signal.SIGUSR1, context.saving.set)}
    for request, (received, act) in requests.items():
        handler = act if ranks.rank == 0 else partial(ranks.ask, request)
        asyncio.get_running_loop().add_signal_handler(received, handler)
    while ranks.rank == 0 and node.num_nodes > 1:
        for request, (_, act) in requests.items():
            if await ranks.asked(request):
                act()
        await asyncio.sleep(LISTEN_S)


if __name__ == "__main__":
    main()

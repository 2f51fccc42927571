"""Entry point of a worker process: connect to the controller, run the role, report a failure.

    python -m cosmos_rl_core.workers.main --controller tcp://127.0.0.1:4000 --role rollout --name rollout-0 \
        --token-file runs/demo/token

For a policy replica of several ranks it becomes their agent (`workers.agent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import traceback

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.python_path import child_environment
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed, Hello, connect
from cosmos_rl_core.wire.listening import raise_descriptor_limit
from cosmos_rl_core.wire.token import read_token
from cosmos_rl_core.workers.context import WorkerContext
from cosmos_rl_core.workers.failure import Failure
from cosmos_rl_core.workers.node import Node, WorkerAddress, from_arguments
from cosmos_rl_core.workers.roles import run_role

CONNECT_TIMEOUT_S = 60.0


def main() -> None:
    sys.exit(run_worker(*from_arguments(sys.argv[1:], program="worker")))


def run_worker(worker: WorkerAddress, node: Node) -> int:
    """Work until the run ends and return the exit code. A worker of one process does not return: it exits."""
    raise_descriptor_limit()
    os.environ.update(child_environment(node.python_path.split(os.pathsep)))  # for the ranks too
    if node.num_ranks > 1:
        from cosmos_rl_core.workers.agent import run_node  # torch's agent takes a second to import

        return run_node(worker, node)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # they reach the whole process group; the controller decides
        signal.signal(number, signal.SIG_IGN)
    code = asyncio.run(_work(worker))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # does not wait for the thread of a reward that never returns


async def connect_to(worker: WorkerAddress) -> Connection:
    """Connect to the run's controller. Raises like `wire.channel.connect`, and UserError for the token file."""
    hello = Hello(name=worker.name, role=worker.role)
    token = read_token(worker.token_file)
    return await connect(worker.controller, token=token, hello=hello, decode=p.ToWorker, timeout_s=CONNECT_TIMEOUT_S)


async def _work(worker: WorkerAddress) -> int:
    try:
        connection = await connect_to(worker)
    except (UserError, ConnectionClosed) as error:
        print(f"{worker.name}: {error}", file=sys.stderr)  # noqa: T201  a worker's stderr is its log
        return 2 if isinstance(error, UserError) else 1
    context = WorkerContext(
        name=worker.name,
        token=read_token(worker.token_file),
        timeline=Timeline(process=worker.name),
        threads=worker.threads,
    )
    try:
        return await serve_role(worker.role, context, connection)
    except ConnectionClosed as error:
        print(f"{context.name}: {error}", file=sys.stderr)  # noqa: T201  a worker's stderr is its log
        return 1


async def serve_role(role: str, context: WorkerContext, connection: Connection) -> int:
    """Run the role to its end, report a failure to the controller, return the exit code.

    Raises ConnectionClosed when the controller is gone.
    """
    try:
        await run_role(role, context, connection)
    except ConnectionClosed:
        raise
    except Exception as error:
        failure = Failure.of(error)
        if not failure.user:
            traceback.print_exc()
        await _report(connection, p.Fatal(message=failure.message, user=failure.user))
        return failure.exit_code
    return 0


async def _report(connection: Connection, fatal: p.Fatal) -> None:
    with contextlib.suppress(ConnectionClosed):  # the controller has noticed the closed connection
        await connection.send(fatal)
        connection.close()


if __name__ == "__main__":
    main()

"""A worker's process: connect, run the role, and say on the way out what went wrong.

    python -m cosmos_rl_core.launch.worker --controller tcp://127.0.0.1:4000 --role rollout --name rollout-0 \
        --token-file runs/demo/token
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import traceback
from pathlib import Path

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.token import read_token
from cosmos_rl_core.control.wire import Connection, ConnectionClosed, Hello, connect
from cosmos_rl_core.interfaces import UserError
from cosmos_rl_core.launch.assignment import WorkerContext
from cosmos_rl_core.launch.directory import explain_no_room
from cosmos_rl_core.launch.roles import run_role
from cosmos_rl_core.observe.trace import Timeline

CONNECT_TIMEOUT_S = 60.0


def main() -> None:
    arguments = _parse()
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the controller decides who stops
        signal.signal(number, signal.SIG_IGN)
    code = asyncio.run(_work(arguments))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for the thread of a reward that never returns


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="one worker of a Cosmos-RL run")
    parser.add_argument("--controller", required=True, help="address of the controller")
    parser.add_argument("--role", required=True, choices=["policy", "rollout"])
    parser.add_argument("--name", required=True, help="name of this replica, unique in the run")
    parser.add_argument("--incarnation", type=int, default=0, help="times this replica was started before")
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


async def _work(arguments: argparse.Namespace) -> int:
    hello = Hello(name=arguments.name, role=arguments.role, incarnation=arguments.incarnation)
    try:
        token = read_token(arguments.token_file)
        connection = await connect(
            arguments.controller, token=token, hello=hello, decode=p.ToWorker, timeout_s=CONNECT_TIMEOUT_S
        )
    except (UserError, ConnectionClosed) as error:
        print(f"{arguments.name}: {error}", file=sys.stderr)  # noqa: T201  a worker's stderr is its log
        return 2 if isinstance(error, UserError) else 1
    context = WorkerContext(
        name=arguments.name,
        connection=connection,
        token=token,
        timeline=Timeline(process=arguments.name),
        threads=arguments.threads,
    )
    return await serve_role(arguments.role, context)


async def serve_role(role: str, context: WorkerContext) -> int:
    """Run the role to its end, tell the controller of any failure, return the exit code."""
    connection = context.connection
    try:
        await run_role(role, context)
    except UserError as error:
        await _report(connection, p.Fatal(message=str(error), user=True))
        return 2
    except ConnectionClosed as error:
        print(f"{context.name}: {error}", file=sys.stderr)  # noqa: T201  a worker's stderr is its log
        return 1
    except Exception as error:
        if isinstance(error, OSError) and (told := explain_no_room(error, "the run's files")):
            await _report(connection, p.Fatal(message=str(told), user=True))
            return 2
        traceback.print_exc()
        await _report(connection, p.Fatal(message=f"{type(error).__name__}: {error}", user=False))
        return 1
    return 0


async def _report(connection: Connection, fatal: p.Fatal) -> None:
    with contextlib.suppress(ConnectionClosed):  # then the controller knows already
        await connection.send(fatal)
        connection.close()


if __name__ == "__main__":
    main()

"""Entry point of a worker process: connect to the controller, receive the recipe, run the role, report a failure.

    python -m cosmos_rl_core.workers.main --role rollout --name rollout-0 --controller tcp://127.0.0.1:4000 \
        --token-file runs/demo/token

For a policy replica of several ranks this process becomes their agent (`workers.agent`). `run_role` runs in separate
processes (`local`), concurrently in one process (`inline`), and in rank 0 of several ranks; the other ranks run
`follow`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tomllib
import traceback
from collections.abc import Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import child_environment
from cosmos_rl_core.observe.machine import machine_log
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.processes import write_stacks_on_signal
from cosmos_rl_core.recipe.load import load_config, load_domain
from cosmos_rl_core.wire.advertised import worker_address
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed, Hello, connect
from cosmos_rl_core.wire.listening import raise_descriptor_limit
from cosmos_rl_core.wire.tls import Tls
from cosmos_rl_core.workers.client import ControllerClient
from cosmos_rl_core.workers.connection import ANSWER_S, LastingConnection
from cosmos_rl_core.workers.context import Assignment, WorkerContext
from cosmos_rl_core.workers.directory import directory_of_worker, shares_directory
from cosmos_rl_core.workers.failure import Failure, RefusedByController
from cosmos_rl_core.workers.node import Node, WorkerAddress, from_arguments, use_interface

CONNECT_TIMEOUT_S = 60.0
RETRY_S = 0.5
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with torch's allocator settings; torch 2.13 reads the second only without the first."""


def main() -> None:
    sys.exit(run_worker(*from_arguments(sys.argv[1:], program="worker")))


def run_worker(worker: WorkerAddress, node: Node) -> int:
    """Work until the run ends and return the exit code. A worker of one process does not return: it exits."""
    raise_descriptor_limit()
    write_stacks_on_signal()
    worker = worker.resolved()
    os.environ.update(child_environment(node.python_path.split(os.pathsep)))  # for the ranks too
    if worker.role == "policy":
        use_expandable_segments(os.environ)
    if node.num_ranks > 1:
        from cosmos_rl_core.workers.agent import run_node  # torch's agent takes a second to import

        return run_node(worker, node)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the controller decides
    code = asyncio.run(_work(worker, node))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # does not wait for the thread of a reward that never returns


def use_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Let torch's CUDA segments grow, as rows of varying length fragment fixed ones. The user's settings stay."""
    if not any(name in environment for name in ALLOCATOR):
        environment[ALLOCATOR[0]] = "expandable_segments:True"


async def connect_to(worker: WorkerAddress, *, leaving: asyncio.Event) -> LastingConnection:
    """Connect to the run's controller. Raises like `wire.channel.connect`, and UserError for the token file.

    leaving: set when the worker shall leave.
    """
    token, tls = worker.token(), worker.tls()

    async def again(address: str, incarnation: int) -> Connection:
        hello = Hello(name=worker.name, role=worker.role, incarnation=incarnation)
        return await connect(
            address or worker.controller, token=token, hello=hello, decode=p.ToWorker, timeout_s=ANSWER_S, tls=tls
        )

    first = await _first_connection(worker, token, tls)
    return LastingConnection(first, connect=again, leaving=leaving, launcher=worker.launcher)


async def _first_connection(worker: WorkerAddress, token: bytes, tls: Tls | None) -> Connection:
    """Connect as soon as the controller answers. Raises as `connect_to`, after `wait_s` UserError: a retry of the whole
    worker would wait as long again."""
    hello, loop, is_waiting = Hello(name=worker.name, role=worker.role), asyncio.get_running_loop(), False
    deadline = loop.time() + worker.wait_s
    while True:
        try:
            return await connect(
                worker.controller, token=token, hello=hello, decode=p.ToWorker, timeout_s=CONNECT_TIMEOUT_S, tls=tls
            )
        except ConnectionClosed as error:
            if loop.time() >= deadline:
                if not worker.wait_s:
                    raise
                raise UserError(f"the controller did not answer within {worker.wait_s:g} s: {error}") from error
            if not is_waiting:
                is_waiting = True
                worker.report_wait(str(error))
        await asyncio.sleep(RETRY_S)


def _listen_for_signals(context: WorkerContext) -> asyncio.Event:
    """On SIGTERM leave after the work in hand, on a second SIGTERM at once; on SIGUSR1 save a checkpoint.

    Returns an event that SIGTERM sets; a request of the controller sets `context.leaving` alone.
    """
    terminated = asyncio.Event()

    def leave() -> None:
        if context.leaving.is_set():
            os._exit(128 + signal.SIGTERM)
        context.leaving.set()
        terminated.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, leave)
    loop.add_signal_handler(signal.SIGUSR1, context.saving.set)
    return terminated


async def _work(worker: WorkerAddress, node: Node) -> int:
    leaving = asyncio.Event()
    try:
        connection, address = await connect_to(worker, leaving=leaving), worker_address(worker.controller)
    except (UserError, ConnectionClosed) as error:
        print(f"{worker.name}: {error}", file=sys.stderr)  # noqa: T201  a worker's stderr is its log
        return 2 if isinstance(error, UserError) else 1
    use_interface(node, os.environ, controller=worker.controller)
    context = WorkerContext(
        name=worker.name,
        token=worker.token(),
        tls=worker.tls(),
        address=address,
        controller=worker.controller,
        timeline=Timeline(process=worker.name),
        threads=worker.threads,
        processes_per_gpu=worker.processes_per_gpu,
        leaving=leaving,
    )
    terminated = _listen_for_signals(context)
    try:
        code = await serve_role(worker.role, context, connection)
        return worker.left_code if code == 0 and terminated.is_set() else code
    except ConnectionClosed as error:
        print(f"{context.name}: {error}", file=sys.stderr)  # noqa: T201  a worker's stderr is its log
        return 1


async def serve_role(role: str, context: WorkerContext, connection: LastingConnection) -> int:
    """Run the role to its end, report a failure to the controller, return the exit code.

    Raises ConnectionClosed when the controller is gone.
    """
    try:
        await run_role(role, context, connection)
    except ConnectionClosed:
        raise
    except RefusedByController as error:
        print(f"{context.name}: {error}", file=sys.stderr)  # noqa: T201  a worker's stderr is its log
        return 2
    except Exception as error:
        failure = Failure.of(error, context.timeline)
        if not failure.user or failure.out_of_memory:
            traceback.print_exc()
        elif not context.shares_process:
            print(f"{context.name}: {failure.message}", file=sys.stderr)  # noqa: T201
        if context.shares_process:  # nothing starts it again
            failure = replace(failure, consequence=False)
        await connection.send(failure.message_to_controller())
        connection.close()
        return failure.exit_code
    return 0


async def run_role(role: str, context: WorkerContext, connection: LastingConnection) -> None:
    """Receive the recipe, run `policy` or `rollout` to the end, send Goodbye."""
    from cosmos_rl_core.workers.policy import PolicyRole  # after the connection: imports torch
    from cosmos_rl_core.workers.rollout import RolloutRole
    from cosmos_rl_core.workers.steps import PolicyLink

    welcome = await connection.receive()
    if context.ranks is not None:
        await context.ranks.broadcast(welcome)
    if isinstance(welcome, p.Refused):
        raise RefusedByController(welcome.reason)
    if isinstance(welcome, p.Stop):  # the run ended while this worker was starting
        connection.close()
        return
    assert isinstance(welcome, p.Welcome)
    client = ControllerClient(connection, context, lineage=welcome.lineage)
    with _assigned(context, welcome, connection) as assignment:
        config = assignment.config
        shared = assignment.run_dir if assignment.shares_run_dir else None
        elastic = config.elastic
        connection.last(elastic.controller_wait_s, leave_s=elastic.leave_s, run_dir=shared)
        if role == "policy":
            worker = PolicyRole(assignment, PolicyLink(client, context.ranks, saving=context.saving))
        else:
            worker = RolloutRole(assignment, client)
        await client.beside(worker.run(), pulse=worker.pulse)
        await connection.leave()


async def follow(context: WorkerContext) -> None:
    """Run the policy role in a rank that is connected to the controller through rank 0."""
    from cosmos_rl_core.workers.policy import PolicyRole
    from cosmos_rl_core.workers.steps import PolicyLink

    assert context.ranks is not None
    welcome = await context.ranks.receive()
    if isinstance(welcome, p.Stop | p.Refused):
        return
    with _assigned(context, welcome, None) as assignment:
        await PolicyRole(assignment, PolicyLink(None, context.ranks)).run()


@contextmanager
def _assigned(
    context: WorkerContext, welcome: p.ToWorker, connection: LastingConnection | None
) -> Iterator[Assignment]:
    """Load the recipe, and write the timeline until the end, also after an error."""
    from cosmos_rl_core.parallel.device import chosen_device, use_device

    assert isinstance(welcome, p.Welcome)
    config, run_dir = load_config(tomllib.loads(welcome.config)), Path(welcome.run_dir)
    closing = contextlib.ExitStack()
    if not context.shares_process:  # otherwise the controller has chosen it for all
        closing.enter_context(chosen_device(config.run.device))
    use_device()  # the event loop's thread, and those of `asyncio.to_thread`
    if not context.shares_process:
        threads = ThreadPoolExecutor(thread_name_prefix="asyncio", initializer=use_device)
        asyncio.get_running_loop().set_default_executor(threads)
    shared = context.shares_process or shares_directory(run_dir, token=context.token)
    if not shared:
        run_dir = directory_of_worker(run_dir)
    compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
    context.log(f"process {os.getpid()} on {socket.gethostname()}, connected to {context.controller}")
    context.timeline.stream(run_dir / "spans" / f"{context.timeline.process}.jsonl")
    finished = False
    if not context.shares_process:  # otherwise the controller measures it
        closing.enter_context(machine_log(run_dir, context.timeline.process))
    try:
        yield Assignment(
            context=context,
            config=config,
            domain=load_domain(config.run.domain),
            compute=compute,
            run_dir=run_dir,
            shares_run_dir=shared,
            welcome=welcome,
            connection=connection,
        )
        finished = True
    finally:
        closing.close()
        context.timeline.close()
        compute.shutdown(wait=finished or context.ranks is None)  # a failed rank's collective may never return


if __name__ == "__main__":
    main()

"""N equal machines with the same command line: `cosmos-rl node FILE --nodes 3 --node 1 --head HOST`.

    node 0        the controller, the first machine of the first policy replica, and a port where the other nodes meet
    other nodes   join there, start their workers when the controller listens, and end with the run's exit code

Policy machines come first, then the rollouts, spread over the remaining nodes; without remaining nodes, over all. A
node that was lost and is started again joins again. If that is node 0, the run continues from its newest checkpoint,
and the other nodes start their workers again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from cosmos_rl_core.control.address_file import NAME as CONTROLLER_FILE
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.gpus import machine_gpus
from cosmos_rl_core.launch.placement import STOP_GRACE_S
from cosmos_rl_core.ops.clusters.launcher import CONTROLLER, INTERRUPTED, ClusterRun
from cosmos_rl_core.ops.clusters.meeting import (
    Begin,
    GivenUp,
    Meeting,
    NodeJoin,
    Over,
    ReplicaMachine,
    Reports,
)
from cosmos_rl_core.processes import child_variables
from cosmos_rl_core.supervisor import ProcessSpec, ProcessSupervisor
from cosmos_rl_core.wire.advertised import worker_address
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed, Hello, connect, serve
from cosmos_rl_core.wire.handshake import TOKEN_VARIABLE, environment_token
from cosmos_rl_core.wire.listening import is_loopback
from cosmos_rl_core.wire.tls import TLS_FILE, TLS_VARIABLE

PORT = 29600
"""Default port of node 0 for the other nodes. The next one is the controller's, and the one after it is for the ranks
of a policy replica over several machines."""
ROLE = "node"
"""Role in a node's Hello."""
CHECK_S = 0.2


def parts_of(run: ClusterRun, nodes: int) -> list[list[ReplicaMachine]]:
    """Return the parts of each node. Raises UserError if there are too few nodes, or nodes without work."""
    parts: list[list[ReplicaMachine]] = []
    for replica in run.policies():
        first = len(parts)
        parts += [[ReplicaMachine(replica, index, first)] for index in range(replica.machines)]
    needed, rollouts = len(parts), run.rollouts()
    if nodes < needed or nodes > needed + len(rollouts):
        raise UserError(
            f"--nodes {nodes}: the recipe needs at least {needed} for the policies, and has work for at most "
            f"{needed + len(rollouts)}; change [rollout] replicas, or [policy] replicas and num_nodes"
        )
    parts += [[] for _ in range(nodes - needed)]
    for number, replica in enumerate(rollouts):
        node = needed + number % (nodes - needed) if nodes > needed else number % nodes
        parts[node].append(ReplicaMachine(replica, 0, node))
    return parts


def gpus_of(parts: Sequence[ReplicaMachine], *, gpus: Sequence[str]) -> list[Sequence[str]]:
    """Return the GPUs of each part, of those of the machine; none on a machine without GPUs. Raises UserError."""
    needed = sum(part.replica.gpus for part in parts)
    if gpus and needed > len(gpus):
        names = ", ".join(part.replica.name for part in parts)
        raise UserError(
            f"{names} need {needed} GPUs of this node, which has {len(gpus)}; use more nodes, or smaller replicas"
        )
    of_parts, taken = [], 0
    for part in parts:
        of_parts.append(gpus[taken : taken + part.replica.gpus])
        taken += part.replica.gpus
    return of_parts


def _read(path: Path) -> bytes:
    """Return the content of a file; empty if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


@dataclass(slots=True, kw_only=True)
class ClusterNode:
    """One of the machines. `asyncio.run(node.run())` returns the exit code."""

    recipe: ClusterRun
    nodes: int
    node: int
    head: str
    port: int = PORT
    token: bytes = field(init=False)
    _parts: list[list[ReplicaMachine]] = field(init=False)
    _processes: ProcessSupervisor = field(default_factory=ProcessSupervisor)
    _report: Callable[[str, int], None] = field(init=False)
    """Called when this node's part of a policy replica is not started again: with the replica and the exit code."""
    _leaving: asyncio.Event = field(default_factory=asyncio.Event)
    _process: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        if not 0 <= self.node < self.nodes:
            raise UserError(f"--node {self.node}: there are {self.nodes} nodes, counted from 0")
        token = environment_token()
        if token is None and self.nodes > 1:
            raise UserError(
                f"{TOKEN_VARIABLE} is not set: give all nodes the same 64 hex digits, such as those of "
                "`openssl rand -hex 32`"
            )
        self.token = token or secrets.token_bytes(32)
        self._parts = parts_of(self.recipe, self.nodes)

    async def run(self) -> int:
        """Run this node's processes to the end of the run, and return the exit code. Raises UserError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._leave)
        try:
            return await (self._lead() if self.node == 0 else self._follow())
        finally:
            await self._processes.stop(grace_s=0.0)

    def _leave(self) -> None:
        """Pass the first signal on, on node 0 to the controller, which ends the run; the second kills all."""
        if self._leaving.is_set():
            self._processes.kill()
        self._leaving.set()
        self._processes.end_restarts()
        self._processes.terminate([CONTROLLER] if self.node == 0 else None)

    # -- node 0

    async def _lead(self) -> int:
        # raises before anything starts
        gpus_of(self._parts[0], gpus=machine_gpus(os.environ, self.recipe.config.run.device))
        section = self.recipe.config.run
        bind = section.bind if "bind" in section.model_fields_set else "0.0.0.0"
        meeting = Meeting(self._parts, end_replica=self._end_replica)
        self._report = meeting.give_up
        server = await serve(
            f"tcp://{bind}:{self.port}",
            token=self.token,
            decode=NodeJoin | GivenUp,
            on_connect=meeting.on_connect,
            allow_remote=not is_loopback(bind),
        )
        try:
            earlier = _read(self.recipe.directory / CONTROLLER_FILE)  # of a run that was killed
            controller = asyncio.create_task(self._control())
            workers = asyncio.create_task(self._work_beside(controller, meeting, earlier=earlier))
            code = await self._end_of(controller, workers, meeting.lost)
            meeting.over.set_result(code)
            await meeting.all_gone(timeout_s=STOP_GRACE_S)
            await self._processes.stop(grace_s=STOP_GRACE_S)
            await workers
            return code
        finally:
            await server.close()

    async def _end_of(
        self, controller: asyncio.Task[int], workers: asyncio.Task[None], lost: asyncio.Future[int]
    ) -> int:
        """Return the run's exit code. It ends without a policy, and after an error of this node."""
        await asyncio.wait([controller, workers, lost], return_when=asyncio.FIRST_COMPLETED)
        failed = workers.done() and workers.exception() is not None
        if not failed:
            await asyncio.wait([controller, lost], return_when=asyncio.FIRST_COMPLETED)
        if controller.done() or self._leaving.is_set():
            return await controller
        self._processes.end_restarts()
        self._processes.terminate([CONTROLLER])
        code = await controller
        self._processes.terminate()  # those that have not connected yet would wait for it
        if code not in (INTERRUPTED, 128 + signal.SIGTERM):  # it ended by itself, with the error of a worker
            return code
        return lost.result() if lost.done() else 1

    async def _control(self) -> int:
        """Run the controller to its end and return its exit code."""
        arguments = [*self.recipe.controller_arguments(), "--port", str(self.port + 1), "--advertise", self.head]
        return await self._processes.keep(self._spec(CONTROLLER, arguments))

    async def _work_beside(self, controller: asyncio.Task[int], meeting: Meeting, *, earlier: bytes) -> None:
        """Let all nodes begin when the controller listens, this one too.

        earlier: the content of controller.json before the start of the controller.
        """
        contact = self.recipe.directory / CONTROLLER_FILE
        while _read(contact) in (b"", earlier):
            await asyncio.wait([controller], timeout=CHECK_S)
            if controller.done():
                return
        meeting.join(0, self.head)
        meeting.begun.set()
        await self._work(self.head)

    # -- all nodes

    async def _work(self, first: str) -> int:
        """Run this node's workers to their end; return the highest exit code. first: as in Begin."""
        parts = self._parts[self.node]
        visible = gpus_of(self._parts[self.node], gpus=machine_gpus(os.environ, self.recipe.config.run.device))
        running = [self._keep(part, first, gpus) for part, gpus in zip(parts, visible, strict=True)]
        return max(await asyncio.gather(*running), default=0)

    async def _keep(self, part: ReplicaMachine, first: str, gpus: Sequence[str]) -> int:
        """Run a part to its end and return its exit code; report a policy that fails though nobody has ended it."""
        name = part.replica.name
        code = await self._processes.keep(self._spec(name, self._arguments(part, first), gpus=gpus))
        if code and part.replica.role == "policy" and not self._processes.is_last(name):
            self._report(name, code)
        return code

    def _spec(self, name: str, arguments: Sequence[str], *, gpus: Sequence[str] | None = None) -> ProcessSpec:
        """Return a process of this node. gpus: those it sees; default: all."""
        variables = {**child_variables(gpus=gpus), TOKEN_VARIABLE: self.token.hex()}
        return structs.replace(self.recipe.process(name, arguments), variables=variables)

    def _end_replica(self, replica: str) -> None:
        """End this node's part of a policy replica that is given up, if it has one."""
        self._processes.kill([replica])

    def _arguments(self, part: ReplicaMachine, first: str) -> list[str]:
        arguments = self.recipe.worker_arguments(part.replica, controller=f"tcp://{self.head}:{self.port + 1}")
        if part.replica.machines > 1:
            arguments += ["--node", str(part.index), "--rendezvous", f"{first}:{self.port + 2}"]
        if self.recipe.config.tls.enabled and not os.environ.get(TLS_VARIABLE):
            arguments += ["--tls-file", str(self.recipe.directory / TLS_FILE)]  # the controller has made it
        return arguments

    # -- other nodes

    async def _follow(self) -> int:
        # raises before anything starts
        gpus_of(self._parts[self.node], gpus=machine_gpus(os.environ, self.recipe.config.run.device))
        messages: asyncio.Queue[Begin | GivenUp] = asyncio.Queue()
        reports = Reports()
        link = asyncio.create_task(self._follow_head(messages.put_nowait, reports))
        left = asyncio.create_task(self._leaving.wait())
        begun, workers = None, left  # until there are workers, the node ends when it shall leave
        while True:
            message = asyncio.create_task(messages.get())
            await asyncio.wait([link, workers, message], return_when=asyncio.FIRST_COMPLETED)
            if link.done():
                await self._processes.stop(grace_s=STOP_GRACE_S)
                return link.result()
            if message.done():
                arrived = message.result()
                if isinstance(arrived, GivenUp):
                    self._end_replica(arrived.replica)
                    reports.answered.set()
                elif arrived != begun:
                    await self._processes.stop(grace_s=0.0)
                    workers.cancel()
                    begun, left = arrived, asyncio.create_task(self._leaving.wait())
                    self._report = reports.begin(arrived.life)
                    workers = asyncio.create_task(self._work_and_report(arrived, reports))
                continue
            message.cancel()
            if self._leaving.is_set():
                return INTERRUPTED
            if workers.result():
                return workers.result()
            workers = left  # they were dismissed: the node waits for the end of the run

    async def _work_and_report(self, begin: Begin, reports: Reports) -> int:
        """As `_work`, and until node 0 knows of a policy that is given up: it may end the run."""
        code = await self._work(begin.first)
        if reports.unanswered is not None:
            waits = [asyncio.create_task(event.wait()) for event in (reports.answered, self._leaving)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()
        return code

    async def _follow_head(self, arrived: Callable[[Begin | GivenUp], None], reports: Reports) -> int:
        """Stay connected to node 0, and return the run's exit code. Raises UserError if it does not return in time."""
        wait_s = self.recipe.config.cluster.start_wait_s
        while True:
            connection = await self._connect(wait_s)
            wait_s = self.recipe.config.elastic.controller_wait_s
            try:
                address = worker_address(f"tcp://{self.head}:{self.port}")
                join = NodeJoin(node=self.node, nodes=self.nodes, address=address, process=self._process)
                await connection.send(join)
                reports.send_over(connection)
                while not isinstance(message := await connection.receive(), Over):
                    arrived(message)
            except ConnectionClosed:
                continue
            connection.close()
            if message.reason:
                raise UserError(message.reason)
            return message.code

    async def _connect(self, wait_s: float) -> Connection:
        loop, hello = asyncio.get_running_loop(), Hello(name=f"node-{self.node}", role=ROLE)
        deadline, is_waiting = loop.time() + wait_s, False
        while True:
            try:
                return await connect(
                    f"tcp://{self.head}:{self.port}", token=self.token, hello=hello, decode=Begin | GivenUp | Over
                )
            except ConnectionClosed as error:
                if loop.time() > deadline:
                    raise UserError(f"node 0 did not answer within {wait_s:g} s: {error}") from error
                if not is_waiting:
                    is_waiting = True
                    text = f"node {self.node}: waiting for node 0, up to {wait_s:g} s: {error}"
                    print(text, flush=True)  # noqa: T201  a node's output is its log
            await asyncio.sleep(CHECK_S)

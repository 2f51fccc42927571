"""Messages between the machines of `cosmos-rl node`: node 0's side and that of the others.

other nodes   --Join--> node 0 --Begin--> their workers start ... --Over--> they end with the run's exit code
              --GivenUp--> node 0: a part of a policy is not started again. Without another policy the run is over;
              <--GivenUp-- else the nodes of its other parts end these
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cosmos_rl_core.control.protocol import Message
from cosmos_rl_core.ops.clusters.launcher import INTERRUPTED, Replica
from cosmos_rl_core.wire.channel import Connection


class NodeJoin(Message, frozen=True):
    """A node is there."""

    node: int
    nodes: int
    address: str
    """Its address for the other nodes."""
    process: str
    """Random digits of its process."""


class Begin(Message, frozen=True):
    """Start the workers. Sent again to a node that returns."""

    life: str
    """Changes with each start of node 0: workers of an earlier life end."""
    first: str
    """Address of the first machine of the node's policy replica."""


class GivenUp(Message, frozen=True):
    """A part of a policy replica is not started again.

    Its node sends it to node 0, which passes it to the nodes of the other parts if the run goes on without the replica.
    """

    life: str
    """As in Begin: those of an earlier life are ignored."""
    replica: str
    code: int
    """Exit code of the part."""


class Over(Message, frozen=True):
    """The run has ended, or the node cannot join."""

    code: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaMachine:
    """One machine of a replica."""

    replica: Replica
    index: int
    """Of the machine in the replica."""
    first_node: int
    """The node of the replica's first machine."""


class Meeting:
    """Node 0's side of the connections to the other nodes."""

    def __init__(
        self, parts: Sequence[Sequence[ReplicaMachine]], *, end_replica: Callable[[str], None] = lambda replica: None
    ) -> None:
        """end_replica: called with a policy replica that is given up while the run goes on."""
        self.begun = asyncio.Event()
        """Set when the controller listens."""
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The run's exit code."""
        self.lost: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Exit code of the last policy replica, when all are given up."""
        self.life = secrets.token_hex(8)
        self._parts = parts
        self._end_replica = end_replica
        self._policies = {part.replica.name for node in parts for part in node if part.replica.role == "policy"}
        self._given_up: set[str] = set()
        self._addresses: dict[int, str] = {}
        self._joined = [asyncio.Event() for _ in parts]
        self._open: dict[int, tuple[str, Connection]] = {}
        """Process and connection of each node."""

    def join(self, node: int, address: str) -> None:
        """Note the address of a node. Nodes that had another one of it connect again."""
        if self._addresses.get(node, address) != address:
            for other, (_, connection) in self._open.items():
                if other != node and self._first_node(other) == node:
                    connection.close()
        self._addresses[node] = address
        self._joined[node].set()

    async def on_connect(self, connection: Connection) -> None:
        """Let a node begin, and send it the run's exit code in the end."""
        join = await connection.receive()
        assert isinstance(join, NodeJoin)
        if join.nodes != len(self._parts):
            reason = f"--nodes {join.nodes}: node 0 was started with --nodes {len(self._parts)}"
            connection.post(Over(INTERRUPTED, reason))
            await connection.closed.wait()
            return
        self._replace(join)
        self._open[join.node] = join.process, connection
        self.join(join.node, join.address)
        sending = asyncio.create_task(self._send(connection, join.node))
        try:
            while isinstance(message := await connection.receive(), GivenUp):
                if message.life == self.life:
                    self.give_up(message.replica, message.code)
        finally:
            sending.cancel()

    def give_up(self, replica: str, code: int) -> None:
        """Note that a part of a policy replica is not started again; the run ends without a policy."""
        self._given_up.add(replica)
        if self._given_up == self._policies:
            if not self.lost.done():
                self.lost.set_result(code)
            return
        self._end_replica(replica)
        for node, (_, connection) in self._open.items():
            if any(part.replica.name == replica for part in self._parts[node]):
                _post(connection, GivenUp(self.life, replica, code))

    async def all_gone(self, *, timeout_s: float) -> None:
        """Wait until the nodes have their exit code and have closed their connections."""
        closed = [asyncio.create_task(connection.closed.wait()) for _, connection in self._open.values()]
        if closed:
            _, late = await asyncio.wait(closed, timeout=timeout_s)
            for task in late:
                task.cancel()

    async def _send(self, connection: Connection, node: int) -> None:
        ready = asyncio.create_task(self._ready(node))
        await asyncio.wait([ready, self.over], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            _post(connection, Begin(self.life, ready.result()))
        ready.cancel()
        _post(connection, Over(await asyncio.shield(self.over)))

    def _replace(self, join: NodeJoin) -> None:
        """Close the node's earlier connection. If another process has it, end that one: it would connect again."""
        process, connection = self._open.get(join.node, (join.process, None))
        if connection is None:
            return
        if process != join.process:
            self._given_up -= {part.replica.name for part in self._parts[join.node]}  # it starts them again
            _post(
                connection,
                Over(
                    INTERRUPTED,
                    f"--node {join.node}: another process has joined as this node, at {join.address}; "
                    "each machine needs a number of its own",
                ),
            )
        connection.close()

    def _first_node(self, node: int) -> int:
        return self._parts[node][0].first_node

    async def _ready(self, node: int) -> str:
        """Wait for the controller and the node's first machine; return the address of the latter."""
        await self.begun.wait()
        first = self._first_node(node)
        await self._joined[first].wait()
        return self._addresses[first]


class Reports:
    """Reports to node 0 of the policy replica that another node has a part of."""

    def __init__(self) -> None:
        self.answered = asyncio.Event()
        self.unanswered: GivenUp | None = None
        self._connection: Connection | None = None

    def begin(self, life: str) -> Callable[[str, int], None]:
        """Forget the report of an earlier life of node 0; return the function that reports in this one."""
        self.answered.clear()
        self.unanswered = None

        def report(replica: str, code: int) -> None:
            self.unanswered = GivenUp(life, replica, code)
            if self._connection is not None:
                _post(self._connection, self.unanswered)

        return report

    def send_over(self, connection: Connection) -> None:
        """Send over this connection from now on, also what node 0 may not have received over the last one."""
        self._connection = connection
        if self.unanswered is not None:
            _post(connection, self.unanswered)


def _post(connection: Connection, message: Message) -> None:
    if not connection.closed.is_set():
        connection.post(message)

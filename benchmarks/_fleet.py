"""Fake workers of controller.py: rollout replicas by the hundred in one process, with real connections and messages.

A connection that closes is opened again, and unanswered messages are repeated, by the code of real workers.

    python _fleet.py ADDRESS TOKEN_FILE FIRST COUNT TOTAL

Takes one command a line on stdin, a JSON object with `do` and the arguments of the method of that name, and answers
each with a JSON object on stdout. Times are `time.monotonic()`, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.launch.interrupts import run_to_end
from cosmos_rl_core.rollout.spool.store import Spooled
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed, Hello, connect
from cosmos_rl_core.wire.handshake import read_token
from cosmos_rl_core.wire.listening import raise_descriptor_limit
from cosmos_rl_core.workers.connection import LastingConnection

HEARTBEAT_S = 1.0
NEWEST = 2**31
"""A version of weights beyond the run's: the ledger takes the newest."""
MAX_STALENESS = 63
JOIN_TIMEOUT_S = 120.0
ASK_AGAIN_S = 5.0
MAX_CONNECTING = 32
"""Handshakes of a process at a time: real workers have a process each, and so time for theirs."""
WAIT_S = 120.0
"""Time without a controller after which a worker gives up."""
POLL_S = 0.01
FULL_S = 4.0
"""Time without a new lease after which all that can be granted are."""


async def open_lasting(
    address: str, *, token: bytes, name: str, role: p.Role, connecting: asyncio.Semaphore, decoder: Any = p.ToWorker
) -> LastingConnection:
    """Connect as a worker does. Raises ConnectionClosed. connecting: limits handshakes at a time."""

    async def again(_: str, incarnation: int) -> Connection:
        hello = Hello(name=name, role=role, incarnation=incarnation)
        async with connecting:
            return await connect(address, token=token, hello=hello, decode=decoder, timeout_s=JOIN_TIMEOUT_S)

    lasting = LastingConnection(await again(address, 0), connect=again, leaving=asyncio.Event())
    lasting.last(WAIT_S, leave_s=0.0, run_dir=None)
    return lasting


class FakeReplica:
    """One rollout replica. It holds leases until its fleet delivers them."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet = fleet
        self.name = name
        self.held: dict[int, p.LeasedPrompt] = {}
        self.due: list[float] = []
        """When its requests were due that are not granted yet."""
        self.granted = asyncio.Event()
        self._connection: LastingConnection | None = None
        self._progress = 0

    @property
    def generation(self) -> int:
        """Generation of the controller that it is connected to, or was."""
        return -1 if self._connection is None else self._connection.generation

    async def join(self) -> None:
        """Connect, again if the server refuses, and report ready after the Welcome."""
        fleet = self.fleet
        while True:
            try:
                connection = await open_lasting(
                    fleet.address,
                    token=fleet.token,
                    name=self.name,
                    role="rollout",
                    connecting=fleet.connecting,
                    decoder=fleet.decoder,
                )
                assert isinstance(await connection.receive(), p.Welcome)
                break
            except ConnectionClosed:
                fleet.refused += 1
                await asyncio.sleep(0.1)
        self._connection = connection
        fleet.received += 1
        self.send(p.Ready(address="tcp://127.0.0.1:1"))
        fleet.tasks.append(asyncio.create_task(self._receive(connection)))

    async def _receive(self, connection: LastingConnection) -> None:
        while True:
            self._take(await connection.receive())

    def send(self, message: p.ToController) -> None:
        assert self._connection is not None
        self._connection.post(message)
        self.fleet.sent += 1

    def beat(self) -> None:
        self._progress += 1
        self.send(p.Heartbeat(self._progress, 0.5 * self._progress, 1.0 * self._progress, tuple(self.held), version=0))

    def request(self, capacity: int) -> None:
        self.send(p.RequestLeases(NEWEST, capacity))

    async def ask(self, capacity: int) -> None:
        """Request leases until some are granted: again from time to time, as real replicas do with new weights."""
        self.granted.clear()
        while not self.granted.is_set():
            self.request(capacity)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.granted.wait(), ASK_AGAIN_S)

    def deliver(self, lease: p.LeasedPrompt) -> None:
        """Deliver a reference to the group, if the lease is still held."""
        if self.held.pop(lease.sample, None) is not None:
            version = max(0, lease.deadline - MAX_STALENESS)
            reference = Spooled(f"/spool/{self.name}/{lease.sample}-{lease.attempt}", 65_536, bytes(32))
            self.send(p.Deliver(lease.sample, lease.attempt, version, version, 4096, reference))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _take(self, message: p.ToWorker) -> None:
        self.fleet.received += 1
        if isinstance(message, p.Grant):
            self.held |= {lease.sample: lease for lease in message.prompts}
            self.fleet.note(self, message)
            self.granted.set()


class Fleet:
    """The replicas of this process, and what happened to them."""

    def __init__(self, address: str, token: bytes, *, first: int, count: int, total: int) -> None:
        self.address, self.token, self.total = address, token, total
        self.decoder = msgspec.msgpack.Decoder(p.ToWorker)
        self.sent = self.received = self.refused = 0
        self.connecting = asyncio.Semaphore(MAX_CONNECTING)
        self.tasks: list[asyncio.Task[None]] = []
        self._first = first
        self._replicas = [FakeReplica(self, f"rollout-{index}") for index in range(first, first + count)]
        self._latencies: list[float] = []
        self._generation_s: float | None = None
        self._regranted = 0
        self._regranted_at = 0.0

    def note(self, replica: FakeReplica, grant: p.Grant) -> None:
        """Note a grant; in the steady phase its groups are delivered after `generation_s`."""
        now = time.monotonic()
        again = sum(lease.attempt > 1 for lease in grant.prompts)
        if again:
            self._regranted, self._regranted_at = self._regranted + again, now
        if self._generation_s is not None:
            self._latencies += (now - due_at for due_at in replica.due)
            replica.due.clear()
            for lease in grant.prompts:
                asyncio.get_running_loop().call_later(self._generation_s, replica.deliver, lease)

    # -- commands

    async def join(self, begin: float) -> dict[str, Any]:
        """Join with all replicas at once."""
        await asyncio.sleep(begin - time.monotonic())
        await asyncio.gather(*(replica.join() for replica in self._replicas))
        joined_s = time.monotonic() - begin
        self.tasks.append(asyncio.create_task(self._beat(), name="heartbeats"))
        return {"seconds": joined_s, "refused": self.refused}

    async def steady(self, begin: float, seconds: float, rate: float, generation_s: float) -> dict[str, Any]:
        """Request `rate` leases a second, over all fleets, on a fixed timetable, and deliver each group."""
        self._latencies, self._generation_s = [], generation_s
        lags = []
        period = self.total / rate
        turns = [
            (begin + turn * period + (self._first + index) / rate, replica)
            for turn in range(int(seconds / period) + 1)
            for index, replica in enumerate(self._replicas)
        ]
        due = [(due_at, replica) for due_at, replica in turns if due_at < begin + seconds]
        for due_at, replica in due:
            await asyncio.sleep(due_at - time.monotonic())
            lags.append(time.monotonic() - due_at)
            if not replica.due:  # a later request would replace one that waits
                replica.request(1)
            replica.due.append(due_at)
        while len(self._latencies) < len(due):
            await asyncio.sleep(0.1)
        await asyncio.sleep(2 * generation_s)
        self._generation_s = None
        return {"latencies": self._latencies, "lags": lags}

    async def lease(self, each: int) -> dict[str, Any]:
        """Hold `each` leases in every replica."""

        async def fill(replica: FakeReplica) -> None:
            while len(replica.held) < each:
                await replica.ask(each - len(replica.held))

        await asyncio.gather(*(fill(replica) for replica in self._replicas))
        return {"held": sum(len(replica.held) for replica in self._replicas)}

    async def deliver(self, begin: float) -> dict[str, Any]:
        """Deliver all leases at once. A lease requested after them is granted when they are durable."""

        async def empty(replica: FakeReplica) -> None:
            for lease in list(replica.held.values()):
                replica.deliver(lease)
            await replica.ask(1)

        delivered = sum(len(replica.held) for replica in self._replicas)
        await asyncio.sleep(begin - time.monotonic())
        await asyncio.gather(*(empty(replica) for replica in self._replicas))
        return {"delivered": delivered, "seconds": time.monotonic() - begin}

    async def fill(self, each: int) -> dict[str, Any]:
        """Hold all leases that the controller grants, and keep a request open in every replica.

        That is all when repeated requests have brought none for FULL_S.
        """
        held, changed_at = -1, time.monotonic()
        while time.monotonic() - changed_at < FULL_S:
            before, held = held, sum(len(replica.held) for replica in self._replicas)
            if held != before:
                changed_at = time.monotonic()
            for replica in self._replicas:
                replica.request(each)
            await asyncio.sleep(1.0)
        return {"held": held}

    async def deliver_some(self, each: int) -> dict[str, Any]:
        """Deliver `each` leases of every replica, and wait until that is durable; the others stay in work."""

        async def some(replica: FakeReplica) -> None:
            for lease in list(replica.held.values())[:each]:
                replica.deliver(lease)
            await replica.ask(1)

        await asyncio.gather(*(some(replica) for replica in self._replicas))
        return {"held": sum(len(replica.held) for replica in self._replicas)}

    async def rejoined(self, generation: int) -> dict[str, Any]:
        """Wait until all replicas have the Welcome of a controller of `generation`; return when the first and last had.

        Read every 10 ms.
        """
        first, waiting = None, self._replicas
        while waiting := [replica for replica in waiting if replica.generation < generation]:
            if len(waiting) < len(self._replicas):
                first = first or time.monotonic()
            await asyncio.sleep(POLL_S)
        return {"first": first or time.monotonic(), "last": time.monotonic()}

    async def regranted(self) -> dict[str, Any]:
        """Return the number of leases that others had before, and when the last one came."""
        return {"count": self._regranted, "at": self._regranted_at}

    async def counts(self) -> dict[str, Any]:
        return {"sent": self.sent, "received": self.received}

    async def leave(self) -> dict[str, Any]:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for replica in self._replicas:
            replica.close()
        return {}

    async def _beat(self) -> None:
        """Send one heartbeat a second from each replica, spread over the second."""
        step = HEARTBEAT_S / len(self._replicas)
        begin = time.monotonic()
        turn = 0
        while True:
            for replica in self._replicas:
                await asyncio.sleep(begin + turn * step - time.monotonic())
                replica.beat()
                turn += 1


def _read_commands(loop: asyncio.AbstractEventLoop, commands: asyncio.Queue[str]) -> None:
    """Pass on the commands; the process ends when its parent closes the pipe or dies, in the midst of a command too."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(commands.put_nowait, line)
    os._exit(0)


async def main(arguments: list[str]) -> None:
    address, token_file, first, count, total = arguments
    raise_descriptor_limit()
    token = read_token(Path(token_file))
    fleet = Fleet(address, token, first=int(first), count=int(count), total=int(total))
    commands: asyncio.Queue[str] = asyncio.Queue()
    threading.Thread(target=_read_commands, args=(asyncio.get_running_loop(), commands), daemon=True).start()
    while True:
        command = json.loads(await commands.get())
        answer = await getattr(fleet, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    run_to_end(main(sys.argv[1:]))  # the loop that costs least: clients and server share the processors

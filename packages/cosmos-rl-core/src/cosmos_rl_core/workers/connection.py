"""A worker's connection to the controller, which is opened again when it closes.

    closed -> pause, with jitter -> connect to the address of controller.json, or to the one given
           -> Rejoin(incarnation, what it holds) -> Welcome -> unanswered messages, groups

Meanwhile the worker goes on; what it sends is kept. It gives up after a while, when it leaves, and when the run or the
process that would start another controller has ended.

`Unanswered` has the messages that the controller may have missed:

    message                          until
    Ready                            the end
    Deliver, Failed                  Release
    RequestLeases                    Grant
    StepDone and other reports       the commit of a step that was voted for after them
    RequestBatch                     Batch, or another mesh
    Vote                             Committed, or another mesh
    PayloadsLost, PeersLost          another mesh
    Leaving                          Leave
    Goodbye                          the end
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.address_file import NAME, read_controller_file
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.processes import is_alive
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
ANSWER_S = 10.0
"""Maximum wait for a connection and for the Welcome."""

Connect = Callable[[str, int], Awaitable[Connection]]
"""Opens a connection to an address, or the given one if it is empty, as the worker's process of this incarnation."""

Report = p.StepDone | p.Validated | p.CheckpointDone
Key = tuple[int, int, bool]
"""Sample, attempt, and whether it belongs to an evaluation."""


class RemovedFromRun(ConnectionClosed):
    """The run has ended, or others have taken the worker's place."""


class LastingConnection:
    """Has the methods of a `Connection` that a worker uses. One task receives."""

    def __init__(
        self, connection: Connection, *, connect: Connect | None, leaving: asyncio.Event, launcher: int = 0
    ) -> None:
        """connect: opens another one; None: there is only this. leaving: set when the worker shall leave; then it
        opens others for `leave_s`.

        launcher: process without which no other controller comes; 0: there is none.
        """
        self.closed = asyncio.Event()
        """Set once the connection has ended for good."""
        self.unanswered = Unanswered()
        self._loop = asyncio.get_running_loop()
        self._wait_s = self._leave_s = 0.0
        self._leave_by: float | None = None
        """Time of the event loop until which it tries to connect, once it is known that the worker shall leave."""
        self._run_dir: Path | None = None
        self._current = connection
        self._connect = connect
        self._leaving = leaving
        self._launcher = launcher
        self._is_stopped = False
        """Whether the controller has sent a Stop."""
        self._over = False
        """Whether the run is over, or others have taken the worker's place."""
        self._reason = ""
        """Why no other connection was opened."""
        self._welcome: p.Welcome | None = None
        self._lineage = 0

    @property
    def generation(self) -> int:
        """Generation of the controller that sent the last Welcome; -1 before the first."""
        return -1 if self._welcome is None else self._welcome.generation

    def last(self, wait_s: float, *, leave_s: float, run_dir: Path | None) -> None:
        """From now on, open another connection for at most `wait_s` after one has closed.

        leave_s: the same once the worker shall leave: it has groups to deliver, and a Goodbye.
        run_dir: the run's directory, where this machine shares it; without a controller.json there the run has ended.
        """
        self._wait_s, self._leave_s, self._run_dir = wait_s, leave_s, run_dir

    def post(self, message: p.ToController) -> None:
        """Send, or keep the message for the next connection.

        After the end this does nothing: it is raised where a reply is awaited, in all ranks at the same place.
        """
        if not self.closed.is_set():
            self.unanswered.sent(message)
            with contextlib.suppress(ConnectionClosed):
                self._current.post(message)

    def post_from_thread(self, message: p.ToController) -> None:
        """Like `post`, from another thread than the event loop's."""
        self._loop.call_soon_threadsafe(self.post, message)

    async def send(self, message: p.ToController) -> None:
        """Like `post`, and wait while the send buffer is full."""
        if not self.closed.is_set():
            self.unanswered.sent(message)
            with contextlib.suppress(ConnectionClosed):
                await self._current.send(message)

    async def receive(self) -> Any:
        """Return the next message. Raises ConnectionClosed after the end."""
        while True:
            try:
                message = await self._current.receive()
            except ConnectionClosed as error:
                message = await self._open_again(error)
            if isinstance(message, p.Welcome):
                self._welcome, self._lineage = message, message.lineage
            elif isinstance(message, p.LineageRolledBack | p.SyncFrom):
                self._lineage = message.lineage
            elif isinstance(message, p.Stop):
                self._over = self._is_stopped = True
            if message is not None and self.unanswered.received(message):
                return message

    async def leave(self) -> None:
        """Send Goodbye and, before a Stop, wait until the controller has journaled it. Raises ConnectionClosed."""
        if self.closed.is_set():
            raise ConnectionClosed(self._reason or self._current.reason)
        self.post(p.Goodbye())
        if self._is_stopped and self._current.closed.is_set():
            return self.close()  # nobody waits for it
        if self._over and self._current.closed.is_set():
            raise ConnectionClosed(self._current.reason)
        while not self._over:
            await self.receive()
        self.close()

    def close(self) -> None:
        """Send the buffered bytes, then end the connection."""
        self.closed.set()
        self._current.close()

    async def _open_again(self, error: ConnectionClosed) -> p.ToWorker | None:
        """Open another connection; return a message that was missed. Raises `error` when it gives up."""
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        deadline = loop.time() + self._wait_s
        while self._may_return() and loop.time() < min(deadline, self._leaves_by(loop.time())):
            await asyncio.sleep(random.uniform(0.0, pause_s))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            try:
                return await self._rejoin()
            except RemovedFromRun as removed:
                self._over, error = True, removed
            except (ConnectionClosed, TimeoutError, UserError):  # UserError: another run has the address now
                continue
        self._reason = str(error)
        self.closed.set()
        raise error

    def _leaves_by(self, now: float) -> float:
        """Return the time after which no other connection is opened; infinite unless the worker shall leave."""
        if self._leave_by is None and self._leaving.is_set():
            self._leave_by = now + self._leave_s
        return math.inf if self._leave_by is None else self._leave_by

    def _may_return(self) -> bool:
        can = self._connect is not None and self._welcome is not None
        is_orphaned = self._launcher > 0 and not is_alive(self._launcher)
        return can and not (self._over or self.closed.is_set() or is_orphaned)

    async def _rejoin(self) -> p.ToWorker | None:
        """Connect once. Raises ConnectionClosed and TimeoutError, after which another attempt may succeed."""
        assert self._connect is not None and self._welcome is not None
        previous = self._welcome
        connection = await self._connect(self._address(previous), previous.incarnation)
        try:
            await connection.send(self.unanswered.rejoin())
            welcome = await asyncio.wait_for(connection.receive(), ANSWER_S)
        except BaseException:
            connection.close()
            raise
        if isinstance(welcome, p.Stop):
            self._current = connection
            return welcome
        if isinstance(welcome, p.Refused):
            connection.close()
            raise RemovedFromRun(welcome.reason)
        if not isinstance(welcome, p.Welcome) or welcome.generation < previous.generation:
            connection.close()
            raise ConnectionClosed("the controller is of an earlier generation than the last one")
        await self._send_again(connection, welcome)
        if welcome.lineage == self._lineage:
            return None
        self._lineage = welcome.lineage
        return p.LineageRolledBack(welcome.lineage, welcome.version)

    async def _send_again(self, connection: Connection, welcome: p.Welcome) -> None:
        self._current, self._welcome = connection, welcome
        groups = list(self.unanswered.groups.values())
        for message in self.unanswered.messages():
            connection.post(message)
        for group in groups:
            await connection.send(group)
        if self.unanswered.goodbye is not None:
            connection.post(self.unanswered.goodbye)

    def _address(self, welcome: p.Welcome) -> str:
        """Return the address of a later controller; empty if there is none. Raises Removed if the run has ended."""
        if self._run_dir is None:
            return ""
        if not (self._run_dir / NAME).exists():
            raise RemovedFromRun("the run has ended")
        with contextlib.suppress(UserError):  # removed in between
            controller = read_controller_file(self._run_dir)
            if controller.generation > welcome.generation:
                return controller.address
        return ""


class Unanswered:
    """Records what is sent and received on all connections of a worker.

    unanswered.sent(message)                      before each message
    if unanswered.received(message): ...          False: a reply that came before
    unanswered.messages()                         on a new connection
    """

    def __init__(self) -> None:
        self.vote: p.Vote | None = None
        self.epoch = 0
        """Policy: the newest epoch of the mesh."""
        self.groups: dict[Key, p.Deliver | p.Failed] = {}
        self._leased: set[tuple[int, bool]] = set()
        """Granted samples without a result: (sample, whether of an evaluation)."""
        self._ready: p.Ready | None = None
        self._leases: p.RequestLeases | None = None
        self._batch: p.RequestBatch | None = None
        self._lost: p.PayloadsUnreadable | p.PeersLost | None = None
        self._leaving: p.Leaving | None = None
        self._reports: list[Report] = []
        self._before_vote = 0
        """Number of reports that were sent before the vote."""
        self.goodbye: p.Goodbye | None = None
        """The last message of a worker."""

    def rejoin(self) -> p.Rejoin:
        """Return the first message on a new connection."""
        samples = self._leased | {(sample, evaluation) for sample, _, evaluation in self.groups}
        return p.Rejoin(
            holding=tuple(sorted(sample for sample, evaluation in samples if not evaluation)),
            rows=tuple(sorted(sample for sample, evaluation in samples if evaluation)),
        )

    def messages(self) -> list[p.ToController]:
        """Return what to send again, without the groups, and the Goodbye after them."""
        each = (self._ready, *self._reports, self._leases, self._lost, self.vote, self._batch, self._leaving)
        return [message for message in each if message is not None]

    def sent(self, message: p.ToController) -> None:
        match message:
            case p.Deliver() | p.Failed():
                self._leased.discard((message.sample, message.evaluation))
                self.groups[message.sample, message.attempt, message.evaluation] = message
            case p.RequestLeases():
                self._leases = message
            case p.Return():
                self._leased -= {(sample, False) for sample in message.samples}
                self._leases = None
            case p.StepDone() | p.Validated() | p.CheckpointDone():
                self._reports.append(message)
            case p.RequestBatch():
                self._batch = message
            case p.Vote():
                self.vote, self._before_vote = message, len(self._reports)
            case p.PayloadsUnreadable() | p.PeersLost():
                self._lost = message
            case p.Ready():
                self._ready = message
            case p.Leaving():
                self._leaving = message
            case p.Goodbye():
                self.goodbye = message
            case _:
                pass

    def received(self, message: p.ToWorker) -> bool:
        """Record a message; return False if it repeats an earlier one."""
        match message:
            case p.Grant():
                self._leases = None
                self._leased |= {(prompt.sample, prompt.evaluation) for prompt in message.prompts}
            case p.Cancel():
                self._leased.discard((message.sample, False))
            case p.LineageRolledBack():
                self._leased.clear()
            case p.Release():
                self._release(message)
            case p.Batch():
                if self._batch is None or (message.samples and message.step != self._batch.step):
                    return False
                self._batch = None
            case p.Committed():
                if self.vote is None or message.step != self.vote.step:
                    return False
                self.vote = None
                del self._reports[: self._before_vote]
            case p.Leave():
                self._leaving = None
            case p.Remesh():
                return self._meshed(message)
            case _:
                pass
        return True

    def _release(self, message: p.Release) -> None:
        for sample, attempt in message.groups:
            self.groups.pop((sample, attempt, False), None)
        for row, attempt in message.rows:
            self.groups.pop((row, attempt, True), None)

    def _meshed(self, message: p.Remesh) -> bool:
        if message.epoch <= self.epoch:
            return False
        self.epoch = message.epoch
        self._batch = self._lost = None
        if self.vote is not None and not self.is_committed(message):
            self.vote = None
        return True

    def is_committed(self, mesh: p.Remesh) -> bool:
        """Return whether the step that was voted for was committed before this mesh began: Committed follows."""
        return self.vote is not None and mesh.version > self.vote.step

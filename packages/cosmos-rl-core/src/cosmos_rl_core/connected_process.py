"""A child process with a connection to it: workers of rewards, instances of engines, simulators.

    worker = ConnectedProcess(command, name="the worker", environment=variables)      # UserError
    await worker.open(decode=FromWorker)                             # or worker.open_blocking(...), in a thread
    ready = await worker.ask(Build(...), limit=TimeLimit("start_timeout_s", 60))      # ProcessDied
    status = await worker.close(grace_s=2.0)                                          # or worker.close_blocking(...)

The socket's other end is the child's `processes.inherited_socket`. Messages, and what follows a death, are the owner's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.processes import GRACE_S, ChildProcess, all_ended, last_lines
from cosmos_rl_core.wire.blocking import BlockingConnection
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed, adopt
from cosmos_rl_core.wire.frames import MAX_FRAME_BYTES

LAST_LINES = 40
"""Lines of a dead process's log that are kept: a Python traceback has about thirty."""
MAX_DESCRIPTORS = 64
"""Maximum descriptors in one message; systems allow about 250."""


class TimeLimit(NamedTuple):
    """A setting that limits the time of a process for one thing."""

    name: str
    """Such as "step_timeout_s"."""
    seconds: float


class ProcessDied(Exception):
    """A connected process has ended, or was killed. The text says how."""

    def __init__(self, reason: str, *, is_late: bool = False) -> None:
        super().__init__(reason)
        self.is_late = is_late
        """Whether it was killed because it took too long."""


class ChildFailed(msgspec.Struct, frozen=True, tag=True):
    """The last message of a child that ends because of an error."""

    reason: str
    user: bool
    """Whether the user can correct it."""

    @property
    def error(self) -> UserError | ProcessDied:
        """The error to raise in the parent."""
        return UserError(self.reason) if self.user else ProcessDied(self.reason)


class ConnectedProcess:
    """A started process, its connection and its log."""

    connection: Connection
    """Made by `open`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        environment: Mapping[str, str],
        log: Path | IO[bytes] | None = None,
        keeps: Sequence[int] = (),
    ) -> None:
        """Start the process. Raises UserError if the command cannot be run.

        name: for messages, such as "the worker". log: for its output, default: this process's stderr; an open file is
        closed with the process. keeps: inherited descriptors.
        """
        self.name = name
        self.last_output = ""
        """The last lines of its log, once it has ended."""
        self._log = log.open("w+b") if isinstance(log, Path) else log
        try:
            output = 2 if self._log is None else self._log
            self.process, self.socket = ChildProcess.connected(
                command, environment=environment, output=output, keeps=keeps
            )
        except OSError as error:
            self._close_log()
            raise UserError(f"{name}: cannot run {command[0]}: {error.strerror}") from error
        self._end_of_socket: Connection | BlockingConnection | socket.socket = self.socket

    async def open(self, *, decode: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> Connection:
        """Return the connection for the running event loop. decode: the union of the child's messages."""
        connection = await adopt(self.socket, decode=decode, name=self.name, max_frame_bytes=max_frame_bytes)
        self.connection = self._end_of_socket = connection
        return connection

    def open_blocking(self, *, decode: Any) -> BlockingConnection:
        """Return the connection for a thread. decode: the union of the child's messages."""
        self._end_of_socket = connection = BlockingConnection(self.socket, decode=decode)
        return connection

    async def ask(self, message: Any, *, limit: TimeLimit, descriptors: Sequence[int] = ()) -> Any:
        """Send a message and return the answer. Raises the error of ChildFailed, and ProcessDied.

        A process that exceeds the limit is killed.

        descriptors: sent before the message, for the child's `receive_descriptors`. No other answer is outstanding.
        """
        try:
            async with asyncio.timeout(limit.seconds):
                if descriptors:  # nothing else is in flight, so the buffer has room
                    socket.send_fds(self.socket, [b"\0"], descriptors)
                await self.connection.send(message)
                answer = await self.connection.receive()
        except TimeoutError as error:
            await self.close()
            raise self.late(limit) from error
        except (ConnectionClosed, OSError) as error:
            raise self.died(await self.close(grace_s=GRACE_S)) from error
        except asyncio.CancelledError:
            await self.close()  # its answer would be read as that of the next question
            raise
        if isinstance(answer, ChildFailed):
            await self.close(grace_s=GRACE_S)
            raise answer.error
        return answer

    def died(self, status: str) -> ProcessDied:
        """Return the error of a process that has ended by itself. status: as of `close`."""
        return ProcessDied(f"{self.name} died ({status})")

    def late(self, limit: TimeLimit) -> ProcessDied:
        """Return the error of a process that has exceeded a limit."""
        reason = f"{self.name} took longer than {limit.name} = {limit.seconds:g} and was killed"
        return ProcessDied(reason, is_late=True)

    async def close(self, *, grace_s: float = 0.0) -> str:
        """End the connection, kill the process and its children if it runs after `grace_s`, and return how it ended.

        Such as "exit code 1" or "signal SIGKILL".
        """
        self._end_of_socket.close()
        try:
            if grace_s:
                await all_ended([self.process], timeout_s=grace_s)
        finally:  # also when the wait is cancelled
            self.process.kill()
            status = await self.process.ended()
        self._close_log()
        return status

    def close_blocking(self, *, grace_s: float = 0.0) -> str:
        """Like `close`, for a thread."""
        self._end_of_socket.close()
        self.process.wait(grace_s)
        self.process.kill()
        status = self.process.wait()
        self._close_log()
        return status

    def _close_log(self) -> None:
        if self._log is not None and not self._log.closed:
            self.last_output = last_lines(self._log, count=LAST_LINES)
            self._log.close()


def receive_descriptors(connection: socket.socket) -> list[int]:
    """Receive the descriptors that come before a message of `ConnectedProcess.ask`, in the child.

    The caller must close them. Empty at the end of the connection.
    """
    return socket.recv_fds(connection, 1, MAX_DESCRIPTORS)[1]

"""The connection between the launcher of `cosmos-rl run` and its controller, which may be replaced.

controller  --Attach-->               launcher
            <--Present, Ended...--
            --Start, Kill, Forget-->

One socket that keeps message boundaries; every controller inherits the same end. A killed controller leaves no part of
a message, and messages that it has not read are skipped by the next one, which begins with Attach.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.launch.supervised.keeper import Ended, Keeper, Present, WorkerSpec

CRASHED = 70
"""Exit code of a controller that ended with an unexpected exception: EX_SOFTWARE of sysexits.h."""
LARGEST_BYTES = 2**20
"""Of a message; the socket's send buffer is smaller."""


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of a controller."""

    controller: str
    """Its address for workers."""
    secrets: Mapping[str, str]
    pid: int


class Start(msgspec.Struct, frozen=True, tag=True):
    workers: tuple[WorkerSpec, ...]


class Kill(msgspec.Struct, frozen=True, tag=True):
    names: tuple[str, ...]


class Forget(msgspec.Struct, frozen=True, tag=True):
    name: str


_encode = msgspec.msgpack.Encoder(enc_hook=str).encode  # str: of a Path
_to_launcher = msgspec.msgpack.Decoder(Attach | Start | Kill | Forget, dec_hook=lambda kind, value: kind(value))
_to_controller = msgspec.msgpack.Decoder(Present | Ended, dec_hook=lambda kind, value: kind(value))


def link() -> tuple[socket.socket, socket.socket]:
    """Return the ends of the launcher and of its controllers."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


class Outbox:
    """Sends messages over one end of the link in order, without blocking: both ends may send more than it holds."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._waiting: deque[bytes] = deque()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message at once, or from the running event loop as soon as the socket has room. Raises OSError."""
        self._waiting.append(_encode(message))
        if len(self._waiting) == 1 and not self._flush():
            asyncio.get_running_loop().add_writer(self._end, self._continue)

    def _continue(self) -> None:
        if self._flush():
            asyncio.get_running_loop().remove_writer(self._end)

    def _flush(self) -> bool:
        """Send until the socket is full; return whether no message waits. Messages to a closed end are dropped."""
        while self._waiting:
            message = self._waiting.popleft()
            try:
                self._end.send(message)
            except BlockingIOError:
                self._waiting.appendleft(message)
                return False
            except (BrokenPipeError, ConnectionResetError):
                self._waiting.clear()
        return True


@dataclass(slots=True, kw_only=True)
class Supervised:
    """A controller's side. Implements `keeper.Keeper`."""

    socket: socket.socket
    supervisor: int
    """The process that starts the next controller."""
    interrupted: bool
    """Whether the user has interrupted an earlier controller."""
    can_restart: bool
    """Whether another controller would follow this one."""
    _outbox: Outbox = field(init=False)
    _reading: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._outbox = Outbox(self.socket)

    async def attach(self, controller: str, *, secrets: Mapping[str, str], on_end: Callable[[Ended], None]) -> Present:
        self._outbox.send(Attach(controller=controller, secrets=dict(secrets), pid=os.getpid()))
        while True:  # messages to the controller before
            message = await self._receive()
            if isinstance(message, Present) and message.to == os.getpid():
                break
        self._reading = asyncio.create_task(self._read(on_end))
        return message

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        self._outbox.send(Start(tuple(workers)))

    def kill(self, names: Sequence[str]) -> None:
        self._outbox.send(Kill(tuple(names)))

    def forget(self, name: str) -> None:
        self._outbox.send(Forget(name))

    def interrupt_next(self) -> None:
        """Interrupt a later controller of this run as well."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.supervisor, signal.SIGTERM)  # it blocks the signal, which stays pending

    def crash_at(self, error: Exception) -> None:
        """End this process at once after an unexpected error, so that the next controller continues with the workers.

        Return for errors that a restart would repeat, and if no other controller would follow.
        """
        if self.can_restart and not isinstance(error, UserError | WorkerFailed | OSError):
            traceback.print_exception(error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(CRASHED)

    async def _read(self, on_end: Callable[[Ended], None]) -> None:
        while True:
            message = await self._receive()
            if isinstance(message, Ended):
                on_end(message)

    async def _receive(self) -> Present | Ended:
        data = await asyncio.get_running_loop().sock_recv(self.socket, LARGEST_BYTES)
        return _to_controller.decode(data)


async def serve_controllers(ours: socket.socket, keeper: Keeper) -> None:
    """Work for the controllers at the other end, one after the other, until the last one has ended."""
    loop, outbox = asyncio.get_running_loop(), Outbox(ours)
    while True:
        try:
            data = await loop.sock_recv(ours, LARGEST_BYTES)
        except ConnectionResetError:  # it has ended without having read all messages
            return
        if not data:
            return
        match _to_launcher.decode(data):
            case Attach() as message:
                present = await keeper.attach(message.controller, secrets=message.secrets, on_end=outbox.send)
                outbox.send(msgspec.structs.replace(present, to=message.pid))
            case Start() as message:
                keeper.start(message.workers)
            case Kill() as message:
                keeper.kill(message.names)
            case Forget() as message:
                keeper.forget(message.name)

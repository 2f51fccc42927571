"""The connection between the launcher of `cosmos-rl run` and its controller, which may be replaced.

controller  --Attach-->               launcher
            <--Present, Ended...--
            --Start, Kill, Forget-->

One socket that keeps packet boundaries; every controller inherits the same end. A message is one packet or several, and
the first byte of each says whether a message begins and ends with it:

    BEGINS | ENDS         a whole message
    BEGINS, 0, 0, ENDS    the parts of a large one; without its beginning or its end it is dropped

So a part that a killed controller has sent or read is no message, and the next controller, which begins with Attach,
skips the messages that were not read.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.launch.supervised.keeper import Keeper, Present, WorkerEnded, WorkerSpec

CRASHED = 70
"""Exit code of a controller that ended with an unexpected exception: EX_SOFTWARE of sysexits.h."""
PACKET_BYTES = 2**15
"""Most of a message in one packet. The kernel refuses packets above the socket's send buffer, about 200 kB."""
BEGINS, ENDS = 1, 2


class AttachController(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of a controller."""

    controller: str
    """Its address for workers."""
    secrets: Mapping[str, str]
    pid: int


class StartWorkers(msgspec.Struct, frozen=True, tag=True):
    workers: tuple[WorkerSpec, ...]


class Kill(msgspec.Struct, frozen=True, tag=True):
    names: tuple[str, ...]


class Forget(msgspec.Struct, frozen=True, tag=True):
    name: str


_encode = msgspec.msgpack.Encoder(enc_hook=str).encode  # str: of a Path
_to_launcher = msgspec.msgpack.Decoder(
    AttachController | StartWorkers | Kill | Forget, dec_hook=lambda kind, value: kind(value)
)
_to_controller = msgspec.msgpack.Decoder(Present | WorkerEnded, dec_hook=lambda kind, value: kind(value))


def link() -> tuple[socket.socket, socket.socket]:
    """Return the ends of the launcher and of its controllers."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


class Inbox:
    """Receives the messages at one end of the link."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._begun: bytearray | None = None
        """The message in work; None between messages, and in one whose beginning was read by somebody else."""

    async def receive(self) -> bytes:
        """Return the next message; b"" after the other end was closed. Raises OSError."""
        loop = asyncio.get_running_loop()
        while packet := await loop.sock_recv(self._end, 1 + PACKET_BYTES):
            if packet[0] & BEGINS:
                self._begun = bytearray()
            if self._begun is None:
                continue
            self._begun += memoryview(packet)[1:]
            if packet[0] & ENDS:
                message, self._begun = bytes(self._begun), None
                return message
        return b""


class Outbox:
    """Sends messages over one end of the link in order, without blocking: both ends may send more than it holds."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._waiting: deque[bytes] = deque()
        """Packets."""

    def send(self, message: msgspec.Struct) -> None:
        """Send a message at once, or from the running event loop as soon as the socket has room. Raises OSError."""
        is_waiting = bool(self._waiting)
        self._waiting += _packets(_encode(message))
        if not is_waiting and not self._flush():
            asyncio.get_running_loop().add_writer(self._end, self._continue)

    def _continue(self) -> None:
        if self._flush():
            asyncio.get_running_loop().remove_writer(self._end)

    def _flush(self) -> bool:
        """Send until the socket is full; return whether no packet waits. Messages to a closed end are dropped."""
        while self._waiting:
            try:
                self._end.send(self._waiting[0])
                self._waiting.popleft()
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                self._waiting.clear()
        return True


def _packets(message: bytes) -> Iterator[bytes]:
    view = memoryview(message)
    for start in range(0, len(message), PACKET_BYTES):
        end = start + PACKET_BYTES
        flags = (BEGINS if start == 0 else 0) | (ENDS if end >= len(message) else 0)
        yield bytes((flags,)) + view[start:end]


@dataclass(slots=True, kw_only=True)
class SupervisedKeeper:
    """A controller's side. Implements `keeper.Keeper`."""

    socket: socket.socket
    supervisor: int
    """The process that starts the next controller."""
    interrupted: bool
    """Whether the user has interrupted an earlier controller."""
    can_restart: bool
    """Whether another controller would follow this one."""
    _outbox: Outbox = field(init=False)
    _inbox: Inbox = field(init=False)
    _reading: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._outbox, self._inbox = Outbox(self.socket), Inbox(self.socket)

    async def attach(
        self, controller: str, *, secrets: Mapping[str, str], on_end: Callable[[WorkerEnded], None]
    ) -> Present:
        self._outbox.send(AttachController(controller=controller, secrets=dict(secrets), pid=os.getpid()))
        while True:  # messages to the controller before
            message = await self._receive()
            if isinstance(message, Present) and message.to == os.getpid():
                break
        self._reading = asyncio.create_task(self._read(on_end))
        return message

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        self._outbox.send(StartWorkers(tuple(workers)))

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

    async def _read(self, on_end: Callable[[WorkerEnded], None]) -> None:
        while True:
            message = await self._receive()
            if isinstance(message, WorkerEnded):
                on_end(message)

    async def _receive(self) -> Present | WorkerEnded:
        return _to_controller.decode(await self._inbox.receive())


async def serve_controllers(ours: socket.socket, keeper: Keeper) -> None:
    """Work for the controllers at the other end, one after the other, until the last one has ended."""
    inbox, outbox = Inbox(ours), Outbox(ours)
    while True:
        try:
            data = await inbox.receive()
        except ConnectionResetError:  # it has ended without having read all messages
            return
        if not data:
            return
        match _to_launcher.decode(data):
            case AttachController() as message:
                present = await keeper.attach(message.controller, secrets=message.secrets, on_end=outbox.send)
                outbox.send(msgspec.structs.replace(present, to=message.pid))
            case StartWorkers() as message:
                keeper.start(message.workers)
            case Kill() as message:
                keeper.kill(message.names)
            case Forget() as message:
                keeper.forget(message.name)

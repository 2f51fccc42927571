"""Between the server and a worker: u32 length | msgpack, over a Unix socket that also carries descriptors.

    worker -> server    Ready, or Refused and the end
    server -> worker    Ask, with one descriptor an item
    worker -> server    Answer, with one result an item

One Ask is outstanding at a time.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from typing import TypeVar

import msgspec

MAX_ITEMS = 64
"""Requests in one Ask: descriptors go in one message, and systems allow some 250."""
_LENGTH = struct.Struct("!I")
_MAX_FRAME_BYTES = 256 * 2**20

Message = TypeVar("Message")


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The reward is built."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The reward cannot be built, and trying again cannot help."""

    reason: str


class Item(msgspec.Struct, frozen=True):
    """One request."""

    num_bytes: int
    """Size of its body."""
    reward: int
    """Which of the header's rewards is asked for; its options are there."""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Score these."""

    items: list[Item]


class Result(msgspec.Struct, frozen=True):
    """One request's scores, or why there are none."""

    scores: dict[str, list[float]] = {}
    """By name: the reward's own, or "reward.part" where it has parts. One value a sample."""
    error: str = ""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Results in the order of the items."""

    results: list[Result]
    seconds: float
    """Time the reward took."""


class ChannelClosed(ConnectionError):
    """The other side has gone."""


_encode = msgspec.msgpack.Encoder().encode
_decode_from_worker = msgspec.msgpack.Decoder(Ready | Refused | Answer).decode
_decode_ask = msgspec.msgpack.Decoder(Ask).decode


def _frame(message: msgspec.Struct) -> bytes:
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


class ServerEnd:
    """The server's end, on its event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock

    async def ask(self, ask: Ask, descriptors: Sequence[int]) -> None:
        """Send. Raises ChannelClosed."""
        frame = _frame(ask)
        try:
            sent = socket.send_fds(self._socket, [frame], descriptors)  # nothing else is on its way, so it has room
            if sent < len(frame):
                await asyncio.get_running_loop().sock_sendall(self._socket, frame[sent:])
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    async def receive(self) -> Ready | Refused | Answer:
        """Return what the worker says next. Raises ChannelClosed."""
        (length,) = _LENGTH.unpack(await self._exactly(_LENGTH.size))
        if length > _MAX_FRAME_BYTES:
            raise ChannelClosed(f"the worker announced a frame of {length} bytes")
        try:
            return _decode_from_worker(await self._exactly(length))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ChannelClosed(f"the worker sent nonsense: {error}") from error

    async def _exactly(self, num_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        received = bytearray()
        while len(received) < num_bytes:
            try:
                part = await loop.sock_recv(self._socket, num_bytes - len(received))
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not part:
                raise ChannelClosed("the worker closed its end")
            received += part
        return bytes(received)

    def close(self) -> None:
        self._socket.close()


class WorkerEnd:
    """The worker's end; it waits."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock

    def send(self, message: Ready | Refused | Answer) -> None:
        self._socket.sendall(_frame(message))

    def receive(self) -> tuple[Ask, list[int]] | None:
        """Return the next Ask and its descriptors, which are the caller's to close; None when the server has gone."""
        head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, MAX_ITEMS)
        if not head:
            return None
        head += self._exactly(_LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        return _decode_ask(self._exactly(length)), descriptors

    def _exactly(self, num_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            part = self._socket.recv(num_bytes - len(received))
            if not part:
                raise ChannelClosed("the server closed its end in the middle of a frame")
            received += part
        return bytes(received)

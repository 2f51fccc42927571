"""Blocking connections: for threads, and between a process and its child.

The frames are those of `connection`. Processes that share a socket pair need no authentication: 16 zeros are in
place of the tag. Any thread may send; one may receive meanwhile.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import msgspec

from cosmos_rl_core.wire.encrypted import EncryptedSocket
from cosmos_rl_core.wire.frames import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    UNDECODABLE,
    ConnectionClosed,
    FrameOpener,
    FrameSealer,
)
from cosmos_rl_core.wire.handshake import (
    HANDSHAKE_BYTES,
    PREAMBLE_BYTES,
    Hello,
    Violation,
    make_preamble,
    session_keys,
)
from cosmos_rl_core.wire.tls import CONTROLLER, Tls, TlsSession

_SHORTEST_S = 1e-3
"""Minimum timeout of a receive before a deadline; 0 would make the socket non-blocking."""
_PIECE_BYTES = 2**20
_hello_decoder = msgspec.msgpack.Decoder(Hello)


class BlockingConnection:
    """Messages over a connected socket.

    `send` and `receive` raise `ConnectionClosed` at the end of the connection, and after the socket's own timeout;
    `receive` raises `Violation` for anything but an intact frame with a message of `decode`, a union of structs.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        decode: Any,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        read_ahead_bytes: int = 0,
    ) -> None:
        """Use a connected socket.

        read_ahead_bytes: limit of one read where a message is expected, so that a header, its body and what follows
        them cost one system call. 0 where a thread waits for the socket with `select`, which misses bytes read ahead.
        """
        self._socket: socket.socket | EncryptedSocket = connection
        self._decoder = decode if isinstance(decode, msgspec.msgpack.Decoder) else msgspec.msgpack.Decoder(decode)
        self._max_frame_bytes = max_frame_bytes
        self._sealer = FrameSealer(None, max_frame_bytes=max_frame_bytes)
        self._opener = FrameOpener(None)
        self._sending = threading.Lock()
        """Frames leave in the order of their tags."""
        self._ahead = memoryview(bytearray(read_ahead_bytes))
        self._unread = self._ahead[:0]
        """Received bytes in `_ahead` that nobody has taken yet."""

    def open(
        self,
        token: bytes,
        *,
        hello: Hello,
        client: bool,
        deadline: float,
        tls: Tls | None = None,
        server: str = CONTROLLER,
    ) -> Hello:
        """Authenticate both sides before `deadline` (monotonic clock) and return the peer's name.

        server: with `tls`, the name in the certificate of a client's peer. Raises as `receive`, `WrongTag` for another
        token, `UserError` for another version or certificate.
        """
        if tls is not None:
            self._encrypt(tls.session(client=client, server=server), deadline=deadline)
        ours = make_preamble()
        if client:
            with suppress(OSError):  # the peer's reason to close, such as a certificate that it refuses, is read next
                self._socket.sendall(ours)
        theirs = bytes(self._exactly(PREAMBLE_BYTES, deadline=deadline))
        if not client:
            self._write(ours)  # before any check, so that a client of another version learns ours
        keys = session_keys(token, ours=ours, theirs=theirs, client=client)
        self._sealer = FrameSealer(keys.send, max_frame_bytes=self._max_frame_bytes)
        self._opener = FrameOpener(keys.receive)
        self.send(hello)
        body = self._receive_body(max_bytes=HANDSHAKE_BYTES - PREAMBLE_BYTES, deadline=deadline)
        return self._decoded(_hello_decoder, body)

    def _encrypt(self, session: TlsSession, *, deadline: float) -> None:
        assert isinstance(self._socket, socket.socket)
        encrypted = EncryptedSocket(self._socket, session)
        try:
            encrypted.shake_hands(deadline=deadline)
        except OSError as error:
            raise self._closed(error) from error
        self._socket = encrypted

    def send(self, message: Any) -> None:
        """Send a message."""
        with self._sending:
            self._write(self._sealer.seal(message))

    def receive(self) -> Any:
        """Return the next message."""
        return self._decoded(self._decoder, self._receive_body(max_bytes=self._max_frame_bytes))

    def receive_into(self, view: memoryview) -> None:
        """Receive raw bytes, sent after a message, until they fill `view`."""
        taken = min(len(view), len(self._unread))
        view[:taken], self._unread = self._unread[:taken], self._unread[taken:]
        self._read_into(view[taken:])

    def fileno(self) -> int:
        """Return the descriptor, for `select`."""
        return self._socket.fileno()

    def close(self) -> None:
        """End the connection, also for a thread that is blocked in it. May be called twice."""
        with suppress(OSError):  # already gone: nothing to shut down
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _closed(self, why: object) -> Exception:
        """The error of a connection that has ended."""
        return ConnectionClosed(str(why))

    def _poll(self, events: int, timeout_s: float | None) -> bool:
        """Wait for events of the socket, or a hang-up, for at most `timeout_s`; return whether one occurred."""
        if events & select.POLLIN and isinstance(self._socket, EncryptedSocket) and self._socket.pending:
            return True
        try:
            polled = select.poll()
            polled.register(self._socket, events)
            return bool(polled.poll(None if timeout_s is None else timeout_s * 1e3))
        except (OSError, ValueError) as error:
            raise self._closed(error) from error  # closed by another thread

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._closed(error) from error

    def _read_into(self, view: memoryview, *, deadline: float | None = None) -> None:
        """Receive exactly the bytes that fill `view`, all before `deadline`."""
        done = 0
        while done < len(view):
            done += self._read_some(view[done:], socket.MSG_WAITALL, deadline=deadline)

    def _read_some(self, view: memoryview, flags: int = 0, *, deadline: float | None = None) -> int:
        """Receive into `view`, not empty, once; return the number of bytes, at least one."""
        try:
            if deadline is not None:
                self._socket.settimeout(max(deadline - time.monotonic(), _SHORTEST_S))
            count = self._socket.recv_into(view, 0, flags)
        except OSError as error:
            raise self._closed(error) from error
        if not count:
            raise self._closed("closed")
        return count

    def _exactly(self, num_bytes: int, *, deadline: float | None = None) -> bytearray:
        """Receive bytes; memory is allocated piece by piece as they arrive, not by the announced length."""
        while deadline is None and len(self._unread) < num_bytes <= len(self._ahead):
            count = len(self._unread)
            self._ahead[:count] = bytes(self._unread)
            self._unread = self._ahead[: count + self._read_some(self._ahead[count:])]
        data, self._unread = bytearray(self._unread[:num_bytes]), self._unread[num_bytes:]
        while len(data) < num_bytes:
            piece = bytearray(min(num_bytes - len(data), _PIECE_BYTES))
            self._read_into(memoryview(piece), deadline=deadline)
            data += piece
        return data

    def _receive_body(self, *, max_bytes: int, deadline: float | None = None) -> bytearray:
        length, tag = self._opener.read_header(self._exactly(HEADER_BYTES, deadline=deadline), max_bytes=max_bytes)
        body = self._exactly(length, deadline=deadline)
        self._opener.verify(tag, body)
        return body

    def _decoded(self, decoder: msgspec.msgpack.Decoder[Any], body: bytearray) -> Any:
        try:
            return decoder.decode(body)
        except UNDECODABLE as error:
            raise Violation(f"a message this side does not understand: {error}") from error

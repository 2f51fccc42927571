"""TLS below a connection: in asyncio between the socket's transport and the protocol, and as a blocking socket.

Both exchange bytes with a `TlsSession` in memory. Python's own `ssl` sockets and transports do not fit: two threads
must not use an SSL socket at once, and asyncio accepts the next connection only after a handshake.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire.handshake import Violation
from cosmos_rl_core.wire.tls import TlsSession

if TYPE_CHECKING:
    from cosmos_rl_core.wire.connection import Connection

_PIECE_BYTES = 256 * 2**10
"""Bytes that are encrypted or received at once."""
_SHORTEST_S = 1e-3


class EncryptedTransport(asyncio.Transport, asyncio.Protocol):
    """Receives from the socket's transport, and is the transport of a `Connection`.

    The connection begins at once, so that its limit for the handshake includes that of TLS.
    """

    def __init__(self, inner: Connection, session: TlsSession) -> None:
        super().__init__()
        self._inner, self._session = inner, session
        self._waiting: list[bytes | bytearray | memoryview] = []
        """Messages that were written before the end of the handshake."""

    # -- called by the socket's transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = cast(asyncio.Transport, transport)
        self._inner.connection_made(self)
        self._session.shake_hands()
        self._flush()

    def data_received(self, data: bytes) -> None:
        try:
            self._session.feed(data)
            if self._session.is_open or self._shake_hands():
                self._deliver()
        except (Violation, UserError) as error:
            self._flush()  # an alert, the reason for the peer
            self._inner.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def _shake_hands(self) -> bool:
        if self._session.shake_hands():
            for data in self._waiting:
                self._session.write(data)
            self._waiting.clear()
        self._flush()
        return self._session.is_open

    def _deliver(self) -> None:
        while not self._below.is_closing():
            count = self._session.read_into(self._inner.get_buffer(-1))
            if not count:
                return
            self._inner.buffer_updated(count)

    def _flush(self) -> None:
        if data := self._session.take():
            self._below.write(data)

    # -- called by the connection

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._session.is_open:
            self._waiting.append(data)
            return
        self._session.write(data)
        self._flush()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._below.set_write_buffer_limits(high=high, low=low)

    def get_write_buffer_size(self) -> int:
        return self._below.get_write_buffer_size()

    def is_closing(self) -> bool:
        return self._below.is_closing()

    def pause_reading(self) -> None:
        self._below.pause_reading()

    def resume_reading(self) -> None:
        self._below.resume_reading()

    def close(self) -> None:
        self._below.close()

    def abort(self) -> None:
        self._below.abort()


class EncryptedSocket:
    """The methods of a connected socket that a `BlockingConnection` uses.

    One thread may receive while another one sends.
    """

    def __init__(self, below: socket.socket, session: TlsSession) -> None:
        self._below, self._session = below, session
        self._guard = threading.Lock()
        """OpenSSL's state of a connection is used by one thread at a time."""
        self._received = memoryview(bytearray(_PIECE_BYTES))

    def shake_hands(self, *, deadline: float) -> None:
        """Prove the certificates to each other before `deadline` (monotonic). Raises TlsRefused, Violation, OSError."""
        try:
            while not self._session.shake_hands():
                self._flush()
                self._below.settimeout(max(deadline - time.monotonic(), _SHORTEST_S))
                if not self._receive():
                    raise ConnectionResetError("closed by the peer during the handshake")
        except (UserError, Violation):
            with suppress(OSError):
                self._flush()  # an alert, the reason for the peer
            raise
        self._flush()

    @property
    def pending(self) -> bool:
        """Whether received bytes were not read yet."""
        with self._guard:
            return self._session.pending

    def recv_into(self, view: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """Receive at least one byte; 0 at the end. Raises OSError as the socket does."""
        while True:
            with self._guard:
                count = self._session.read_into(view)
            if count or not self._receive():
                return count

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while view.nbytes:
            view = view[self.sendmsg([view]) :]

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Send the beginning of the parts, one after another; return the number of bytes."""
        left = _PIECE_BYTES
        with self._guard:
            for part in parts:
                self._session.write(part[:left])
                left -= min(left, part.nbytes)
                if not left:
                    break
            sealed = self._session.take()
        self._below.sendall(sealed)
        return _PIECE_BYTES - left

    def fileno(self) -> int:
        return self._below.fileno()

    def settimeout(self, timeout_s: float | None) -> None:
        self._below.settimeout(timeout_s)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        self._below.setsockopt(level, option, value)

    def getsockname(self) -> tuple[str, int]:
        return self._below.getsockname()

    def shutdown(self, how: int) -> None:
        self._below.shutdown(how)

    def close(self) -> None:
        self._below.close()

    def _receive(self) -> bool:
        """Receive ciphertext; False at the end of the connection."""
        count = self._below.recv_into(self._received)
        if count:
            with self._guard:
                self._session.feed(self._received[:count])
        return count > 0

    def _flush(self) -> None:
        if data := self._session.take():
            self._below.sendall(data)

"""One authenticated TCP connection: frames of msgpack, and raw bytes behind a frame.

Both ends prove that they know the run's token before a message is read (HMAC-SHA256 over both nonces and the
side's name), so a stranger can neither read weights nor feed the decoder. The token itself never travels. What
follows is neither encrypted nor authenticated: keyed hashes of the buckets cost a third of the speed or more.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal

import msgspec
import numpy as np

from cosmos_rl_transfer.errors import AuthenticationError, PeerLost, TransferError
from cosmos_rl_transfer.wire.messages import Reply, Request

_MAGIC = b"cosmos-rl-transfer/1\n"
_NONCE_BYTES = 32
_REFUSED = bytes(32)
"""What a publisher answers a stranger in place of its proof: a connection that ends in silence was lost."""
_MAX_FRAME_BYTES = 1 << 30
_SHORTEST_S = 1e-3
"""Least time-out of a receive before a deadline: 0 would mean not to wait at all."""
_MAX_PARTS = 1024
"""IOV_MAX: parts of one sendmsg."""
_HUNG_UP = select.POLLRDHUP if sys.platform == "linux" else 0
_REQUESTS = msgspec.msgpack.Decoder(Request)
_REPLIES = msgspec.msgpack.Decoder(Reply)


class Link:
    """A connection. Every receive and send has the deadline `timeout_s` without progress."""

    def __init__(
        self, connection: socket.socket, *, timeout_s: float, side: Literal["publisher", "subscriber"]
    ) -> None:
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = connection
        self.set_deadlines(timeout_s=timeout_s, idle_s=timeout_s)
        self._side = side
        self._decoder = _REPLIES if side == "subscriber" else _REQUESTS

    @classmethod
    def connect(cls, address: str, *, token: bytes, timeout_s: float) -> Link:
        """Connect to a publisher and authenticate. Raises PeerLost or AuthenticationError."""
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
        except OSError as error:
            raise PeerLost(f"no publisher answers at {address}: {error}") from error
        link = cls(connection, timeout_s=timeout_s, side="subscriber")
        try:
            link.authenticate(token)
        except BaseException:
            link.close()
            raise
        return link

    def set_deadlines(self, *, timeout_s: float, idle_s: float | None) -> None:
        """Set how long a transfer may stand still and how long the next message may be away (None: ever)."""
        self._timeout_s, self._idle_s = timeout_s, idle_s
        self._set_timeout(timeout_s)

    @property
    def timeout_s(self) -> float:
        """How long a transfer may stand still."""
        return self._timeout_s

    @property
    def local_host(self) -> str:
        """Address of this host on the connection: others who come the same way reach it there."""
        return self._socket.getsockname()[0]

    def authenticate(self, token: bytes) -> None:
        """Prove the token to each other, within `timeout_s` in all.

        Raises AuthenticationError, PeerLost on a broken connection or where the other side takes longer.
        """
        deadline = time.monotonic() + self._timeout_s
        mine = os.urandom(_NONCE_BYTES)
        self._send(_MAGIC + mine)
        hello = self._receive(len(_MAGIC) + _NONCE_BYTES, deadline=deadline)
        if hello[: len(_MAGIC)] != _MAGIC:
            raise AuthenticationError("the other side does not speak the weight-transfer protocol, version 1")
        theirs = hello[len(_MAGIC) :]
        other = "publisher" if self._side == "subscriber" else "subscriber"
        if self._side == "subscriber":
            self._send(_proof(token, self._side, mine, theirs))
        proof = self._receive(32, deadline=deadline)
        self._set_timeout(self._timeout_s)
        known = hmac.compare_digest(proof, _proof(token, other, theirs, mine))
        if self._side == "publisher":
            self._send(_proof(token, self._side, mine, theirs) if known else _REFUSED)
        if not known:
            raise AuthenticationError(f"the {other} has another token than this run's")

    def send(self, message: Request | Reply, raw: memoryview | None = None) -> None:
        """Send a message and the raw bytes behind it."""
        body = msgspec.msgpack.encode(message)
        self._send(struct.pack("<I", len(body)) + body)
        if raw is not None:
            self._send(raw)

    def send_parts(self, parts: Iterable[memoryview]) -> None:
        """Send raw bytes that lie in several places, one after the other, without a copy."""
        left = [part for part in parts if part.nbytes]
        while left:
            try:
                sent = self._socket.sendmsg(left[:_MAX_PARTS])
            except OSError as error:
                raise self._lost(error) from error
            whole = 0
            while whole < len(left) and sent >= left[whole].nbytes:
                sent -= left[whole].nbytes
                whole += 1
            del left[:whole]
            if sent:
                left[0] = left[0][sent:]

    def check(self) -> None:
        """Raise PeerLost if the other side has hung up; does not wait and reads nothing."""
        try:
            polled = select.poll()
            polled.register(self._socket, _HUNG_UP)
            gone = polled.poll(0)
        except (OSError, ValueError) as error:
            raise self._lost(error) from error  # closed by another thread
        if gone:
            raise self._lost("closed")

    def receive(self) -> Any:
        """Receive one message of the kind the other side sends. Raises TransferError for anything else."""
        self._await_readable()
        (size,) = struct.unpack("<I", self._receive(4))
        if size > _MAX_FRAME_BYTES:
            raise TransferError(f"a message of {size} bytes was announced; at most {_MAX_FRAME_BYTES} are allowed")
        try:
            return self._decoder.decode(self._receive(size))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TransferError(f"a message that this side does not understand: {error}") from error

    def receive_into(self, out: np.ndarray, *, deadline: float | None = None) -> None:
        """Receive exactly out.nbytes raw bytes into contiguous `out`; `deadline`: when all have to be here."""
        view, done = out.data.cast("B"), 0
        while done < len(view):
            if deadline is not None:
                self._set_timeout(max(deadline - time.monotonic(), _SHORTEST_S))
            try:
                count = self._socket.recv_into(view[done:])
            except OSError as error:
                raise self._lost(error) from error
            if not count:
                raise self._lost("closed")
            done += count

    def _await_readable(self) -> None:
        """Wait for the next message; the socket's own timeout belongs to the thread that sends meanwhile."""
        try:
            polled = select.poll()
            polled.register(self._socket, select.POLLIN)
            ready = polled.poll(None if self._idle_s is None else self._idle_s * 1e3)
        except (OSError, ValueError) as error:
            raise self._lost(error) from error  # closed by another thread
        if not ready:
            raise self._lost("timed out")

    def close(self) -> None:
        """Close the connection; a thread blocked in it gets PeerLost. May be called twice."""
        with suppress(OSError):  # already gone: nothing to shut down
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _set_timeout(self, seconds: float | None) -> None:
        try:
            self._socket.settimeout(seconds)
        except OSError as error:
            raise self._lost(error) from error  # closed by another thread

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._lost(error) from error

    def _receive(self, size: int, *, deadline: float | None = None) -> bytes:
        data = np.empty(size, np.uint8)
        self.receive_into(data, deadline=deadline)
        return data.tobytes()

    def _lost(self, why: object) -> PeerLost:
        other = "publisher" if self._side == "subscriber" else "subscriber"
        return PeerLost(f"the {other} is gone: {why}")


def _proof(token: bytes, side: str, own: bytes, other: bytes) -> bytes:
    return hmac.digest(token, side.encode() + own + other, "sha256")

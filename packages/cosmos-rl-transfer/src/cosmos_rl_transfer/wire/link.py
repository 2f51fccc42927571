"""Authenticated TCP connections (`Link`), and the socket that accepts them (`Listener`).

A link has the frames of `cosmos_rl_core.wire`, and raw bytes after a frame. Both ends prove that they have the run's
token before a message is read, so an unauthenticated peer can neither read weights nor reach the decoder. Messages are
authenticated; the raw bytes only with TLS, which encrypts both. Keyed hashes of the buckets would cost a third of the
speed or more.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from typing import Any, Literal

import msgspec

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire.blocking import BlockingConnection
from cosmos_rl_core.wire.handshake import Hello, TlsRefused, Violation, WrongTag
from cosmos_rl_core.wire.listening import RETRY_S, SeldomLog, UnauthenticatedConnections, accept_forever
from cosmos_rl_core.wire.tls import WORKER, Tls
from cosmos_rl_transfer.errors import AuthenticationError, PeerLost, TransferError
from cosmos_rl_transfer.wire.messages import Reply, Request

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
MAX_UNAUTHENTICATED = 64
"""Maximum unauthenticated connections of a listener at a time."""
_MAX_FRAME_BYTES = 1 << 30
_READ_AHEAD_BYTES = 4096
"""Read at once where a message is expected. Bytes past the message are copied into the payload buffer."""
_SAME_HOST_BYTES = 192 << 10
"""Send buffer between processes of one host: bytes under way stay in a cache. The kernel sizes other send buffers."""
_MAX_PARTS = 1024
"""IOV_MAX: parts of one sendmsg."""
_HUNG_UP = select.POLLRDHUP if sys.platform == "linux" else 0
_REQUESTS = msgspec.msgpack.Decoder(Request)
_REPLIES = msgspec.msgpack.Decoder(Reply)


class Link(BlockingConnection):
    """A connection. Every receive and send has the deadline `timeout_s` without progress."""

    def __init__(
        self, connection: socket.socket, *, timeout_s: float, side: Literal["publisher", "subscriber"]
    ) -> None:
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if side == "publisher" and connection.getpeername()[0] == connection.getsockname()[0]:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SAME_HOST_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        decoder = _REPLIES if side == "subscriber" else _REQUESTS
        super().__init__(
            connection, decode=decoder, max_frame_bytes=_MAX_FRAME_BYTES, read_ahead_bytes=_READ_AHEAD_BYTES
        )
        self._side, self._other = side, "publisher" if side == "subscriber" else "subscriber"
        self._sealed = bytearray()
        """Messages that leave with the next bytes."""
        self.set_deadlines(timeout_s=timeout_s, idle_s=timeout_s)

    @classmethod
    def connect(cls, address: str, *, token: bytes, timeout_s: float, tls: Tls | None = None) -> Link:
        """Connect to a publisher and authenticate. Raises PeerLost or AuthenticationError."""
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
        except OSError as error:
            raise PeerLost(f"no publisher at {address}: {error}") from error
        link = cls(connection, timeout_s=timeout_s, side="subscriber")
        try:
            link.authenticate(token, tls)
        except BaseException:
            link.close()
            raise
        return link

    def set_deadlines(self, *, timeout_s: float, idle_s: float | None) -> None:
        """Set the limits of a transfer without progress and of the wait for the next message (None: unlimited)."""
        self._timeout_s, self._idle_s = timeout_s, idle_s
        limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        try:
            self._socket.settimeout(None)  # the kernel's own limits cost no system calls
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        except OSError as error:
            raise self._closed(error) from error  # closed by another thread

    @property
    def timeout_s(self) -> float:
        """Limit of a transfer without progress."""
        return self._timeout_s

    @property
    def local_host(self) -> str:
        """This host's address on the connection, reachable from the peer's network."""
        return self._socket.getsockname()[0]

    def authenticate(self, token: bytes, tls: Tls | None = None) -> None:
        """Prove the token, and with `tls` the certificates, to each other, within `timeout_s` in all.

        Raises AuthenticationError, PeerLost on a broken connection or after `timeout_s`.
        """
        deadline = time.monotonic() + self._timeout_s
        hello = Hello(name=self._side, role=self._side)
        try:
            self.open(token, hello=hello, client=self._side == "subscriber", deadline=deadline, tls=tls, server=WORKER)
        except WrongTag as error:
            raise AuthenticationError(f"the {self._other} has another token than this run's") from error
        except TlsRefused as error:
            raise AuthenticationError(str(error)) from error
        except UserError as error:
            raise AuthenticationError("the other side has another version of the connection protocol") from error
        except Violation as error:
            raise AuthenticationError("the other side does not support the weight-transfer protocol") from error
        self.set_deadlines(timeout_s=self._timeout_s, idle_s=self._idle_s)

    def send(self, message: Request | Reply, *, with_next: bool = False) -> None:
        """Send a message; `with_next`: together with what is sent next, which has to follow at once."""
        with self._sending:
            self._sealed += self._sealer.seal(message)
            if not with_next:
                self._flush([])

    def send_parts(self, parts: Iterable[memoryview]) -> None:
        """Send several raw buffers one after the other, without a copy."""
        with self._sending:
            self._flush(parts)

    def _flush(self, parts: Iterable[memoryview]) -> None:
        sealed, self._sealed = self._sealed, bytearray()
        left = [part for part in (memoryview(sealed), *parts) if part.nbytes]
        while left:
            try:
                sent = self._socket.sendmsg(left[:_MAX_PARTS])
            except OSError as error:
                raise self._closed(error) from error
            num_sent = 0
            while num_sent < len(left) and sent >= left[num_sent].nbytes:
                sent -= left[num_sent].nbytes
                num_sent += 1
            del left[:num_sent]
            if sent:
                left[0] = left[0][sent:]

    def receive(self) -> Any:
        """Receive one message of the other side's protocol. Raises TransferError for anything else."""
        if not self._unread and self._idle_s != self._timeout_s and not self._poll(select.POLLIN, self._idle_s):
            raise self._closed("timed out")
        try:
            return super().receive()
        except Violation as error:
            raise TransferError(str(error)) from error

    def check(self) -> None:
        """Raise PeerLost if the other side has hung up; does not wait and reads nothing."""
        if self._poll(_HUNG_UP, 0):
            raise self._closed("closed")

    def _closed(self, why: object) -> PeerLost:
        return PeerLost(f"the {self._other} is gone: {'timed out' if isinstance(why, BlockingIOError) else why}")


class Listener:
    """Listens until closed. `talk(link)` runs in the peer's thread; the link is closed if it raises."""

    def __init__(
        self, bind: str, *, token: bytes, name: str, talk: Callable[[Link], None], tls: Tls | None = None
    ) -> None:
        """Listen on a free port of `bind`; `name` prefixes the threads' names. Raises OSError."""
        self._token, self._tls, self._name, self._talk = token, tls, name, talk
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._socket = socket.create_server((bind, 0), family=family)
        self._socket.setblocking(False)
        host = f"[{bind}]" if ":" in bind else bind
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        """Address for peers: "host:port"."""
        seldom = SeldomLog(log.warning)
        self._complain: Callable[[str], None] = lambda text: seldom(f"{name}: {text}")
        self._unauthenticated = UnauthenticatedConnections(MAX_UNAUTHENTICATED, complain=self._complain)
        """Used in the accepting thread alone."""
        self._talking: dict[Link, threading.Thread] = {}
        """Connections with a thread."""
        self._loop = asyncio.new_event_loop()
        self._accepted = self._loop.create_task(accept_forever(self._socket, self._admit, complain=self._complain))
        self._accepting = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Stop listening and close the connections that have a thread. Idempotent."""
        self._in_loop(self._accepted.cancel)
        self._accepting.join()
        for link in list(self._talking):
            link.close()

    def join(self) -> None:
        """Wait for the connections' threads, after `close`, each at most for the duration of a handshake."""
        for thread in list(self._talking.values()):
            thread.join(timeout=HANDSHAKE_S)

    def _accept(self) -> None:
        with closing(self._loop), self._socket, suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._accepted)

    async def _admit(self, connection: socket.socket) -> None:
        """Start a connection's thread."""
        await self._unauthenticated.make_room()
        try:
            link, peer = Link(connection, timeout_s=HANDSHAKE_S, side="publisher"), connection.getpeername()
        except (OSError, PeerLost) as error:  # it was gone before its options were set
            connection.close()
            log.info("%s: a peer left: %s", self._name, error)
            return
        thread = threading.Thread(target=self._serve, args=(link, peer), name=f"{self._name}-serve", daemon=True)
        self._unauthenticated.enter(link, drop=link.close)
        self._talking[link] = thread
        try:
            thread.start()
        except RuntimeError as error:  # no memory or no process number is left for it
            self._forget(link)
            link.close()
            self._complain(f"a connection cannot be served: {error}")
            await asyncio.sleep(RETRY_S)

    def _serve(self, link: Link, peer: object) -> None:
        try:
            with ExitStack() as on_error:
                on_error.callback(link.close)
                link.authenticate(self._token, self._tls)
                self._in_loop(self._unauthenticated.authenticate, link)
                self._talk(link)
                on_error.pop_all()
        except AuthenticationError as error:
            self._complain(str(error))
        except TransferError as error:
            log.info("%s: %s left: %s", self._name, peer, error)
        finally:
            self._forget(link)

    def _forget(self, link: Link) -> None:
        self._talking.pop(link, None)
        self._in_loop(self._unauthenticated.leave, link)

    def _in_loop(self, call: Callable[..., object], *arguments: object) -> None:
        """Run a call in the accepting thread, unless that has ended."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, *arguments)

"""The control channel: authenticated messages between the controller and its workers.

    server = await serve("tcp://127.0.0.1:0", token=token, decode=FromWorker, on_connect=talk)
    hello = Hello(name="rollout-0", role="rollout")
    connection = await connect(server.address, token=token, hello=hello, decode=FromController)
    await connection.send(Heartbeat(progress=7))
    reply = await connection.receive()

Messages are `msgspec.Struct`s; `decode` is the (tagged) union this side accepts. `bytes` fields travel raw
and are copied once on arrival; `memoryview` fields are not copied. Messages are authenticated, and with `tls` encrypted
too.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire.connection import Connection
from cosmos_rl_core.wire.encrypted import EncryptedTransport
from cosmos_rl_core.wire.frames import MAX_FRAME_BYTES, ConnectionClosed
from cosmos_rl_core.wire.handshake import (
    HANDSHAKE_S,
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    Hello,
    TlsRefused,
    Violation,
    WrongTag,
)
from cosmos_rl_core.wire.listening import (
    Address,
    SeldomLog,
    UnauthenticatedConnections,
    accept_forever,
    bound_address,
    listen,
    parse_address,
)
from cosmos_rl_core.wire.tls import CONTROLLER, Tls

__all__ = [
    "PROTOCOL_VERSION",
    "Connection",
    "ConnectionClosed",
    "Hello",
    "ChannelServer",
    "adopt",
    "connect",
    "serve",
]

log = logging.getLogger(__name__)

_CLOSE_GRACE_S = 1.0
MAX_UNAUTHENTICATED = 256
"""Maximum unauthenticated connections of a server at a time, each for at most HANDSHAKE_S."""
UNACKNOWLEDGED_S = 15.0
"""Seconds after which a client's connection ends whose peer's machine acknowledges nothing. A worker sends a heartbeat
each second, and without this waits a quarter of an hour for a machine that is gone."""
IDLE_S, PROBE_S, PROBES = 60, 15, 4
"""Seconds without data before the first probe, between probes, and number of unanswered ones that end a connection.
The server's other limit is the recipe's: [elastic] silence_s."""

OnConnect = Callable[[Connection], Awaitable[None]]


class ChannelServer:
    """A listening socket and its connections. Made by `serve`."""

    address: str
    """The address at which it listens, with the port chosen by the system."""

    def __init__(self, address: Address, listener: socket.socket, *, on_connect: OnConnect, tls: Tls | None) -> None:
        self.address = str(address)
        self._listener, self._on_connect, self._tls = listener, on_connect, tls
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._complain = SeldomLog(log.warning)
        self._unauthenticated = UnauthenticatedConnections(MAX_UNAUTHENTICATED, complain=self._complain)
        self._accepting: asyncio.Task[None] | None = None
        self._closing = False

    def begin(self, make: Callable[[], Connection]) -> None:
        """Accept connections, each with a `Connection` of its own."""

        async def admit(accepted: socket.socket) -> None:
            await self._unauthenticated.make_room()
            _probe(accepted)
            connection = make()
            layer = connection if self._tls is None else EncryptedTransport(connection, self._tls.session(client=False))
            self._connections.add(connection)
            drop = partial(connection.abort, "too many others wait for the handshake")
            self._unauthenticated.enter(connection, drop=drop)
            try:
                await asyncio.get_running_loop().connect_accepted_socket(lambda: layer, accepted)
            except OSError:
                self._forget(connection)
                raise
            task = asyncio.get_running_loop().create_task(self._talk(connection), name="wire")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        accepting = accept_forever(self._listener, admit, complain=self._complain)
        self._accepting = asyncio.create_task(accepting, name=f"accept {self.address}")

    async def close(self) -> None:
        """Stop listening, end every connection after its unsent bytes, and cancel the handlers."""
        if self._closing:
            return
        self._closing = True
        assert self._accepting is not None
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()
        for connection in list(self._connections):
            connection.close("the server was closed")
        tasks = self._tasks - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_GRACE_S)
        for connection in list(self._connections):
            connection.abort("the server was closed")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _talk(self, connection: Connection) -> None:
        """Wait for the handshake, then run the handler, at whose end the connection ends."""
        try:
            await connection.opened
            self._unauthenticated.authenticate(connection)
            await self._on_connect(connection)
        except ConnectionClosed:
            return  # the usual end of a handler's receive loop
        except Exception as error:
            if connection in self._unauthenticated:
                self._complain_of(error)
            else:
                context = {"message": f"the handler of {connection.peer.name} failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)
        finally:
            connection.close()
            self._forget(connection)

    def _complain_of(self, failure: Exception) -> None:
        """Log the mistake of whoever started a peer; nothing for any other end of a handshake."""
        if isinstance(failure, WrongTag):
            why, detail = "its peer has another token; use the file `token` of this run's directory", ""
        elif isinstance(failure, TlsRefused):
            why, detail = str(failure), ""
        elif isinstance(failure, UserError):
            why, detail = "its peer has another version of the protocol", f" ({failure})"
        else:
            return
        self._complain(f"{self.address} has refused a connection: {why}", detail)

    def _forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._unauthenticated.leave(connection)


async def serve(
    address: str,
    *,
    token: bytes,
    decode: Any,
    on_connect: OnConnect,
    hello: Hello | None = None,
    allow_remote: bool = False,
    handshake_s: float = HANDSHAKE_S,
    tls: Tls | None = None,
) -> ChannelServer:
    """Listen, and run `on_connect(connection)` for each peer that has the token and, with `tls`, a certificate.

    The connection ends when `on_connect` returns. `decode` is a union of structs or a msgspec Decoder of one.
    `hello` is what peers see (default: the controller). Raises `UserError` for an address that is busy,
    unusable, or reachable by other machines without `allow_remote`.
    """
    _check_token(token)
    decoder = _decoder(decode)
    requested = parse_address(address)
    listener = listen(requested, allow_remote=allow_remote)
    hello = hello or Hello(name="controller", role="controller")
    server = ChannelServer(bound_address(listener, requested=requested), listener, on_connect=on_connect, tls=tls)
    server.begin(partial(Connection, token=token, hello=hello, decoder=decoder, handshake_s=handshake_s))
    return server


async def connect(
    address: str,
    *,
    token: bytes,
    hello: Hello,
    decode: Any,
    timeout_s: float = 10.0,
    max_frame_bytes: int = MAX_FRAME_BYTES,
    tls: Tls | None = None,
    server: str = CONTROLLER,
) -> Connection:
    """Connect once and authenticate both sides. server: with `tls`, the name in the peer's certificate.

    Raises `ConnectionClosed` if there is no listener, the peer hangs up or the time is over (a retry may succeed), and
    `UserError` if the peer has another token, certificate or protocol version (a retry cannot).
    """
    target = parse_address(address)
    _check_token(token)
    connection = Connection(
        token=token,
        hello=hello,
        decoder=_decoder(decode),
        client=True,
        max_frame_bytes=max_frame_bytes,
        handshake_s=timeout_s,
    )
    layer = connection if tls is None else EncryptedTransport(connection, tls.session(client=True, server=server))
    has_begun = False
    try:
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(lambda: layer, target.host, target.port)
            has_begun = True
            if (sock := transport.get_extra_info("socket")) is not None:  # uvloop has none after a reset
                _probe(sock, unacknowledged_s=UNACKNOWLEDGED_S)
            await connection.opened
            return connection
    except TimeoutError as error:
        raise ConnectionClosed(f"{target} did not answer within {timeout_s:g} s") from error
    except OSError as error:
        raise ConnectionClosed(f"cannot connect to {target}: {error.strerror or error}") from error
    except WrongTag as error:
        raise UserError(f"{target} does not have this run's token: give both sides the same token file") from error
    except UserError as error:
        raise type(error)(f"{target}: {error}") from error
    except (Violation, ConnectionClosed) as error:
        raise ConnectionClosed(f"{target}: {connection.reason}") from error
    finally:
        if has_begun and (not connection.opened.done() or connection.opened.cancelled()):
            connection.abort("the attempt to connect was given up")


async def adopt(
    connection: socket.socket, *, decode: Any, name: str, max_frame_bytes: int = MAX_FRAME_BYTES
) -> Connection:
    """Return the connection over one end of a socket pair whose other end the process `name`, parent or child, has."""
    adopted = Connection(
        token=None, hello=Hello(name=name, role="family"), decoder=_decoder(decode), max_frame_bytes=max_frame_bytes
    )
    await asyncio.get_running_loop().connect_accepted_socket(lambda: adopted, connection)
    return adopted


def _probe(connection: socket.socket, *, unacknowledged_s: float = 0.0) -> None:
    """Let the system end a connection to a machine that does not answer. Linux has all of the options, macOS some."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": IDLE_S, "TCP_KEEPINTVL": PROBE_S, "TCP_KEEPCNT": PROBES}
    if unacknowledged_s:
        options["TCP_USER_TIMEOUT"] = int(unacknowledged_s * 1e3)
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _decoder(decode: Any) -> msgspec.msgpack.Decoder[Any]:
    return decode if isinstance(decode, msgspec.msgpack.Decoder) else msgspec.msgpack.Decoder(decode)


def _check_token(token: bytes) -> None:
    if len(token) != TOKEN_BYTES:
        raise ValueError(f"a token has {TOKEN_BYTES} bytes, this one has {len(token)}")

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
from typing import Any

import msgspec

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire.connection import Connection, WireProtocol
from cosmos_rl_core.wire.encrypted import EncryptedTransport
from cosmos_rl_core.wire.frames import MAX_FRAME_BYTES, ConnectionClosed
from cosmos_rl_core.wire.handshake import HANDSHAKE_S, PROTOCOL_VERSION, TOKEN_BYTES, Hello, TlsRefused, WrongTag
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
ANOTHER_VERSION = "its peer has another version of the protocol"
IDLE_S, PROBE_S, PROBES = 60, 15, 4
"""Seconds without data before the first probe, between probes, and number of unanswered ones that end a connection.
The server's other limit is the recipe's: [elastic] silence_s."""

OnConnect = Callable[[Connection], Awaitable[None]]


class ChannelServer:
    """A listening socket and its connections. Made by `serve`."""

    address: str
    """The address at which it listens, with the port chosen by the system."""

    def __init__(self, address: Address, *, on_connect: OnConnect) -> None:
        self.address = str(address)
        self._on_connect = on_connect
        self._protocols: set[WireProtocol] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._complain = SeldomLog(log.warning)
        self._unauthenticated = UnauthenticatedConnections(MAX_UNAUTHENTICATED, complain=self._complain)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._closing = False

    async def close(self) -> None:
        """Stop listening, end every connection after its unsent bytes, and cancel the handlers."""
        if self._closing:
            return
        self._closing = True
        assert self._listener is not None and self._accepting is not None
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()
        for protocol in list(self._protocols):
            protocol.close("the server was closed")
        tasks = self._tasks - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_GRACE_S)
        for protocol in list(self._protocols):
            protocol.abort("the server was closed")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _listen(self, listener: socket.socket, make: Callable[[], WireProtocol], *, tls: Tls | None) -> None:
        """Serve each connection to `listener` by a protocol of its own."""

        async def admit(connection: socket.socket) -> None:
            await self._unauthenticated.make_room()
            _probe(connection)
            protocol = make()
            layer = protocol if tls is None else EncryptedTransport(protocol, tls.session(client=False))
            self._protocols.add(protocol)
            self._unauthenticated.enter(protocol, drop=lambda: protocol.abort("too many others wait for the handshake"))
            try:
                await asyncio.get_running_loop().connect_accepted_socket(lambda: layer, connection)
            except OSError:
                self._lost(protocol)
                raise

        self._listener = listener
        accepting = accept_forever(listener, admit, complain=self._complain)
        self._accepting = asyncio.create_task(accepting, name=f"accept {self.address}")

    def _lost(self, protocol: WireProtocol) -> None:
        if protocol in self._unauthenticated and (why := _refusal(protocol.failure)):
            detail = f" ({protocol.failure})" if why == ANOTHER_VERSION else ""
            self._complain(f"{self.address} has refused a connection: {why}", detail)
        self._protocols.discard(protocol)
        self._unauthenticated.leave(protocol)

    def _opened(self, connection: Connection) -> None:
        self._unauthenticated.authenticate(connection.protocol)
        task = asyncio.get_running_loop().create_task(self._talk(connection), name=f"wire {connection.peer.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _talk(self, connection: Connection) -> None:
        try:
            await self._on_connect(connection)
        except ConnectionClosed:
            return  # the usual end of a handler's receive loop
        except Exception as error:
            loop = asyncio.get_running_loop()
            loop.call_exception_handler(
                {"message": f"the handler of {connection.peer.name} failed", "exception": error}
            )
        finally:
            connection.close()


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
    server = ChannelServer(bound_address(listener, requested=requested), on_connect=on_connect)

    def protocol() -> WireProtocol:
        return WireProtocol(
            token=token,
            hello=hello or Hello(name="controller", role="controller"),
            decoder=decoder,
            client=False,
            handshake_s=handshake_s,
            on_open=server._opened,
            on_lost=server._lost,
        )

    server._listen(listener, protocol, tls=tls)
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
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[Connection] = loop.create_future()

    def lost(protocol: WireProtocol) -> None:
        if not opened.done():
            opened.set_exception(_opening_error(target, protocol))

    protocol = WireProtocol(
        token=token,
        hello=hello,
        decoder=_decoder(decode),
        client=True,
        max_frame_bytes=max_frame_bytes,
        handshake_s=timeout_s,
        on_open=opened.set_result,
        on_lost=lost,
    )
    layer = protocol if tls is None else EncryptedTransport(protocol, tls.session(client=True, server=server))
    connected = False
    try:
        async with asyncio.timeout(timeout_s):
            transport, _ = await loop.create_connection(lambda: layer, target.host, target.port)
            connected = True
            if (sock := transport.get_extra_info("socket")) is not None:  # uvloop has none after a reset
                _probe(sock, unacknowledged_s=UNACKNOWLEDGED_S)
            return await opened
    except TimeoutError as error:
        raise ConnectionClosed(f"{target} did not answer within {timeout_s:g} s") from error
    except OSError as error:
        raise ConnectionClosed(f"cannot connect to {target}: {error.strerror or error}") from error
    finally:
        if connected and (not opened.done() or opened.cancelled()):
            protocol.abort("the attempt to connect was given up")


async def adopt(
    connection: socket.socket, *, decode: Any, name: str, max_frame_bytes: int = MAX_FRAME_BYTES
) -> Connection:
    """Return the connection over one end of a socket pair whose other end the process `name`, parent or child, has."""
    opened: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    protocol = WireProtocol(
        token=None,
        hello=Hello(name=name, role="family"),
        decoder=_decoder(decode),
        client=False,
        max_frame_bytes=max_frame_bytes,
        on_open=opened.set_result,
    )
    await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection)
    return await opened


def _probe(connection: socket.socket, *, unacknowledged_s: float = 0.0) -> None:
    """Let the system end a connection to a machine that does not answer. Linux has all of the options, macOS some."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": IDLE_S, "TCP_KEEPINTVL": PROBE_S, "TCP_KEEPCNT": PROBES}
    if unacknowledged_s:
        options["TCP_USER_TIMEOUT"] = int(unacknowledged_s * 1e3)
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _refusal(failure: Exception | None) -> str:
    """Return the mistake of whoever started the peer; empty for any other end of a handshake."""
    if isinstance(failure, WrongTag):
        return "its peer has another token; use the file `token` of this run's directory"
    if isinstance(failure, TlsRefused):
        return str(failure)
    if isinstance(failure, UserError):
        return ANOTHER_VERSION
    return ""


def _opening_error(target: Address, protocol: WireProtocol) -> Exception:
    failure = protocol.failure
    if isinstance(failure, UserError):
        return type(failure)(f"{target}: {failure}")
    if isinstance(failure, WrongTag):
        return UserError(f"{target} does not have this run's token: give both sides the same token file")
    return ConnectionClosed(f"{target}: {protocol.reason}")


def _decoder(decode: Any) -> msgspec.msgpack.Decoder[Any]:
    return decode if isinstance(decode, msgspec.msgpack.Decoder) else msgspec.msgpack.Decoder(decode)


def _check_token(token: bytes) -> None:
    if len(token) != TOKEN_BYTES:
        raise ValueError(f"a token has {TOKEN_BYTES} bytes, this one has {len(token)}")

"""The reward server: HTTP, workers, signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, cast

import uvicorn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.reward.service.app import RewardApp
from cosmos_rl_core.reward.service.backend import Backend
from cosmos_rl_core.reward.service.settings import ServerSettings
from cosmos_rl_core.wire.listening import (
    SeldomFilter,
    SeldomLog,
    UnauthenticatedConnections,
    accept_forever,
    is_loopback,
    raise_descriptor_limit,
)

HEAD_S = 10.0
"""Maximum seconds for the head of a connection's first request."""
KEEP_ALIVE_S = 60
MOST_IDLE = 1024
_LEAST_IDLE = 16
_GRACE_S = 5
_SELDOM = SeldomFilter()


class _Cycle(Protocol):
    """A request and its response."""

    response_complete: bool


class _Connection(Protocol):
    """Common interface of uvicorn's two HTTP protocols."""

    cycle: _Cycle | None
    transport: asyncio.Transport


class HttpServer(uvicorn.Server):
    """Serves an ASGI app on open sockets; the caller handles signals.

    Idle connections are closed after `head_s`, or KEEP_ALIVE_S + `head_s` after a request; earlier, oldest first, if
    there are more than `most_idle`.
    """

    def __init__(self, app: Any, *, most_idle: int, log: Callable[[str], None], head_s: float = HEAD_S) -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_SELDOM)
        self._head_s = head_s
        self._complain = SeldomLog(log)
        self._idle = UnauthenticatedConnections(max(_LEAST_IDLE, min(most_idle, MOST_IDLE)), complain=self._complain)
        self._accepting: list[asyncio.Task[None]] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not handle signals."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections here: asyncio's servers, which uvicorn uses, flood the log without free descriptors."""
        self.servers = []
        for sock in sockets or ():
            sock.setblocking(False)
            accepting = accept_forever(sock, self._admit, complain=self._complain)
            self._accepting.append(asyncio.create_task(accepting, name="accept rewards"))
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, then let uvicorn end the connections."""
        for accepting in self._accepting:
            accepting.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Close connections that were idle too long; called by uvicorn ten times per second."""
        self._sweep()
        return await super().on_tick(counter)

    async def _admit(self, connection: socket.socket) -> None:
        self._sweep()
        await self._idle.make_room()
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        protocol = make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection)

    def _sweep(self) -> None:
        """Update the idle connections."""
        here = cast(set[_Connection], self.server_state.connections)
        for gone in self._idle.keys() - here:
            self._idle.leave(gone)
        for connection in list(here):
            asked = connection.cycle is not None
            if connection.cycle is not None and not connection.cycle.response_complete:
                self._idle.leave(connection)
            elif connection not in self._idle:
                self._idle.enter(connection, drop=connection.transport.abort)
            elif self._idle.age(connection) > (KEEP_ALIVE_S + self._head_s if asked else self._head_s):
                self._idle.leave(connection)
                connection.transport.abort()


_DESCRIPTORS_BESIDE = 512
"""Descriptors reserved for connections, workers and libraries; each unfinished body needs another one."""


class RewardServer:
    """A server on the running event loop.

    async with RewardServer(settings, token=token, log=print) as server:      # workers are up, the port is open
        print(server.url)
        await server.stopped()                                                # until `stop`
    """

    def __init__(
        self, settings: ServerSettings, *, token: str, log: Callable[[str], None], python_path: Sequence[str] = ()
    ) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self.backend = Backend(settings, log=log, python_path=python_path)
        app = RewardApp(self.backend, token=token)
        allowed, needed = raise_descriptor_limit(), settings.queue_size + _DESCRIPTORS_BESIDE
        if allowed < needed:
            log(f"queue_size = {settings.queue_size} takes up to {needed} open files; `ulimit -Hn` allows {allowed}")
        self._http = HttpServer(app.asgi, most_idle=(allowed - needed) // 2, log=log)
        self.url = ""
        """http://host:port of the open server."""

    async def __aenter__(self) -> RewardServer:
        async with AsyncExitStack() as stack:
            sock = stack.enter_context(_listen(self._settings.host, self._settings.port))
            await stack.enter_async_context(self.backend)
            host, port = sock.getsockname()[:2]
            self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            self._serving = asyncio.create_task(self._http.serve(sockets=[sock]))
            stack.push_async_callback(self._close)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def stop(self) -> None:
        """Refuse new requests and let `stopped` return; waiting fetches get 503."""
        self.backend.jobs.close()
        self._http.should_exit = True

    async def stopped(self) -> None:
        """Wait until `stop` is called."""
        await asyncio.shield(self._serving)

    async def _close(self) -> None:
        self.stop()
        await self._serving


async def serve(
    settings: ServerSettings, *, token: str, say: Callable[[str], None], python_path: Sequence[str] = ()
) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code: 130 after SIGINT. Raises UserError."""
    received: list[int] = []
    async with RewardServer(settings, token=token, log=say, python_path=python_path) as server:

        def stop(number: int) -> None:
            received.append(number)
            server.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        served = ", ".join(f"{one.called} x{one.workers}" for one in settings.rewards)
        say(f"reward server: {server.url} ({served})")
        if not is_loopback(settings.host):
            say("it can be reached from other machines, without TLS: use a TLS proxy on untrusted networks")
        await server.stopped()
    say("reward server: stopped")
    return 130 if signal.SIGINT in received else 0


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        why = str(error.strerror).partition(" (while ")[0]
        raise UserError(f"cannot listen on {host}:{port}: {why}; choose another host or port") from error
    # asyncio does this only for its own sockets; without it the two parts of a response are 40 ms apart
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock

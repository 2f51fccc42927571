"""An HTTP server whose idle and half-sent requests are bounded in number and time. Needs uvicorn, of an extra.

server = HttpServer(app, most_idle=64, log=print, grace_s=1)
await server.serve(sockets=[listener])              # until server.should_exit
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from cosmos_rl_core.wire.listening import (
    Address,
    SeldomFilter,
    SeldomLog,
    UnauthenticatedConnections,
    accept_forever,
    bound_address,
    listen,
)

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""Maximum seconds for the head of a connection's first request."""
KEEP_ALIVE_S = 60
MOST_IDLE = 1024
_LEAST_IDLE = 16
_SELDOM = SeldomFilter()


class HttpServer(uvicorn.Server):
    """Serves an ASGI app on open sockets.

    Idle connections are closed after `head_s`, or KEEP_ALIVE_S + `head_s` after a request; earlier, oldest first, if
    there are more than `most_idle`.
    """

    def __init__(
        self,
        app: Any,
        *,
        most_idle: int,
        log: Callable[[str], None],
        grace_s: int,
        head_s: float = HEAD_S,
        handles_signals: bool = False,
        ending: Callable[[], None] = lambda: None,
    ) -> None:
        """grace_s: for requests at the end. handles_signals: SIGINT and SIGTERM stop it; else the caller does.

        ending: called at the end, before requests in work have to be done.
        """
        self._ending = ending
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=grace_s,
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_SELDOM)
        self._head_s, self._handles_signals = head_s, handles_signals
        self._complain = SeldomLog(log)
        self._idle = UnauthenticatedConnections(max(_LEAST_IDLE, min(most_idle, MOST_IDLE)), complain=self._complain)
        self._accepting: list[asyncio.Task[None]] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals if the caller does not."""
        with super().capture_signals() if self._handles_signals else contextlib.nullcontext():
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections here: asyncio's servers, which uvicorn uses, flood the log without free descriptors."""
        self.servers = []
        for sock in sockets or ():
            sock.setblocking(False)
            accepting = accept_forever(sock, self._admit, complain=self._complain)
            self._accepting.append(asyncio.create_task(accepting, name="accept HTTP"))
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, then let uvicorn end the connections."""
        self._ending()
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
        # uvicorn's protocol over httptools has the same attributes.
        live = cast("set[H11Protocol]", self.server_state.connections)
        for gone in self._idle.keys() - live:
            self._idle.leave(gone)
        for connection in list(live):
            has_requested = connection.cycle is not None
            if connection.cycle is not None and not connection.cycle.response_complete:
                self._idle.leave(connection)
            elif connection not in self._idle:
                self._idle.enter(connection, drop=connection.transport.abort)
            elif self._idle.age(connection) > (KEEP_ALIVE_S + self._head_s if has_requested else self._head_s):
                self._idle.leave(connection)
                connection.transport.abort()


@contextlib.asynccontextmanager
async def serving(app: Any, address: Address, *, allow_remote: bool, log: Callable[[str], None]) -> AsyncIterator[str]:
    """Serve an ASGI app until the end of the context, and return its URL. Raises as `listening.listen`."""
    with listen(address, allow_remote=allow_remote) as listener:
        # asyncio does this only for its own sockets; without it the two parts of a response are 40 ms apart
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = HttpServer(app, most_idle=MOST_IDLE, log=log, grace_s=1)
        work = asyncio.create_task(server.serve(sockets=[listener]), name="serve HTTP")
        try:
            yield str(bound_address(listener, requested=address)).replace("tcp://", "http://")
        finally:
            server.should_exit = True
            await work

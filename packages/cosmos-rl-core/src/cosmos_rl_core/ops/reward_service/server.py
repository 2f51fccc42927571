"""The reward server: HTTP, workers, signals."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.ops.reward_service.app import RewardApp
from cosmos_rl_core.ops.reward_service.backend import Backend
from cosmos_rl_core.ops.reward_service.settings import ServerSettings
from cosmos_rl_core.wire.http_server import HttpServer
from cosmos_rl_core.wire.listening import is_loopback, raise_descriptor_limit

_GRACE_S = 5
_DESCRIPTORS_BESIDE = 512
"""Descriptors reserved for connections, workers and libraries; each unfinished body needs another one."""


class RewardServer:
    """A server whose workers are up and whose port is open.

    async with open_server(settings, token=token, log=print) as server:
        print(server.url)
        await server.stopped()                                                # until `stop`
    """

    def __init__(self, app: RewardApp, http: HttpServer, listener: socket.socket) -> None:
        self._app, self._http = app, http
        self._serving = asyncio.create_task(http.serve(sockets=[listener]))
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def stop(self) -> None:
        """Refuse new requests and half-sent bodies, and let `stopped` return; waiting fetches get 503."""
        self._app.close()
        self._http.should_exit = True

    async def stopped(self) -> None:
        """Wait until `stop` is called."""
        await asyncio.shield(self._serving)


@asynccontextmanager
async def open_server(
    settings: ServerSettings, *, token: str, log: Callable[[str], None], python_path: Sequence[str] = ()
) -> AsyncIterator[RewardServer]:
    """Start the workers and open the port; both end with the context. Raises UserError."""
    allowed, needed = raise_descriptor_limit(), settings.queue_size + _DESCRIPTORS_BESIDE
    if allowed < needed:
        log(f"queue_size = {settings.queue_size} takes up to {needed} open files; `ulimit -Hn` allows {allowed}")
    with _listen(settings.host, settings.port) as listener:
        async with Backend(settings, log=log, python_path=python_path) as backend:
            app = RewardApp(backend, token=token)
            http = HttpServer(app.asgi, most_idle=(allowed - needed) // 2, grace_s=_GRACE_S, log=log)
            server = RewardServer(app, http, listener)
            try:
                yield server
            finally:
                server.stop()
                await server.stopped()


async def serve(
    settings: ServerSettings, *, token: str, say: Callable[[str], None], python_path: Sequence[str] = ()
) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code: 130 after SIGINT. Raises UserError."""
    received: list[int] = []
    async with open_server(settings, token=token, log=say, python_path=python_path) as server:

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

"""Serves the page: chooses port and token, and runs the server until Ctrl-C."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from starlette.types import ASGIApp

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.ops.dashboard.app import Runs, build_app
from cosmos_rl_core.ops.dashboard.guard import LOOPBACK, Guard
from cosmos_rl_core.wire.http_server import HttpServer

PORT = 7861
CLOSE_S = 1
"""Seconds for open connections at the end."""
MOST_IDLE = 64
"""Connections without a whole request at a time; a browser keeps up to six."""


def serve(
    paths: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    token_file: Path | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serve the runs in these directories until Ctrl-C.

    host: another one than loopback needs a token_file. port: None: PORT, or a free one if it is taken; 0: a free one.
    say: receives the address with the token.

    Raises UserError for a missing directory, a port that is taken, and a host without a token file.
    """
    token = _token(host, token_file)
    runs = Runs(paths)
    listener = listen(host, port)
    bound = listener.getsockname()[1]
    everywhere = host in ("0.0.0.0", "::")
    shown = socket.gethostname() if everywhere else f"[{host}]" if ":" in host else host
    number = len(runs.all())
    runs_text = "1 run" if number == 1 else f"{number} runs"
    say(f"dashboard of {runs_text}: http://{shown}:{bound}/?token={token}")
    say("Ctrl-C ends the dashboard; the runs are not affected.")
    hosts = LOOPBACK if _is_loopback(host) else LOOPBACK | {shown, socket.gethostname(), socket.getfqdn()}
    threading.Thread(target=runs.read_ahead, daemon=True).start()
    over = asyncio.Event()
    app = Guard(build_app(runs, over=over), token=token, hosts=hosts, any_address=everywhere, port=bound)
    with listener, suppress(KeyboardInterrupt):
        http_server(app, log=say, over=over).run(sockets=[listener])


def http_server(app: ASGIApp, *, log: Callable[[str], None], over: asyncio.Event) -> HttpServer:
    """Return the server of the page. log: receives at most a line a minute about connections that are closed.

    over: set at the end, for the application.
    """
    return HttpServer(app, most_idle=MOST_IDLE, log=log, grace_s=CLOSE_S, handles_signals=True, ending=over.set)


def listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket. Raises UserError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for number in (PORT, 0) if port is None else (port,):
        try:
            listener.bind((host, number))
            listener.listen(128)
            return listener
        except OSError as error:
            failed = error
    listener.close()
    where = host if port is None else f"{host}:{port}"
    raise UserError(f"the dashboard cannot listen on {where}: {failed.strerror}; choose another --port or --host")


def _token(host: str, token_file: Path | None) -> str:
    if token_file is None:
        if not _is_loopback(host):
            raise UserError(
                f"--host {host} can be reached from other machines: give a secret by --token-file FILE, or keep "
                "127.0.0.1 and use an ssh tunnel"
            )
        return secrets.token_urlsafe(24)
    try:
        token = token_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"{token_file}: {error.strerror}") from error
    if len(token) < 16 or not token.isascii() or not token.replace("-", "").replace("_", "").isalnum():
        raise UserError(f"{token_file}: must hold at least 16 letters and digits")
    return token


def _is_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "localhost", "::1")

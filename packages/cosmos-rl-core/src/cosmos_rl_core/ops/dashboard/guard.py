"""Access to the page: a token, the machine's own host names, and headers that admit no foreign script.

The address that the command prints has the token; the first request exchanges it for a cookie. A page of another site
can neither read the cookie (SameSite) nor reach the server under a name of its own (Host).
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(:[0-9]+)?")
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Guard:
    """Wraps an application. Refuses requests without the token (401) and under another host name (403)."""

    def __init__(
        self, app: ASGIApp, *, token: str, hosts: frozenset[str] = LOOPBACK, any_address: bool = False, port: int
    ) -> None:
        """Wrap `app`.

        Args:
            any_address: serve every IP address too, of which this machine may have several. A page of another site
                reaches the server by a name alone.
            port: part of the cookie's name, as cookies of a host are shared by its ports.
        """
        self._app = app
        self._token = token.encode()
        self._hosts, self._any_address = hosts, any_address
        self._cookie = f"cosmos_rl_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        refused = self._refusal(scope)
        if refused is not None:
            await refused(scope, receive, _with_headers(send))
        else:
            await self._app(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("read only", 405)
        name = host_name(headers.get("host", ""))
        if name not in self._hosts and not (self._any_address and _is_address(name)):
            return PlainTextResponse("this host name is not served", 403)
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and self._is_token(token):
            cookie = f"{self._cookie}={self._token.decode()}; HttpOnly; SameSite=Strict; Path=/"
            return Response(status_code=303, headers={"Location": "/", "Set-Cookie": cookie})
        if not self._is_token(_cookie(headers.get("cookie", ""), self._cookie)):
            return PlainTextResponse("open the address that the command has printed, with its token", 401)
        return None

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self._token)


def host_name(host: str) -> str:
    """Return the name in a Host header, without the port: "127.0.0.1", "[::1]"; empty for any other text."""
    parts = HOST.fullmatch(host)
    return "" if parts is None else parts["name"].lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _cookie(header: str, name: str) -> str:
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *HEADERS]
        await send(message)

    return sending

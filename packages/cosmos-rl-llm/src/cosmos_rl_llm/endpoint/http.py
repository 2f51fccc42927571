"""Bodies, keys and errors of HTTP requests, as both endpoints read and write them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cosmos_rl_core.episodes.agent_rollout import RequestRefused

T = TypeVar("T")
LONGEST_BODY = 64 * 2**20
_GONE = 499
"""The status of a request whose client has gone, which nobody reads."""


def guarded(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Answer what an endpoint refuses in OpenAI's form; other errors end the rollout, and are raised there too."""

    async def answered(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RequestRefused as refused:
            headers = {"retry-after": "1"} if refused.status == 503 else {}
            return _error(refused.status, refused.code, str(refused), headers)
        except ClientDisconnect:
            return Response(status_code=_GONE)
        except Exception as error:  # the engine's, which the rollout raises to the run
            return _error(500, "engine_failed", f"{type(error).__name__}: {error}")

    return answered


async def unknown_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, "unknown_route", f"{request.method} {request.url.path}: {error.detail}")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await work, and cancel it when the client goes. Raises ClientDisconnect then."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, gone):
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def body_of(request: Request) -> bytes:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > LONGEST_BODY:
            raise RequestRefused(413, "body_too_large", f"the body has more than {LONGEST_BODY} bytes")
    return body


def bearer_key(request: Request) -> str:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def as_json(content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json", headers=headers)


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    kind = {401: "authentication_error", 403: "permission_error", 500: "server_error", 503: "server_error"}
    error = {"message": message, "type": kind.get(status, "invalid_request_error"), "param": None, "code": code}
    return as_json({"error": error}, status=status, headers=headers)

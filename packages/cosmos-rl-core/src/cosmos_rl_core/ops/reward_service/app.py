"""The routes of a reward server.

    POST /api/reward/enqueue   a body (`reward.request`)            -> 200 {uuid, id}
    POST /api/reward/fetch     {"uuid": ..., "wait_s": 10}          -> 202 pending | 200 done or failed | 404
    POST /api/reward/pull      uuid=...&type=... as a form          -> 200 scores | 400 not ready | 404 | 500 failed
    POST /api/reward/ping      anything                             -> 200
    GET  /metrics, GET /health

Refused: 401 wrong token, 408 too slow, 409 a request id with another body, 411 no length, 413 too large,
422 malformed, 429 full, 503 stopping. `pull` and `ping` are for clients of NVIDIA's cosmos-rl.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated
from urllib.parse import parse_qs

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from cosmos_rl_core.ops.reward_service.backend import Backend, Unserved
from cosmos_rl_core.ops.reward_service.jobs import QueueFull, RequestConflict, RewardJob
from cosmos_rl_core.reward.pool.body import BodySpool
from cosmos_rl_core.reward.request import Enqueued, Fetched, read_request
from cosmos_rl_core.reward.wire_format import MalformedBody

_SMALL_BYTES = 64 * 2**10
RETRY_AFTER_S = 1

Endpoint = Callable[[Request], Awaitable[Response]]


class _Fetch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    uuid: str
    wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class _Refusal(Exception):
    """A request was refused with a status and a message."""

    def __init__(self, status: int, error: str, **headers: str) -> None:
        super().__init__(error)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


_decode_fetch = msgspec.json.Decoder(_Fetch).decode


class RewardApp:
    """The HTTP side of a server.

    app = RewardApp(backend, token="...")
    uvicorn.Config(app.asgi, ...)
    """

    def __init__(self, backend: Backend, *, token: str) -> None:
        self._backend = backend
        self._settings = backend.settings
        self._expected = f"Bearer {token}".encode()
        self._uploads: set[asyncio.Timeout] = set()
        post = {
            "/api/reward/enqueue": self._enqueue,
            "/api/reward/fetch": self._fetch,
            "/api/reward/pull": self._pull,
            "/api/reward/ping": self._ping,
        }
        routes = [Route(path, self._guarded(endpoint), methods=["POST"]) for path, endpoint in post.items()]
        routes.append(Route("/metrics", self._guarded(self._metrics), methods=["GET"]))
        routes.append(Route("/health", self._health, methods=["GET"]))
        self.asgi = Starlette(routes=routes)

    def close(self) -> None:
        """Refuse new requests and those whose body has not arrived; waiting fetches get 503."""
        self._backend.jobs.close()
        for limit in self._uploads:
            limit.reschedule(0.0)

    @contextlib.asynccontextmanager
    async def _upload(self) -> AsyncIterator[None]:
        """Limit the time in which a body arrives. Raises _Refusal."""
        try:
            async with asyncio.timeout(self._settings.upload_timeout_s) as limit:
                self._uploads.add(limit)
                try:
                    yield
                finally:
                    self._uploads.discard(limit)
        except TimeoutError as error:
            self._refuse_when_closed()
            raise _Refusal(408, f"the body took longer than {self._settings.upload_timeout_s:g} s") from error

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        """Require the token, and turn refusals into responses.

        uvicorn reads and discards the body of a refused request, so that the client receives the response.
        """

        @functools.wraps(endpoint)
        async def guarded(request: Request) -> Response:
            try:
                header = request.headers.get("authorization", "").encode("latin-1", errors="replace")
                if not hmac.compare_digest(header, self._expected):
                    raise _Refusal(401, "the token is missing or wrong: Authorization: Bearer TOKEN")
                self._refuse_when_closed()
                response = await endpoint(request)
            except _Refusal as refusal:
                response = _json({"error": str(refusal)}, refusal.status)
                response.headers.update(refusal.headers)
            except ClientDisconnect:
                response = Response(status_code=499)  # not sent: the client is gone
            self._backend.metrics.answers.labels(response.status_code).inc()
            return response

        return guarded

    async def _enqueue(self, request: Request) -> Response:
        num_bytes = _length(request)
        if num_bytes > self._settings.max_body_bytes:
            limit = self._settings.max_body_bytes
            raise _Refusal(413, f"the body has {num_bytes} bytes; max_body_bytes = {limit} of the server")
        try:
            with self._backend.jobs.reserve(num_bytes):
                job = await self._read(request)
        except QueueFull as full:
            raise _Refusal(429, str(full), retry_after=str(RETRY_AFTER_S)) from full
        return _json(Enqueued(uuid=job.uuid, id=job.header.id))

    async def _read(self, request: Request) -> RewardJob:
        """Read a body and queue it."""
        spool = BodySpool()
        try:
            async with self._upload():
                async for chunk in request.stream():
                    spool.write(chunk)
            if not spool.num_bytes:
                raise _Refusal(422, 'the body is empty; it must start with one line of JSON, ended by "\\n"')
            with spool.map() as buffer:
                header = read_request(buffer).header
            return self._backend.add(header, spool)
        except BaseException as error:
            spool.close()
            match error:
                case MalformedBody() | Unserved():
                    raise _Refusal(422, str(error)) from error
                case RequestConflict():
                    raise _Refusal(409, str(error)) from error
            raise

    async def _fetch(self, request: Request) -> Response:
        try:
            fetch = _decode_fetch(await self._small(request))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _Refusal(422, f'fetch takes {{"uuid": ..., "wait_s": ...}}: {error}') from error
        job = self._find(fetch.uuid)
        wait_s = min(fetch.wait_s, self._settings.max_wait_s)
        if wait_s and not job.done.is_set():
            await _wait(job.done, wait_s)
            self._refuse_when_closed()
        if not job.done.is_set():
            return _json(Fetched(status="pending", uuid=job.uuid, id=job.header.id), 202)
        self._backend.jobs.fetched(job)
        if job.error:
            return _json(Fetched(status="failed", uuid=job.uuid, id=job.header.id, error=job.error))
        done = Fetched(status="done", uuid=job.uuid, id=job.header.id, scores=job.scores, total=job.total)
        return _json(done)

    async def _pull(self, request: Request) -> Response:
        form = parse_qs((await self._small(request)).decode("utf-8", errors="replace"))
        if "uuid" not in form:
            raise _Refusal(422, "pull takes a form with the fields uuid and type; the route for JSON is fetch")
        job = self._find(form["uuid"][0])
        if not job.done.is_set():
            return _json({"message": f"not ready: {job.uuid}"}, 400)
        self._backend.jobs.fetched(job)
        if job.error:
            return _json({"message": job.error}, 500)
        kind = form.get("type", [job.header.rewards[0].name])[0]
        scores = {name: values for name, values in job.scores.items() if name.partition(".")[0] == kind}
        if not scores:
            raise _Refusal(422, f"type: {kind!r} was not asked for; scored: {', '.join(job.scores)}")
        return _json({"scores": {name.removeprefix(f"{kind}."): v for name, v in scores.items()}, "type": kind})

    async def _ping(self, request: Request) -> Response:
        return _json({"message": "pong", "rewards": list(self._backend.pools)})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self._backend.metrics.page(), media_type="text/plain; version=0.0.4")

    async def _health(self, request: Request) -> Response:
        down = self._backend.down()
        return _json({"status": "degraded" if down else "ok", "down": down}, 503 if down else 200)

    async def _small(self, request: Request) -> bytes:
        if _length(request) > _SMALL_BYTES:
            raise _Refusal(413, f"the body has more than {_SMALL_BYTES} bytes")
        async with self._upload():
            return await request.body()

    def _refuse_when_closed(self) -> None:
        if self._backend.jobs.closed:
            raise _Refusal(503, "the server is stopping", retry_after=str(RETRY_AFTER_S))

    def _find(self, uuid: str) -> RewardJob:
        job = self._backend.jobs.find(uuid)
        if job is None:
            raise _Refusal(404, "no request has this uuid, or its result has expired; enqueue it again")
        return job


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


def _length(request: Request) -> int:
    text = request.headers.get("content-length", "")
    if not text.isdecimal():
        raise _Refusal(411, "the request must say its Content-Length")
    return int(text)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return

"""The routes of a rollout replica's endpoint.

    POST /v1/chat/completions      key of a rollout      an answer of the policy, whole or as events
    POST /v1/responses             key of a rollout      likewise
    GET  /v1/models                key or token
    POST /rollouts                 token                 {"wait_s": 30} -> 200 a row, with a key | 503 none waits
    POST /rollouts/ID/done         key or token          {"reward": 1.0} or {"error": "..."}

A key names its rollout. With the token, X-Rollout names it. Errors have OpenAI's form.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Annotated, Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from cosmos_rl_core.episodes.agent_process import done_url
from cosmos_rl_core.episodes.agent_rollout import AgentAnswer, AgentCall, AgentRollout, RequestRefused, said
from cosmos_rl_core.episodes.agents import AgentGenerator
from cosmos_rl_llm.endpoint import answers, messages
from cosmos_rl_llm.endpoint.messages import ChatRequest, Common, ResponseRequest, bad, read

T = TypeVar("T")
LONGEST_BODY = 64 * 2**20
_GONE = 499
"""The status of a request whose client has gone, which nobody reads."""


class _Take(msgspec.Struct, forbid_unknown_fields=True):
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=300)] = 30.0


class _Done(msgspec.Struct, forbid_unknown_fields=True):
    reward: float | None = None
    error: str = ""


class AgentApp:
    """The endpoint over the rollouts of agents.

    app = AgentApp(agents, decode=chat.decode_prompt, model="Qwen3-4B", token=endpoint_token(run_token))
    uvicorn.Config(app.asgi, ...)
    """

    def __init__(
        self,
        agents: AgentGenerator,
        *,
        decode: answers.Decode,
        model: str,
        token: str,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        """decode: text of tokens, special ones included. log: receives each name of a parameter that is not used."""
        self._agents, self._decode, self._model, self._token = agents, decode, model, token
        self._log = log
        self._ignored: set[str] = set()
        self._responses: WeakKeyDictionary[AgentRollout, dict[str, messages.Chat]] = WeakKeyDictionary()
        """By rollout: the chat up to each of its responses."""
        post = {
            "/v1/chat/completions": self._complete,
            "/v1/responses": self._respond,
            "/rollouts": self._take,
            "/rollouts/{id}/done": self._done,
        }
        routes = [Route(path, _guarded(endpoint), methods=["POST"]) for path, endpoint in post.items()]
        routes.append(Route("/v1/models", _guarded(self._models), methods=["GET"]))
        self.asgi = Starlette(routes=routes, exception_handlers={HTTPException: _unknown_route})

    async def _complete(self, request: Request) -> Response:
        rollout = self._rollout_of(request)
        asked, fields = read(await _body(request), ChatRequest)
        messages.stops(asked, rollout.sampling)
        most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        answer = await self._answer(request, rollout, asked, messages.chat_of(asked.messages), most)
        completion = answers.completion(answer, logprobs=bool(asked.logprobs), **self._format(asked, fields))
        with_usage = bool((asked.stream_options or {}).get("include_usage"))
        events = answers.completion_chunks(completion, with_usage=with_usage) if asked.stream else None
        return self._answered(completion, events, self._note_ignored(asked, fields, rollout))

    async def _respond(self, request: Request) -> Response:
        rollout = self._rollout_of(request)
        asked, fields = read(await _body(request), ResponseRequest)
        earlier = self._responses.setdefault(rollout, {})
        previous = asked.previous_response_id
        if previous is not None and previous not in earlier:
            raise bad(f"previous_response_id = {previous!r} is no response of this rollout", "unknown_response")
        chat = messages.chat_of_items(asked, earlier[previous] if previous else ())
        answer = await self._answer(request, rollout, asked, chat, asked.max_output_tokens)
        logprobs = "message.output_text.logprobs" in (asked.include or ())
        response = answers.response(answer, logprobs=logprobs, **self._format(asked, fields))
        kept = chat[1:] if asked.instructions else chat
        earlier[response["id"]] = [*kept, said(answer.turn)]
        events = answers.response_events(response) if asked.stream else None
        return self._answered(response, events, self._note_ignored(asked, fields, rollout))

    async def _take(self, request: Request) -> Response:
        self._check_token(request)
        body = await _body(request)
        asked = read(body, _Take)[0] if body else _Take()
        rollout = await _unless_gone(request, self._agents.take(wait_s=asked.wait_s))
        if rollout is None:
            raise RequestRefused(503, "no_row", f"no row waits for an agent after {asked.wait_s:g} s; ask again")
        base_url = self._agents.base_url
        return _json(
            {
                "id": rollout.id,
                "api_key": rollout.key,
                "base_url": base_url,
                "done_url": done_url(base_url, rollout),
                "row": rollout.prompt.row,
            }
        )

    async def _done(self, request: Request) -> Response:
        rollout = self._rollout_of(request, id=request.path_params["id"])
        asked, _ = read(await _body(request), _Done)
        if asked.reward is None and not asked.error and self._agents.needs_reward:
            raise bad(
                'the recipe names no [[reward.functions]], so that a reward is needed: {"reward": 1.0}', "no_reward"
            )
        rollout.end(asked.reward, problem=asked.error and f"the agent gave up: {asked.error}")
        return _json({"id": rollout.id, "status": "dropped" if asked.error else "done"})

    async def _models(self, request: Request) -> Response:
        key = _bearer(request)
        if not self._is_token(key):
            self._agents.find(key)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "cosmos-rl"}
        return _json({"object": "list", "data": [model]})

    def _rollout_of(self, request: Request, *, id: str = "") -> AgentRollout:
        """Return the rollout that a request is of. Raises RequestRefused."""
        key, named = _bearer(request), request.headers.get("x-rollout", "")
        if self._is_token(key):
            if not (id or named):
                raise bad("a request with the token needs the header X-Rollout with a rollout's id", "no_rollout")
            return self._agents.find("", id=id or named)
        rollout = self._agents.find(key)
        if (other := id or named) not in ("", rollout.id):
            raise RequestRefused(403, "other_rollout", f"the API key is that of rollout {rollout.id}, not of {other}")
        return rollout

    def _check_token(self, request: Request) -> None:
        if not self._is_token(_bearer(request)):
            raise RequestRefused(401, "invalid_token", "send agent_token of the run's directory as bearer token")

    def _is_token(self, key: str) -> bool:
        return hmac.compare_digest(key.encode(), self._token.encode())

    async def _answer(
        self, request: Request, rollout: AgentRollout, asked: Common, chat: messages.Chat, most: int | None
    ) -> AgentAnswer:
        if most is not None and most < 1:
            raise bad(f"max_tokens = {most}; ask for at least one")
        headers = request.headers
        call = AgentCall(
            messages=chat,
            tools=messages.tools_of(asked),
            max_terms=most,
            request_id=headers.get("idempotency-key") or headers.get("x-request-id") or "",
            is_retry=headers.get("x-stainless-retry-count", "0") not in ("", "0"),
        )
        return await _unless_gone(request, rollout.answer(call))

    def _format(self, asked: Common, fields: Mapping[str, Any]) -> dict[str, Any]:
        model, with_prompt = str(fields.get("model") or self._model), asked.return_token_ids is not False
        return {"model": model, "decode": self._decode, "with_prompt": with_prompt}

    def _note_ignored(self, asked: Common, fields: Mapping[str, Any], rollout: AgentRollout) -> dict[str, str]:
        """Return the header that names what was not used, and log each name once."""
        names = messages.ignored(asked, fields, rollout.sampling)
        for name in sorted(set(names) - self._ignored):
            self._ignored.add(name)
            self._log(f"agents set {name}, which is not used: [rollout.sampling] of the recipe decides")
        return {"x-ignored-parameters": ", ".join(names)} if names else {}

    def _answered(self, whole: dict[str, Any], events: Iterator[bytes] | None, headers: dict[str, str]) -> Response:
        if events is None:
            return _json(whole, headers=headers)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)


def _guarded(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """AgentAnswer what an endpoint refuses in OpenAI's form; other errors end the rollout, and are raised there too."""

    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RequestRefused as refused:
            headers = {"retry-after": "1"} if refused.status == 503 else {}
            return _error(refused.status, refused.code, str(refused), headers)
        except ClientDisconnect:
            return Response(status_code=_GONE)
        except Exception as error:  # the engine's, which the rollout raises to the run
            return _error(500, "engine_failed", f"{type(error).__name__}: {error}")

    return guarded


async def _unknown_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, "unknown_route", f"{request.method} {request.url.path}: {error.detail}")


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
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


async def _body(request: Request) -> bytes:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > LONGEST_BODY:
            raise RequestRefused(413, "body_too_large", f"the body has more than {LONGEST_BODY} bytes")
    return body


def _bearer(request: Request) -> str:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _json(content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json", headers=headers)


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    kind = {401: "authentication_error", 403: "permission_error", 500: "server_error", 503: "server_error"}
    error = {"message": message, "type": kind.get(status, "invalid_request_error"), "param": None, "code": code}
    return _json({"error": error}, status=status, headers=headers)

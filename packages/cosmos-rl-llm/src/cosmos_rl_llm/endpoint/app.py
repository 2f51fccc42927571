"""The routes of a rollout replica's endpoint.

    POST /v1/chat/completions      key of a rollout      an answer of the policy, whole or as events
    POST /v1/responses             key of a rollout      likewise
    GET  /v1/models                key or token
    POST /rollouts                 token                 {"wait_s": 30} -> 200 a row, with a key | 503 none waits
    POST /rollouts/ID/done         key or token          {"reward": 1.0} or {"error": "..."}

A key names its rollout. With the token, X-Rollout names it. Errors have OpenAI's form.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from cosmos_rl_core.episodes.agent_process import done_url
from cosmos_rl_core.episodes.agent_rollout import AgentAnswer, AgentCall, AgentRollout, RequestRefused, said
from cosmos_rl_core.episodes.agents import AgentGenerator
from cosmos_rl_llm.endpoint import answers, messages
from cosmos_rl_llm.endpoint.http import as_json, bearer_key, body_of, guarded, unknown_route, unless_gone
from cosmos_rl_llm.endpoint.messages import ChatRequest, Common, ResponseRequest, bad, read


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
        routes = [Route(path, guarded(endpoint), methods=["POST"]) for path, endpoint in post.items()]
        routes.append(Route("/v1/models", guarded(self._models), methods=["GET"]))
        self.asgi = Starlette(routes=routes, exception_handlers={HTTPException: unknown_route})

    async def _complete(self, request: Request) -> Response:
        rollout = self._rollout_of(request)
        asked, fields = read(await body_of(request), ChatRequest)
        messages.stops(asked, rollout.sampling)
        most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        answer = await self._answer(request, rollout, asked, messages.chat_of(asked.messages), most)
        completion = answers.completion(answer, logprobs=bool(asked.logprobs), **self._format(asked, fields))
        with_usage = bool((asked.stream_options or {}).get("include_usage"))
        events = answers.completion_chunks(completion, with_usage=with_usage) if asked.stream else None
        return self._answered(completion, events, self._note_ignored(asked, fields, rollout))

    async def _respond(self, request: Request) -> Response:
        rollout = self._rollout_of(request)
        asked, fields = read(await body_of(request), ResponseRequest)
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
        body = await body_of(request)
        asked = read(body, _Take)[0] if body else _Take()
        rollout = await unless_gone(request, self._agents.take(wait_s=asked.wait_s))
        if rollout is None:
            raise RequestRefused(503, "no_row", f"no row waits for an agent after {asked.wait_s:g} s; ask again")
        base_url = self._agents.base_url
        return as_json(
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
        asked, _ = read(await body_of(request), _Done)
        if asked.reward is None and not asked.error and self._agents.needs_reward:
            raise bad(
                'the recipe names no [[reward.functions]], so that a reward is needed: {"reward": 1.0}', "no_reward"
            )
        rollout.end(asked.reward, problem=asked.error and f"the agent gave up: {asked.error}")
        return as_json({"id": rollout.id, "status": "dropped" if asked.error else "done"})

    async def _models(self, request: Request) -> Response:
        key = bearer_key(request)
        if not self._is_token(key):
            self._agents.find(key)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "cosmos-rl"}
        return as_json({"object": "list", "data": [model]})

    def _rollout_of(self, request: Request, *, id: str = "") -> AgentRollout:
        """Return the rollout that a request is of. Raises RequestRefused."""
        key, named = bearer_key(request), request.headers.get("x-rollout", "")
        if self._is_token(key):
            if not (id or named):
                raise bad("a request with the token needs the header X-Rollout with a rollout's id", "no_rollout")
            return self._agents.find("", id=id or named)
        rollout = self._agents.find(key)
        if (other := id or named) not in ("", rollout.id):
            raise RequestRefused(403, "other_rollout", f"the API key is that of rollout {rollout.id}, not of {other}")
        return rollout

    def _check_token(self, request: Request) -> None:
        if not self._is_token(bearer_key(request)):
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
        return await unless_gone(request, rollout.answer(call))

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
            return as_json(whole, headers=headers)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

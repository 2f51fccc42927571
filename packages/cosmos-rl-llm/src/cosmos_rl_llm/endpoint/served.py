"""The routes of `cosmos-rl serve`: OpenAI's interfaces over an engine, without a run.

    POST /v1/chat/completions      messages
    POST /v1/completions           a text, tokens, or a list of either
    GET  /v1/models

Each choice is a session of one turn, sampled as its client asks; the engine batches those of all requests.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from cosmos_rl_core.episodes.agent_rollout import AgentAnswer, RequestRefused
from cosmos_rl_core.episodes.interfaces import HoldsSessions, Message, Opening
from cosmos_rl_core.errors import PromptError
from cosmos_rl_core.types import Sampling, Turn
from cosmos_rl_llm.data.continuation import ChatContinuation
from cosmos_rl_llm.endpoint import answers, messages
from cosmos_rl_llm.endpoint.http import as_json, bearer_key, body_of, guarded, unknown_route, unless_gone
from cosmos_rl_llm.endpoint.messages import ServedChat, ServedRequest, ServedText, bad, read

_NOTHING = np.zeros(0, np.int32)
_MOST_CHOICES = 1024
"""Of one request."""


class ServedModel:
    """The endpoint of a model that is not trained.

    served = ServedModel(engine, continuation, model="Qwen3-4B", sampling=Sampling(max_terms=512), token="")
    uvicorn.Config(served.asgi, ...)
    """

    def __init__(
        self, engine: HoldsSessions, continuation: ChatContinuation, *, model: str, sampling: Sampling, token: str
    ) -> None:
        """sampling: for what a client leaves open. token: of requests; empty: none is needed."""
        self._engine, self._continuation = engine, continuation
        self._model, self._sampling, self._token = model, sampling, token
        routes = [
            Route("/v1/chat/completions", guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", guarded(self._text), methods=["POST"]),
            Route("/v1/models", guarded(self._models), methods=["GET"]),
        ]
        self.asgi = Starlette(routes=routes, exception_handlers={HTTPException: unknown_route})

    async def _chat(self, request: Request) -> Response:
        self._check_token(request)
        asked, fields = read(await body_of(request), ServedChat)
        if asked.top_logprobs:
            raise bad(f"top_logprobs = {asked.top_logprobs}: only the tokens that were sampled have log-probabilities")
        tools = messages.tools_of(asked)
        opening = self._opened(messages.chat_of(asked.messages), tools)
        most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        turns = await self._sampled(request, asked, [opening], self._sampling.max_terms if most is None else most)
        parsed = [self._parsed(turn, tools, messages.stops_of(asked)) for turn in turns]
        decode = self._continuation.decode if asked.logprobs else None
        choices = [answers.chat_choice(turn, index, decode) for index, turn in enumerate(parsed)]
        whole = self._completed("chat.completion", fields, [opening], turns, choices)
        events = answers.completion_chunks(whole, with_usage=asked.with_usage) if asked.stream else None
        return _answered(whole, events, asked, fields)

    async def _text(self, request: Request) -> Response:
        self._check_token(request)
        asked, fields = read(await body_of(request), ServedText)
        if asked.echo or (asked.logprobs or 0) > 1:
            raise bad(
                "echo, and logprobs above 1: only the tokens that were sampled have log-probabilities, those of the "
                "prompt and of alternatives are not computed",
                "unsupported_logprobs",
            )
        openings = [self._of_text(prompt) for prompt in asked.prompts]
        turns = await self._sampled(request, asked, openings, 16 if asked.max_tokens is None else asked.max_tokens)
        stops = messages.stops_of(asked)
        texts = [replace(turn, text=_cut(self._continuation.text(turn.terms), stops)) for turn in turns]
        decode = self._continuation.decode if asked.logprobs is not None else None
        choices = [answers.text_choice(turn, index, decode) for index, turn in enumerate(texts)]
        whole = self._completed("text_completion", fields, openings, turns, choices)
        events = answers.text_chunks(whole, with_usage=asked.with_usage) if asked.stream else None
        return _answered(whole, events, asked, fields)

    async def _models(self, request: Request) -> Response:
        self._check_token(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "cosmos-rl"}
        return as_json({"object": "list", "data": [model]})

    def _check_token(self, request: Request) -> None:
        if self._token and not hmac.compare_digest(bearer_key(request).encode(), self._token.encode()):
            raise RequestRefused(401, "invalid_api_key", "send the token of this server as bearer token")

    def _opened(self, chat: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Opening:
        try:
            return self._continuation.open(chat, tools=tools, where="messages")
        except PromptError as error:
            raise bad(error.reason, "invalid_messages") from error

    def _of_text(self, prompt: str | Sequence[int]) -> Opening:
        try:
            return self._continuation.open_text(prompt)
        except PromptError as error:
            raise bad(error.reason, "invalid_prompt") from error

    async def _sampled(
        self, request: Request, asked: ServedRequest, openings: Sequence[Opening], most: int
    ) -> Sequence[Turn]:
        """Return `n` turns after each opening. Raises RequestRefused, and what the engine raises."""
        sampling = replace(messages.sampling_of(asked, self._sampling), max_terms=most)
        count = 1 if asked.n is None else asked.n
        if most < 1 or not 0 < count * len(openings) <= _MOST_CHOICES:
            raise bad(f"max_tokens = {most}, n = {count}: ask for one token or more, and 1 to {_MOST_CHOICES} choices")
        seed = secrets.randbits(62) if asked.seed is None else asked.seed % 2**62
        choices = [opening for opening in openings for _ in range(count)]
        seeds = np.random.SeedSequence(seed).generate_state(len(choices), np.uint64) >> 1
        work = [self._turn(each, sampling, int(own)) for each, own in zip(choices, seeds, strict=True)]
        return await unless_gone(request, _all_of(work))

    async def _turn(self, opening: Opening, sampling: Sampling, seed: int) -> Turn:
        session = self._engine.open(opening)
        try:
            room = sampling.max_terms if session.limit is None else session.limit - len(opening.terms)
            if room < 1:
                raise bad(
                    f"the prompt has {len(opening.terms)} tokens, and the model reads at most {session.limit}; "
                    "shorten it",
                    "context_length_exceeded",
                )
            return await session.extend(
                _NOTHING, sampling=replace(sampling, max_terms=min(room, sampling.max_terms)), seed=seed
            )
        except PromptError as error:
            raise bad(error.reason, "context_length_exceeded") from error
        finally:
            session.close()

    def _parsed(self, turn: Turn, tools: Sequence[Mapping[str, Any]], stops: Sequence[str]) -> Turn:
        """Return a turn with its words up to the first of `stops`, and calls with ids."""
        parsed = self._continuation.parse(turn, tools=tools)
        calls = tuple(replace(call, id=call.id or secrets.token_hex(5)[:9]) for call in parsed.calls)
        return replace(parsed, text=_cut(parsed.text, stops), calls=calls)

    def _completed(
        self,
        kind: str,
        fields: Mapping[str, Any],
        openings: Sequence[Opening],
        turns: Sequence[Turn],
        choices: Sequence[answers.Event],
    ) -> dict[str, Any]:
        each = [AgentAnswer(turn=turn, prompt=_NOTHING) for turn in turns]
        length = sum(len(opening.terms) for opening in openings)
        model = str(fields.get("model") or self._model)
        return answers.completed(kind, each, choices, model=model, num_prompt_tokens=length)


def _cut(text: str, stops: Sequence[str]) -> str:
    """Return the part of a text before the first stop string in it."""
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


async def _all_of(work: Sequence[Any]) -> list[Turn]:
    """Await all; an error of one cancels the others."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _answered(
    whole: dict[str, Any], events: Iterator[bytes] | None, asked: ServedRequest, fields: Mapping[str, Any]
) -> Response:
    names = messages.unused(asked, fields)
    headers = {"x-ignored-parameters": ", ".join(names)} if names else {}
    if events is None:
        return as_json(whole, headers=headers)
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)

"""Answers in OpenAI's formats, with the tokens that are trained on.

Beside OpenAI's fields an answer has `token_ids`, `token_logprobs` and `weight_versions`, an entry for each token that
the model sampled, `weight_version`, that of the last one, and `prompt_token_ids`, all tokens before them.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from cosmos_rl_core.episodes.agent_rollout import AgentAnswer
from cosmos_rl_core.types import ToolCall, Turn

Decode = Callable[[Sequence[int]], str]
Event = dict[str, Any]


def tokens_of(answer: AgentAnswer, *, with_prompt: bool) -> dict[str, Any]:
    """Return the fields of an answer that OpenAI's formats do not have."""
    turn = answer.turn
    fields: dict[str, Any] = {
        "token_ids": turn.terms.tolist(),
        "token_logprobs": turn.logprobs.tolist(),
        "weight_versions": turn.versions.tolist(),
        "weight_version": int(turn.versions[-1]),
    }
    return {**fields, "prompt_token_ids": answer.prompt.tolist()} if with_prompt else fields


def logprobs_of(turn: Turn, decode: Decode) -> list[dict[str, Any]]:
    """Return the log-probabilities of its tokens as OpenAI writes them, without alternatives."""
    columns = []
    for token, logprob in zip(turn.terms.tolist(), turn.logprobs.tolist(), strict=True):
        text = decode([token])
        columns.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return columns


def completion(answer: AgentAnswer, *, model: str, decode: Decode, logprobs: bool, with_prompt: bool) -> dict[str, Any]:
    """Return a chat completion."""
    choices = [chat_choice(answer.turn, 0, decode if logprobs else None)]
    whole = completed("chat.completion", [answer], choices, model=model, num_prompt_tokens=len(answer.prompt))
    return {**whole, **tokens_of(answer, with_prompt=with_prompt)}


def completed(
    kind: str, answers: Sequence[AgentAnswer], choices: Sequence[Event], *, model: str, num_prompt_tokens: int
) -> dict[str, Any]:
    """Return a completion of `kind`, OpenAI's name of the object. num_prompt_tokens: of all prompts, each once."""
    sampled = sum(len(answer.turn.terms) for answer in answers)
    return {
        "id": f"{'chatcmpl' if kind == 'chat.completion' else 'cmpl'}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": num_prompt_tokens + sampled,
        },
    }


def chat_choice(turn: Turn, index: int, decode: Decode | None) -> Event:
    """Return a choice of a chat completion. decode: None for a choice without log-probabilities."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.text or (None if turn.calls else "")}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [_called(call) for call in turn.calls]
    return {
        "index": index,
        "message": message,
        "finish_reason": _finish_reason(turn),
        "logprobs": {"content": logprobs_of(turn, decode)} if decode else None,
    }


def text_choice(turn: Turn, index: int, decode: Decode | None) -> Event:
    """Return a choice of a text completion, likewise."""
    logprobs = None
    if decode:
        columns = logprobs_of(turn, decode)
        ends = list(itertools.accumulate(len(column["token"]) for column in columns))
        logprobs = {
            "tokens": [column["token"] for column in columns],
            "token_logprobs": [column["logprob"] for column in columns],
            "top_logprobs": None,
            "text_offset": [0, *ends[:-1]],
        }
    return {"index": index, "text": turn.text, "finish_reason": turn.finish_reason, "logprobs": logprobs}


def completion_chunks(whole: dict[str, Any], *, with_usage: bool) -> Iterator[bytes]:
    """Yield a chat completion as server-sent events. The tokens come with the last of its chunks."""
    head = {key: whole[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    ours = {key: value for key, value in whole.items() if key not in {*head, "choices", "usage"}}

    def chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> Event:
        own = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return {**head, "choices": [own]}

    for choice in whole["choices"]:
        index, message = choice["index"], choice["message"]
        delta = {key: value for key, value in message.items() if key != "tool_calls"}
        yield _sent(chunk(index, delta, logprobs=choice["logprobs"]))
        for place, call in enumerate(message.get("tool_calls", ())):
            yield _sent(chunk(index, {"tool_calls": [{"index": place, **call}]}))
        yield _sent({**chunk(index, {}, choice["finish_reason"]), **ours})
    if with_usage:
        yield _sent({**head, "choices": [], "usage": whole["usage"]})
    yield b"data: [DONE]\n\n"


def text_chunks(whole: dict[str, Any], *, with_usage: bool) -> Iterator[bytes]:
    """Yield a text completion as server-sent events, one a choice."""
    head = {key: value for key, value in whole.items() if key not in ("choices", "usage")}
    for choice in whole["choices"]:
        yield _sent({**head, "choices": [choice]})
    if with_usage:
        yield _sent({**head, "choices": [], "usage": whole["usage"]})
    yield b"data: [DONE]\n\n"


def response(answer: AgentAnswer, *, model: str, decode: Decode, logprobs: bool, with_prompt: bool) -> dict[str, Any]:
    """Return a response of the Responses interface."""
    turn = answer.turn
    is_cut = turn.finish_reason != "stop"
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "output": _items(turn, logprobs_of(turn, decode) if logprobs else []),
        "usage": {
            "input_tokens": len(answer.prompt),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(turn.terms),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(answer.prompt) + len(turn.terms),
        },
        **tokens_of(answer, with_prompt=with_prompt),
    }


def response_events(whole: dict[str, Any]) -> Iterator[bytes]:
    """Yield a response as server-sent events."""
    started = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events = [
        {"type": "response.created", "response": started},
        {"type": "response.in_progress", "response": started},
        *(event for index, item in enumerate(whole["output"]) for event in _item_events(item, index)),
        {"type": f"response.{whole['status']}", "response": whole},
    ]
    for number, event in enumerate(events):
        yield _sent({**event, "sequence_number": number}, name=event["type"])


def _items(turn: Turn, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if turn.reasoning:
        summary = [{"type": "summary_text", "text": turn.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{secrets.token_hex(12)}", "summary": summary})
    if turn.text or not turn.calls:
        part = {"type": "output_text", "text": turn.text, "annotations": [], "logprobs": logprobs}
        own = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "assistant", "status": "completed"}
        items.append({**own, "content": [part]})
    for call in turn.calls:
        function = _called(call)["function"]
        own = {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": call.id, "status": "completed"}
        items.append({**own, **function})
    return items


def _item_events(item: dict[str, Any], index: int) -> Iterator[Event]:
    place = {"output_index": index, "item_id": item["id"]}
    empty = {"message": {"content": []}, "function_call": {"arguments": ""}, "reasoning": {"summary": []}}[item["type"]]
    begun = {**item, **empty, **({"status": "in_progress"} if "status" in item else {})}
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    if item["type"] == "message":
        [part] = item["content"]
        text = {**place, "content_index": 0, "logprobs": part["logprobs"]}
        yield {"type": "response.content_part.added", **place, "content_index": 0, "part": {**part, "text": ""}}
        yield {"type": "response.output_text.delta", **text, "delta": part["text"]}
        yield {"type": "response.output_text.done", **text, "text": part["text"]}
        yield {"type": "response.content_part.done", **place, "content_index": 0, "part": part}
    elif item["type"] == "function_call":
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **place, **done}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}


def _finish_reason(turn: Turn) -> str:
    if turn.finish_reason != "stop":
        return "length"
    return "tool_calls" if turn.calls else "stop"


def _sent(event: Event, *, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return b"%sdata: %s\n\n" % (head, msgspec.json.encode(event))

"""Requests of clients, checked and converted to what a continuation reads.

Messages of both interfaces become chat messages: {"role", "content": text, "tool_calls": [arguments as objects]}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec

from cosmos_rl_core.episodes.agent_rollout import RequestRefused
from cosmos_rl_core.types import Sampling

T = TypeVar("T")
Chat = list[dict[str, Any]]

_HARMLESS = (
    *("include", "messages", "metadata", "model", "parallel_tool_calls", "prompt_cache_key", "reasoning"),
    *("safety_identifier", "service_tier", "store", "stream_options", "text", "truncation", "user"),
)
"""Fields that are read elsewhere, or that do not change how a model samples."""


class ContentPart(msgspec.Struct):
    """A part of a content."""

    type: str
    text: str = ""
    refusal: str = ""


class Function(msgspec.Struct):
    """A function that is called."""

    name: str
    arguments: str | dict[str, Any] = ""


class Called(msgspec.Struct):
    """A call of an assistant's message."""

    function: Function
    id: str = ""
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: str = ""
    name: str | None = None


class Common(msgspec.Struct, kw_only=True):
    """Fields of both interfaces."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    """Whether answers have the tokens of their prompts; not set: they have."""


class ChatRequest(Common, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    n: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream_options: dict[str, Any] | None = None


class ServedRequest(Common, kw_only=True):
    """Fields of both interfaces of `cosmos-rl serve`."""

    n: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    seed: int | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def with_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


class ServedChat(ServedRequest, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None


class ServedText(ServedRequest, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """Each a text or tokens. Raises RequestRefused for a mixture."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [token for token in self.prompt if isinstance(token, int)]
        texts = [each for each in self.prompt if not isinstance(each, int)]
        if (tokens and texts) or not self.prompt:
            raise bad("prompt: send a text, a list of tokens, or a list of either")
        return [tokens] if tokens else texts


class Item(msgspec.Struct):
    """An item of a response's input."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[Any] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[ContentPart] = ""


class ResponseRequest(Common, kw_only=True):
    """The body of POST /v1/responses."""

    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None


def bad(message: str, code: str = "invalid_request") -> RequestRefused:
    """A request that is wrong."""
    return RequestRefused(400, code, message)


def read(body: bytes, kind: type[T]) -> tuple[T, Mapping[str, Any]]:
    """Return a request and its fields as they were sent. Raises RequestRefused."""
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError as error:  # a ValidationError is one too
        raise bad(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise bad(f"the body is {type(fields).__name__}; send a JSON object")
    try:
        return msgspec.convert(fields, kind), cast("dict[str, Any]", fields)
    except msgspec.ValidationError as error:
        raise bad(f"{error}; see docs/endpoint.md for what is read") from error


def ignored(request: Common, fields: Mapping[str, Any], sampling: Sampling) -> list[str]:
    """Return the fields that a client set and that are not used: the recipe decides how tokens are sampled."""
    plain = {
        "temperature": (None, sampling.temperature),
        "top_p": (None, sampling.top_p),
        "response_format": (None, {"type": "text"}),
        "tool_choice": (None, "auto", "none"),
    }
    used = {*request.__struct_fields__, *_HARMLESS} - set(plain)
    return [
        name for name, value in fields.items() if name not in used and value not in plain.get(name, (None, 0, [], {}))
    ]


def stops(request: ChatRequest, sampling: Sampling) -> None:
    """Raise RequestRefused for stop strings that the engine does not stop at, and for several answers at once."""
    if request.n not in (None, 1):
        raise bad(f"n = {request.n}: a call has one answer; call {request.n} times", "unsupported_n")
    asked = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if unknown := [text for text in asked if text not in sampling.stop]:
        raise bad(f"stop = {unknown}: name them in [rollout.sampling] stop of the recipe", "unsupported_stop")


def stops_of(request: ServedRequest) -> tuple[str, ...]:
    """Return the strings that end an answer."""
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())


def sampling_of(request: ServedRequest, default: Sampling) -> Sampling:
    """Return how a client wants an answer sampled; `default` for what it leaves open. Raises RequestRefused."""
    stop = stops_of(request)
    if not all(stop):
        raise bad("stop: an empty string ends nothing; leave it out")
    given = {
        name: value
        for name in ("temperature", "top_p", "top_k", "repetition_penalty")
        if (value := getattr(request, name)) is not None
    }
    if given.get("top_k") == -1:  # vLLM's clients write it for all
        given["top_k"] = 0
    return replace(default, stop=stop, **given)


def unused(request: Common, fields: Mapping[str, Any]) -> list[str]:
    """Return the fields that a client set to something, and that `cosmos-rl serve` does not read."""
    plain = {"response_format": {"type": "text"}, "tool_choice": "auto", "best_of": 1}
    used = {*request.__struct_fields__, *_HARMLESS} - set(plain)
    return [
        name
        for name, value in fields.items()
        if name not in used and value not in (None, 0, [], {}, "none", plain.get(name))
    ]


def tools_of(request: Common) -> list[dict[str, Any]]:
    """Return the functions that the model may call, as chat templates take them. Raises RequestRefused."""
    if request.tool_choice == "none":
        return []
    tools = []
    for tool in request.tools or ():
        if tool.get("type") != "function":
            raise bad(f"a tool of type {tool.get('type')!r}: only functions can be called", "unsupported_tool")
        function = tool.get("function") or {key: value for key, value in tool.items() if key not in ("type", "strict")}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad("a tool has no name", "invalid_tool")
        tools.append({"type": "function", "function": function})
    return tools


def chat_of(messages: Sequence[ChatMessage]) -> Chat:
    """Return the messages of a chat completion. Raises RequestRefused."""
    return _complete(_chat_message(message, number) for number, message in enumerate(messages))


def chat_of_items(request: ResponseRequest, before: Sequence[Mapping[str, Any]]) -> Chat:
    """Return the messages of a response, after those of the response that it continues. Raises RequestRefused."""
    chat: Chat = [dict(message) for message in before]
    if request.instructions:  # those of an earlier response do not count for this one
        chat = [{"role": "system", "content": request.instructions}, *chat]
    if isinstance(request.input, str):
        chat.append({"role": "user", "content": request.input})
        return _complete(iter(chat))
    for number, item in enumerate(request.input):
        last = chat[-1] if chat else None
        if item.type == "reasoning":  # the model's thoughts stay in its history as it drew them
            continue
        if item.type == "function_call":
            call = {"id": item.call_id, "type": "function", "function": _function(item.name, item.arguments, number)}
            if last is None or last["role"] != "assistant":
                chat.append(last := {"role": "assistant", "content": ""})
            last.setdefault("tool_calls", []).append(call)
        elif item.type == "function_call_output":
            chat.append({"role": "tool", "content": _text(item.output, number), "tool_call_id": item.call_id})
        elif item.type == "message":
            parts = item.content if not isinstance(item.content, list) else _parts(item.content, number)
            chat.append({"role": _role(item.role), "content": _text(parts, number)})
        else:
            raise bad(f"input[{number}] is of type {item.type!r}, which is not read", "unsupported_item")
    return _complete(iter(chat))


def _parts(content: list[Any], number: int) -> list[ContentPart]:
    try:
        return msgspec.convert(content, list[ContentPart])
    except msgspec.ValidationError as error:
        raise bad(f"input[{number}]: {error}") from error


def _complete(messages: Iterator[dict[str, Any]]) -> Chat:
    """Return the chat with the names of the tools that answer. Raises RequestRefused."""
    chat = list(messages)
    names: dict[str, str] = {}
    for number, message in enumerate(chat):
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        if message["role"] == "tool" and (call := message["tool_call_id"]) in names:
            message.setdefault("name", names[call])
        elif message["role"] == "tool":
            raise bad(f"messages[{number}] answers the call {call!r}, which no message before it makes", "unknown_call")
    if not chat:
        raise bad("there are no messages; send at least one")
    if chat[-1]["role"] == "assistant":
        raise bad("the last message is the assistant's; send one that it has to answer")
    return chat


def _chat_message(message: ChatMessage, number: int) -> dict[str, Any]:
    result: dict[str, Any] = {"role": _role(message.role), "content": _text(message.content, number)}
    if message.tool_calls:
        result["tool_calls"] = [
            {"id": c.id, "type": "function", "function": _function(c.function.name, c.function.arguments, number)}
            for c in message.tool_calls
        ]
    if message.role == "tool":
        result["tool_call_id"] = message.tool_call_id
        if message.name:
            result["name"] = message.name
    return result


def _role(role: str) -> str:
    return "system" if role == "developer" else role


def _text(content: str | list[ContentPart] | None, number: int) -> str:
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise bad(f"messages[{number}] has a part of type {part.type!r}; only text is read", "unsupported_part")
    return "".join(part.text or part.refusal for part in content)


def _function(name: str, arguments: str | dict[str, Any], number: int) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise bad(f"messages[{number}]: the arguments of {name} are not JSON: {error}") from error
    return {"name": name, "arguments": arguments}

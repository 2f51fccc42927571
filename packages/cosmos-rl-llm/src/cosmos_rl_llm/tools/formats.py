"""The formats in which models write calls of tools: where a call begins and ends, and how it is read.

A format's regions are a response template of transformers, which splits a turn; only the text of a call is read here,
so that a call that cannot be read does not take the rest of the turn with it, and its reason can be shown to the model.
vLLM has parsers of these formats too. They report a call that cannot be read as text, without a reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cosmos_rl_core.types import ToolCall

Schemas = Mapping[str, Mapping[str, Any]]
"""Schemas of parameters by name, by the name of their function."""


Read = Callable[[str, str, Schemas], list[ToolCall]]
"""Returns the calls in the head and body of a region. Raises CallError."""


class CallError(ValueError):
    """A text that looks like a call and is none. The message is a sentence for the model."""


def read_objects(head: str, body: str, schemas: Schemas) -> list[ToolCall]:
    """Read {"name": ..., "arguments": {...}}, a list of such, or several with ";" between them."""
    return [
        _call(value) for value in _values(body, "a call") for value in (value if isinstance(value, list) else [value])
    ]


def read_named(head: str, body: str, schemas: Schemas) -> list[ToolCall]:
    """Read the arguments {...} of a call whose name comes before them, and maybe its id."""
    name, _, rest = head.removesuffix("[ARGS]").partition("[CALL_ID]")
    if not name.strip():
        return read_objects(head, body, schemas)
    body = re.sub(r"\A\s*```(?:json)?|```\s*\Z", "", body)
    values = list(_values(body, f"the arguments of {name.strip()}")) or [{}]
    if len(values) > 1:
        raise CallError(f"the arguments of {name.strip()} are {len(values)} JSON values instead of one object")
    return [_call({"name": name.strip(), "arguments": values[0], "id": rest.strip()})]


def read_xml(head: str, body: str, schemas: Schemas) -> list[ToolCall]:
    """Read <function=NAME><parameter=KEY>value</parameter></function>."""
    opening = re.match(r"\s*<function=([^>\n]+)>(.*)", body, re.DOTALL)
    if opening is None:
        raise CallError("a call does not begin with <function=NAME>")
    name, inner = opening[1].strip(), opening[2].split("</function>")[0]
    parameters = re.findall(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", inner, re.DOTALL)
    if not parameters and inner.strip():
        raise CallError(f"the call of {name} has text that is no <parameter=KEY>value</parameter>")
    return [_typed(name, {key.strip(): _unwrap(value) for key, value in parameters}, schemas)]


def read_pairs(head: str, body: str, schemas: Schemas) -> list[ToolCall]:
    """Read NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>."""
    name, mark, rest = body.strip().partition("<")
    name, inner = name.strip(), mark + rest
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", inner, re.DOTALL)
    if not pairs and inner:
        raise CallError(f"the call of {name} has text that is no <arg_key>KEY</arg_key><arg_value>value</arg_value>")
    return [_typed(name, {key.strip(): _unwrap(value) for key, value in pairs}, schemas)]


def _values(text: str, what: str) -> Iterator[Any]:
    """The JSON values of a text, one after the other."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    place = _skip(text, 0)
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            raise CallError(
                f"{what} cannot be read as JSON: {error.msg} at character {error.pos + 1} of {_cut(text)}"
            ) from None
        except RecursionError:
            raise CallError(f"{what} has too many levels") from None
        except ValueError as error:  # an integer of thousands of digits
            raise CallError(f"{what} cannot be read as JSON: {error}") from None
        yield value
        place = _skip(text, place)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _skip(text: str, place: int) -> int:
    return place + len(text[place:]) - len(text[place:].lstrip(" \t\r\n;"))


def _call(value: Any) -> ToolCall:
    """The call that a JSON value describes."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise CallError(f'a call is {_cut(json.dumps(value))} instead of {{"name": ..., "arguments": {{...}}}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # as OpenAI writes them
        arguments = next(_values(arguments, f"the arguments of {value['name']}"), {})
    if not isinstance(arguments, dict):
        raise CallError(f"the arguments of {value['name']} are {_cut(json.dumps(arguments))} instead of an object")
    name = value.get("id")
    call = ToolCall(name=value["name"], arguments=arguments, id=name if isinstance(name, str) else "")
    try:
        json.dumps([call.name, call.id, arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise CallError(f"the call of {value['name']!a} has half of a surrogate pair, which is no text") from None
    return call


def _typed(name: str, values: Mapping[str, str], schemas: Schemas) -> ToolCall:
    """A call whose arguments were written without types: those that are no text by their schema are JSON."""
    parameters = schemas.get(name, {})
    return _call({"name": name, "arguments": {key: _cast(value, parameters.get(key)) for key, value in values.items()}})


def _cast(text: str, schema: Any) -> Any:
    if not isinstance(schema, dict) or schema.get("type") == "string":
        return text
    try:
        return next(_values(text, "a value"), text)
    except CallError:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _unwrap(value: str) -> str:
    """A value without the line breaks that the markup has around it."""
    return value.removeprefix("\n").removesuffix("\n")


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The calls of a family of models."""

    name: str
    marks: tuple[str, ...]
    """Texts of which a chat template of this family contains all."""
    call: Mapping[str, str]
    """Beginning and end of a call, as keys of a response template of transformers. The group `head` is what of the
    beginning belongs to the call."""
    read: Read
    """Calls that a head and a body contain."""
    regions: Mapping[str, Mapping[str, str]] | None = None
    """Those of "reasoning" and "text", if text is not what is left."""
    loose: bool = False
    """Whether a call begins as JSON, without a mark: an object without arguments is then text."""

    def matches(self, chat_template: str) -> bool:
        return all(mark in chat_template for mark in self.marks)


_END = r"<\|(?:end|call|return)\|>|(?=<\|start\|>|<\|channel\|>)"
_TO = r"(?:to=(?:functions\.)?(?P<head>[^\s<]+))"

FORMATS = (
    Format(
        name="harmony",
        marks=("<|channel|>", "<|message|>"),
        call={
            "open_pattern": r"(?:<\|start\|>)?(?:assistant)?"
            rf"(?:\s*{_TO}\s*<\|channel\|>\w+|<\|channel\|>\w+\s*{_TO})[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>",
            "close_pattern": _END,
        },
        read=read_named,
        regions={
            "reasoning": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                "close_pattern": _END,
            },
            "text": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)[^<=]*"
                r"(?:<\|constrain\|>[^<]*)?<\|message\|>",
                "close_pattern": _END,
            },
        },
    ),
    Format(
        name="mistral",
        marks=("[TOOL_CALLS]",),
        call={
            "open_pattern": r"\[TOOL_CALLS\](?P<head>[^{\[]*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?)",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
        },
        read=read_named,
    ),
    Format(
        name="deepseek",
        marks=("<｜tool▁call▁begin｜>",),
        call={
            "open_pattern": r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<head>[^\n<]*)\n"
            r"|(?P<head>[^\n<]*)<｜tool▁sep｜>)",
            "close_pattern": r"<｜tool▁call▁end｜>|(?=<｜tool▁call▁begin｜>)",
        },
        read=read_named,
    ),
    Format(
        name="qwen_xml",
        marks=("<tool_call>", "<function=", "<parameter="),
        call={"open": "<tool_call>", "close_pattern": r"</tool_call>|(?=<tool_call>)"},
        read=read_xml,
    ),
    Format(
        name="glm",
        marks=("<tool_call>", "<arg_key>"),
        call={"open": "<tool_call>", "close_pattern": r"</tool_call>|(?=<tool_call>)"},
        read=read_pairs,
    ),
    Format(
        name="hermes",
        marks=("<tool_call>",),
        call={"open": "<tool_call>", "close_pattern": r"</tool_call>|(?=<tool_call>)"},
        read=read_objects,
    ),
    Format(
        name="llama",
        marks=("<|start_header_id|>", '"parameters": '),
        call={
            "open_pattern": r'<\|python_(?:tag|start)\|>|(?=\{\s*"(?:name|type)"\s*:)',
            "close": "<|python_end|>",
        },
        read=read_objects,
        loose=True,
    ),
)
"""By the order in which they are tried."""

"""The turn of a model to what it says, thinks and calls, in the format of its chat template.

call_format = find_call_format(tokenizer)
parsed = call_format.parse("<tool_call>\\n{...}\\n</tool_call><|im_end|>", tools)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cosmos_rl_core.episodes.interfaces import Message
from cosmos_rl_core.types import ToolCall
from cosmos_rl_llm.tools.formats import FORMATS, CallError, Format, Read, read_objects

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_PROBE = {"probe": 7}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """A turn of a model, taken apart. The fields are those of `Turn`."""

    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """The format in which a model writes calls and thoughts."""

    name: str
    """"" where the chat template shows no calls: then `parse` finds none."""
    schema: Mapping[str, Any]
    """Response template of transformers."""
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    format: Format | None = None
    """Reads what the response template leaves as text; None: the response template is the tokenizer's own."""
    thought: tuple[str, str] | None = None
    """Marks of the beginning and end of a thought."""
    opening: str = ""
    """The part of a prompt that opens the model's turn."""
    opens_thought: bool = False
    """Whether that opens a thought too, so that only its end is in the turn."""
    arguments_as_text: bool = False
    """Whether the chat template wants arguments as JSON text instead of an object."""
    specials: re.Pattern[str] = field(repr=False)
    """Any special token of the tokenizer."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        """Take a turn apart: its decoded terms, with special tokens. Raises nothing.

        A call that cannot be read is in no field but `problem`, which says why in a sentence for the model. One inside
        a thought is part of the thought.
        """
        if self.format is None and self.name:
            return self._parse_by_tokenizer(text, tools)
        prefix = ""
        if self.thought is not None:
            opens, closes = self.thought
            before, ends, _ = text.partition(closes)
            prefix = opens if self.opens_thought or (ends and opens not in before) else ""
            prefix = "" if text.lstrip().startswith(opens) else prefix
        regions = self._regions(text, prefix=prefix)
        bodies = [(region.get("head", ""), self._clean(region["body"])) for region in regions.get("calls", ())]
        is_loose = self.format is not None and self.format.loose
        loose = [body for _, body in bodies if is_loose and _is_object_without_arguments(body)]
        read = read_objects if self.format is None else self.format.read
        calls, problems = _read_calls(read, [each for each in bodies if each[1] not in loose], tools)
        reasoning = self._clean(regions.get("reasoning", ""))
        said = self._clean("".join((regions.get("text", ""), regions.get("rest", ""), *loose)))
        is_open = self.thought is not None and self.thought[1] not in text
        if is_open and self._regions(reasoning).get("calls"):
            problems.append("a call is inside a thought that does not end")
        return ParsedTurn(text=said, reasoning=reasoning, calls=calls, problem="; ".join(problems))

    def _regions(self, text: str, *, prefix: str = "", tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        functions: list[Any] = [dict(tool) for tool in tools]
        regions = self.tokenizer.parse_response(text, dict(self.schema), prefix=prefix, tools=functions)
        assert isinstance(regions, dict), "of one text"
        return regions

    def _parse_by_tokenizer(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedTurn:
        """By the tokenizer's response template, which gives up the whole turn for a call that it cannot read."""
        try:
            message = self._regions(text, prefix=self.opening, tools=tools)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return ParsedTurn(text=self._clean(text), problem=f"the turn cannot be read: {error}")
        thoughts = (message.get(key) for key in ("reasoning_content", "thinking", "reasoning"))
        bodies = [("", json.dumps(call.get("function", call))) for call in message.get("tool_calls", ())]
        calls, problems = _read_calls(read_objects, bodies, tools)
        return ParsedTurn(
            text=self._clean(message.get("content") or ""),
            reasoning=self._clean(next((thought for thought in thoughts if thought), "")),
            calls=calls,
            problem="; ".join(problems),
        )

    def for_template(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as the chat template wants them: arguments of calls as objects, or as JSON text."""
        return [
            {**message, "tool_calls": [self._call_for_template(call) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in messages
        ]

    def _call_for_template(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        if self.arguments_as_text:
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str):
            with suppress(json.JSONDecodeError):  # a client's; the template shows it as it is
                arguments = json.loads(arguments or "{}")
        return {**call, "function": {**function, "arguments": arguments}}

    def _clean(self, text: str) -> str:
        return self.specials.sub("", text).strip()


def find_call_format(tokenizer: PreTrainedTokenizerBase) -> CallFormat:
    """Return the format of a tokenizer: that of its own response template, or else the one its chat template shows.

    Without a chat template, or where that shows no calls that are known here, its name is "".
    """
    added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
    specials = [token for token, special in added.items() if special]
    longest_first = sorted({*specials, *map(str, tokenizer.all_special_tokens)}, key=len, reverse=True)
    template = _template_of(tokenizer)
    opening = _opening_of(tokenizer) if template else ""
    known = next((form for form in FORMATS if form.matches(template)), None)
    thought = next((marks for marks in _THOUGHTS if marks[1] in template or marks[1] in added), None)
    schema = getattr(tokenizer, "response_template", None)
    return CallFormat(
        name="response_template" if schema else known.name if known else "",
        schema=schema or _schema(known, thought),
        tokenizer=tokenizer,
        format=None if schema else known,
        thought=thought,
        opening=opening,
        opens_thought=thought is not None and opening.rstrip().endswith(thought[0]),
        arguments_as_text=bool(template) and _wants_text(tokenizer),
        specials=re.compile("|".join(map(re.escape, filter(None, longest_first))) or r"(?!)"),
    )


def _read_calls(
    read: Read, bodies: Sequence[tuple[str, str]], tools: Sequence[Mapping[str, Any]]
) -> tuple[tuple[ToolCall, ...], list[str]]:
    """Return the calls of heads and bodies, and the reasons of those that cannot be read."""
    functions = [tool.get("function", tool) for tool in tools]
    schemas = {function["name"]: function.get("parameters", {}).get("properties", {}) for function in functions}
    calls: list[ToolCall] = []
    problems: list[str] = []
    for head, body in bodies:
        try:
            inside = read(head, body, schemas)
        except CallError as error:
            problems.append(str(error))
        else:
            calls += inside
            problems += [] if inside else ["a call is empty"]
    return tuple(calls), problems


def _schema(form: Format | None, thought: tuple[str, str] | None) -> dict[str, Any]:
    """The response template that splits a turn and leaves its parts as text."""
    fields: dict[str, dict[str, Any]] = {"rest": {}}
    if thought is not None:
        fields["reasoning"] = {"open": thought[0], "close": thought[1]}
    if form is not None:
        fields |= {name: dict(region) for name, region in (form.regions or {}).items()}
    for region in fields.values():  # of two regions with one name both are kept
        region |= {"repeats": True, "join": "", "content_args": {"strip": False}}
    if form is not None:
        head = {"head": "{head}"} if "(?P<head>" in form.call.get("open_pattern", "") else {}
        fields["calls"] = {**form.call, "repeats": True, "transform": {**head, "body": "{content}"}}
    return {"start_anchor_pattern": r"\A", "fields": fields}


def _template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of the chat template, of all of them if there are several."""
    template = tokenizer.chat_template or ""
    return "".join(template.values()) if isinstance(template, dict) else template


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any) -> str:
    text = tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False, **options)
    assert isinstance(text, str)
    return text


def _opening_of(tokenizer: PreTrainedTokenizerBase) -> str:
    chat = [{"role": "user", "content": "x"}]
    without, opened = (_render(tokenizer, chat, add_generation_prompt=opens) for opens in (False, True))
    return opened.removeprefix(without)


def _wants_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether arguments of a call appear once, as JSON, if the template gets them as text, and else not."""

    def shows(arguments: Any) -> bool:
        call = {"id": call_id(0), "type": "function", "function": {"name": "f", "arguments": arguments}}
        chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            return json.dumps(_PROBE) in _render(tokenizer, chat)
        except Exception:  # a template is a program and may raise anything
            return False

    return shows(json.dumps(_PROBE)) and not shows(_PROBE)


def _is_object_without_arguments(body: str) -> bool:
    """Whether a text is a JSON object that has the name of something and calls nothing."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and not {"arguments", "parameters"} & value.keys()


def call_id(number: int) -> str:
    """Return the id of a call by its number in the episode: nine letters and digits, as Mistral's templates want."""
    return f"call{number:05d}"

"""The environment "tools": the model calls tools until a turn has no call.

[environment]
name = "tools"
options.functions = ["calculator:add"]
options.mcp = [{command = ["python", "server.py"]}, {url = "http://127.0.0.1:8000/mcp"}]
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field, ValidationError

from cosmos_rl_core.episodes.interfaces import Environment, Message, Observation
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import ToolCall, Turn
from cosmos_rl_llm.tools.calls import call_id
from cosmos_rl_llm.tools.functions import function_tool
from cosmos_rl_llm.tools.mcp import McpSection, mcp_server
from cosmos_rl_llm.tools.tool import Tool, ToolError, answer_text


class ToolOptions(Strict):
    """[environment.options] of "tools"."""

    functions: tuple[str, ...] = ()
    """Python functions, as "module:function"."""
    mcp: tuple[McpSection, ...] = ()
    """MCP servers, each with `command` or `url`."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Maximum time of one call; the model reads that there was no answer."""
    max_bytes: int = Field(default=16_384, ge=1)
    """Maximum size of one answer; the rest is cut."""


class ToolEnvironment(Environment):
    """An episode with tools. A turn without calls ends it; it has no reward of its own.

    What the model can mend is an observation: a call that cannot be read, an unknown tool, wrong arguments, a tool that
    raises or does not answer in time. A server that is not there is an error, with which the episode is tried again.
    """

    def __init__(self, **options: Any) -> None:
        """options: those of `ToolOptions`. Raises UserError."""
        try:
            self.options = ToolOptions.model_validate(options)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, ("environment", "options", *first["loc"])))
            raise UserError(f"{place}: {first['msg']}") from error
        if not self.options.functions and not self.options.mcp:
            raise UserError(
                'environment.options of "tools" names no tool; set functions = ["module:function"] or '
                'mcp = [{command = ["python", "server.py"]}]'
            )
        self._tools: dict[str, Tool] = {}
        self._num_calls = 0
        self._offer([function_tool(name) for name in self.options.functions])

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        for tools in await asyncio.gather(*(mcp_server(section).tools() for section in self.options.mcp)):
            self._offer(tools)
        self.tools = [tool.schema for tool in self._tools.values()]
        return Observation()

    def _offer(self, tools: Iterable[Tool]) -> None:
        for tool in tools:
            if tool.name in self._tools:
                raise UserError(f"environment.options: two tools are called {tool.name}; leave one out or rename it")
            self._tools[tool.name] = tool

    async def step(self, said: str, turn: Turn) -> Observation:
        if turn.finish_reason != "stop":  # nothing can follow, and a call that was cut must not be made
            return Observation()
        if turn.problem:
            text = f"No tool was called: {turn.problem}."
            return Observation(text, metrics=_counts(parse_failures=1))
        if not turn.calls:
            return Observation(done=True, metrics=_counts())
        answers = await asyncio.gather(*(self._answer(call) for call in turn.calls))
        messages = [self._message(call, text) for call, (text, _) in zip(turn.calls, answers, strict=True)]
        errors = sum(failed for _, failed in answers)
        return Observation(messages, metrics=_counts(calls=len(turn.calls), call_errors=errors))

    async def _answer(self, call: ToolCall) -> tuple[str, bool]:
        """Return the text of a tool's answer, and whether the call failed. Raises ToolUnavailable."""
        tool = self._tools.get(call.name)
        try:
            if tool is None:
                raise ToolError(f"no tool is called {call.name!r}; there are {', '.join(sorted(self._tools))}")
            value = await tool.call(call.arguments, timeout_s=self.options.timeout_s)
            return answer_text(value, max_bytes=self.options.max_bytes), False
        except ToolError as error:
            return answer_text(f"Error: {error}", max_bytes=self.options.max_bytes), True

    def _message(self, call: ToolCall, text: str) -> Message:
        number, self._num_calls = self._num_calls, self._num_calls + 1
        return {"role": "tool", "tool_call_id": call.id or call_id(number), "name": call.name, "content": text}


def _counts(*, calls: int = 0, call_errors: int = 0, parse_failures: int = 0) -> dict[str, float]:
    return {"calls": calls, "call_errors": call_errors, "parse_failures": parse_failures}

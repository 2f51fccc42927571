"""The environment "tools" with Python functions: answers, and every way in which a call fails."""

from __future__ import annotations

import asyncio
import json
import time

import numpy as np
import pytest
import tool_functions

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.testing.environments import check_environment
from cosmos_rl_core.types import ToolCall, Turn
from cosmos_rl_llm.tools.environment import ToolEnvironment
from cosmos_rl_llm.tools.functions import MAX_HUNG, FunctionTool, function_tool
from cosmos_rl_llm.tools.tool import ToolError, ToolUnavailable, answer_text


def turn(*calls: ToolCall, problem: str = "", finish_reason: str = "stop") -> Turn:
    nothing = np.zeros(0, np.float32)
    return Turn(
        terms=nothing.astype(np.int32),
        logprobs=nothing,
        versions=nothing.astype(np.int32),
        finish_reason=finish_reason,
        calls=calls,
        problem=problem,
    )


def call(name: str, /, **arguments: object) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def answer(*calls: ToolCall, **options: object) -> tuple[list, dict]:
    """Messages and metrics of the answer to one turn."""
    names = sorted({f"tool_functions:{each.name}" for each in calls if each.name in vars(tool_functions)})
    environment = ToolEnvironment(functions=names or ["tool_functions:add"], **options)

    async def run():
        await environment.reset({})
        return await environment.step("", turn(*calls))

    observation = asyncio.run(run())
    assert not observation.done
    return observation.as_messages, dict(observation.metrics)


def text_of(*calls: ToolCall, **options: object) -> str:
    messages, metrics = answer(*calls, **options)
    assert metrics == {"calls": len(calls), "call_errors": len(calls), "parse_failures": 0}
    return messages[0]["content"]


def test_schema_is_that_of_signature_and_docstring():
    function = function_tool("tool_functions:add").schema["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert function["parameters"]["required"] == ["a"]
    first = {"description": "The first number.", "type": "integer"}
    assert function["parameters"]["properties"]["a"] == first
    how = function_tool("tool_functions:shout").schema["function"]["parameters"]["properties"]["how"]
    assert how["enum"] == ["loud", "quiet"]


def test_answers_are_messages_in_the_order_of_the_calls():
    messages, metrics = answer(call("shout", text="ok"), call("add", a=1, b="2"), call("add", a=4))
    assert [message["content"] for message in messages] == ["OK", "3", "5"]
    assert [message["name"] for message in messages] == ["shout", "add", "add"]
    assert [message["tool_call_id"] for message in messages] == ["call00000", "call00001", "call00002"]
    assert metrics == {"calls": 3, "call_errors": 0, "parse_failures": 0}


def test_calls_of_a_turn_run_at_the_same_time():
    barrier = asyncio.Barrier(2)

    async def meet() -> str:
        """Wait for the other."""
        await barrier.wait()
        return "met"

    environment = ToolEnvironment(functions=["tool_functions:add"])
    environment._tools["meet"] = FunctionTool(meet, where="here")
    observation = asyncio.run(environment.step("", turn(call("meet"), call("meet"))))
    assert [message["content"] for message in observation.as_messages] == ["met", "met"]


def test_turn_without_calls_ends_the_episode_without_a_reward():
    environment = ToolEnvironment(functions=["tool_functions:add"])
    observation = asyncio.run(environment.step("3", turn()))
    assert (observation.done, observation.reward, observation.as_messages) == (True, None, [])


def test_call_that_cannot_be_read_is_an_observation_and_no_call_is_made():
    environment = ToolEnvironment(functions=["tool_functions:add"])
    observation = asyncio.run(environment.step("", turn(call("add", a=1), problem="a call is no JSON")))
    assert observation.as_messages == [{"role": "user", "content": "No tool was called: a call is no JSON."}]
    assert observation.metrics == {"calls": 0, "call_errors": 0, "parse_failures": 1}
    assert not observation.done


def test_turn_that_was_cut_calls_nothing():
    environment = ToolEnvironment(functions=["tool_functions:add"])
    observation = asyncio.run(environment.step("", turn(call("add", a=1), finish_reason="length")))
    assert not observation.done
    assert not observation.as_messages


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (call("fail", kind="zero"), "Error: ZeroDivisionError: division by zero"),
        (call("fail", kind="exit"), "Error: RuntimeError: SystemExit: 3"),
        (call("fail", kind="stop"), "Error: RuntimeError: StopIteration"),
        (call("cancelled"), "Error: cancelled was cancelled"),
        (call("subtract", a=1), "Error: no tool is called 'subtract'; there are add"),
        (call("add", b=1), "Error: wrong arguments of add: a: Field required"),
        (call("add", a="x"), "Error: wrong arguments of add: a: Input should be a valid integer"),
        (call("add", a=1, c=2), "Error: wrong arguments of add: c: Extra inputs are not permitted"),
        (call("shout", text="x", how="odd"), "Error: wrong arguments of shout: how: Input should be 'loud' or 'quiet'"),
        (call("noise"), "Error: the tool answered 3 bytes that are no text"),
    ],
)
def test_call_that_fails_is_an_observation(made, text):
    assert text_of(made).startswith(text)


def test_long_answer_is_cut_at_a_character_and_says_so():
    messages, metrics = answer(call("flood", num_bytes=4_000_000), max_bytes=101)
    assert messages[0]["content"] == ("é" * 50 + "\n[cut: the answer has 4000000 bytes, and these are the first 101]")
    assert metrics["call_errors"] == 0


def test_values_without_a_text_of_their_own_have_one():
    assert answer(call("circle"))[0][0]["content"] == "[[...]]"
    assert answer_text({"a": (1, None)}, max_bytes=99) == '{"a":[1,null]}'
    assert answer_text("\ud800", max_bytes=99) == "?"
    assert json.loads(answer_text([1.5, "é"], max_bytes=99)) == [1.5, "é"]


@pytest.fixture
def release():
    tool_functions.released.clear()
    yield
    tool_functions.released.set()


def test_call_that_hangs_is_an_observation(release):
    made = call("hang"), call("sleep"), call("add", a=1)
    messages, metrics = answer(*made, timeout_s=0.05)
    assert [message["content"] for message in messages] == [
        "Error: hang did not answer within 0.05 s",
        "Error: sleep did not answer within 0.05 s",
        "2",
    ]
    assert metrics["call_errors"] == 2


def test_function_with_many_hung_calls_is_dead_until_they_end(release):
    tool = FunctionTool(tool_functions.hang, where="tool_functions:hang")

    async def run():
        hung = (tool.call({}, timeout_s=0.01) for _ in range(MAX_HUNG))
        for result in await asyncio.gather(*hung, return_exceptions=True):
            assert isinstance(result, ToolError)
        with pytest.raises(ToolUnavailable, match=f"hang has {MAX_HUNG} calls that went on"):
            await tool.call({}, timeout_s=0.01)
        tool_functions.released.set()
        until = time.monotonic() + 60
        while tool._hung:
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        assert await tool.call({}, timeout_s=60) == "late"

    asyncio.run(run())


def test_tool_without_its_service_is_an_error_of_the_episode():
    with pytest.raises(ToolUnavailable, match="no service at"):
        answer(call("gone"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "names no tool"),
        ({"functions": ["tool_functions:add"], "timeout": 3}, "environment.options.timeout: Extra inputs"),
        ({"functions": ["tool_functions:add"], "timeout_s": 0}, "environment.options.timeout_s: "),
        ({"mcp": [{}]}, "either command = "),
        ({"mcp": [{"command": ["x"], "url": "y"}]}, "either command = "),
    ],
)
def test_options_that_are_wrong_are_refused(options, text):
    with pytest.raises(UserError, match=text):
        ToolEnvironment(**options)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("add", 'write "module:function"'),
        ("no_such_module:add", "no_such_module"),
        ("tool_functions:nothing", "nothing"),
        ("tool_functions:released", "Event instead of a function"),
        ("tool_functions:untyped", "parameter a has no type; write a: int"),
        ("tool_functions:undocumented", "has no docstring"),
        ("tool_functions:many", "a model cannot give \\*numbers"),
        ("tool_functions:odd", "a type has no JSON schema"),
    ],
)
def test_functions_that_are_no_tools_are_refused(name, text):
    with pytest.raises(UserError, match=text):
        function_tool(name)


def test_two_tools_with_one_name_are_refused():
    with pytest.raises(UserError, match="two tools are called add"):
        ToolEnvironment(functions=["tool_functions:add", "tool_functions:add"])


def test_environment_conforms():
    def make() -> ToolEnvironment:
        return ToolEnvironment(functions=["tool_functions:add"])

    asyncio.run(check_environment(make, [{"prompt": "1 + 1?"}], said=["2"]))


def test_entry_point_is_the_environment():
    assert plugins.load("cosmos_rl.environments", "tools") is ToolEnvironment

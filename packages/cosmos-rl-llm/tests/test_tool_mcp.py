"""Tools of a real MCP server, over stdio and streamable HTTP."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import ToolCall, Turn
from cosmos_rl_llm.tools.environment import ToolEnvironment
from cosmos_rl_llm.tools.mcp import McpSection, close_servers, mcp_server
from cosmos_rl_llm.tools.tool import ToolUnavailable

pytest.importorskip("mcp")

SERVER = Path(__file__).parent / "support" / "mcp_tools_server.py"
COMMAND = {"command": [sys.executable, str(SERVER)]}
NOTHING = np.zeros(0, np.int32)


def turn(*calls: ToolCall) -> Turn:
    logprobs = NOTHING.astype(np.float32)
    return Turn(terms=NOTHING, logprobs=logprobs, versions=NOTHING, finish_reason="stop", calls=calls)


def call(name: str, /, **arguments: object) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


async def begin(*servers: object, **options: object) -> ToolEnvironment:
    environment = ToolEnvironment(mcp=list(servers), **options)
    await environment.reset({})
    return environment


async def texts(environment: ToolEnvironment, *calls: ToolCall) -> list[str]:
    observation = await environment.step("", turn(*calls))
    return [message["content"] for message in observation.as_messages]


def run(episodes) -> None:
    async def closing() -> None:
        try:
            await episodes()
        finally:
            await close_servers()

    asyncio.run(closing())


@pytest.fixture
def server() -> Iterator[tuple[dict, subprocess.Popen]]:
    """A server over HTTP."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    process = start(port)
    yield {"url": f"http://127.0.0.1:{port}/mcp"}, process
    process.kill()
    process.wait()


def start(port: int) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while True:
        assert process.poll() is None, "the server ended"
        assert time.monotonic() < until, "the server does not listen"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return process


def test_tools_of_a_command_are_listed_and_called():
    async def episodes() -> None:
        environment = await begin(COMMAND, timeout_s=60)
        functions = {tool["function"]["name"]: tool["function"] for tool in environment.tools}
        assert functions["multiply"]["description"] == "Multiply two numbers."
        assert functions["multiply"]["parameters"]["required"] == ["a", "b"]
        made = call("multiply", a=6, b=7), call("refuse"), call("multiply", a="x", b=1), call("picture")
        product, refused, wrong, picture = await texts(environment, *made)
        assert product == "42"
        assert refused.startswith("Error: ")
        assert "not today" in refused
        assert wrong.startswith("Error: ")
        assert "valid integer" in wrong
        assert picture == "[image image/png of 12 bytes: no text]"

    run(episodes)


def test_episodes_share_a_process_and_the_next_one_starts_another_when_it_died():
    async def episodes() -> None:
        first, second = await asyncio.gather(begin(COMMAND, timeout_s=60), begin(COMMAND, timeout_s=60))
        (one,), (two,) = await asyncio.gather(texts(first, call("process")), texts(second, call("process")))
        assert one == two
        deaths = await asyncio.gather(
            *(texts(each, call("die")) for each in (first, second, first)), return_exceptions=True
        )
        assert [type(death) for death in deaths] == [ToolUnavailable] * 3
        third = await begin(COMMAND, timeout_s=60)
        (other,) = await texts(third, call("process"))
        assert other != one
        assert await texts(first, call("process")) == [other]

    run(episodes)


def test_call_that_hangs_is_an_observation():
    async def episodes() -> None:
        environment = await begin(COMMAND, timeout_s=0.2)
        assert await texts(environment, call("wait", seconds=2.0)) == ["Error: wait did not answer within 0.2 s"]

    run(episodes)


def test_tools_of_a_url_are_called_and_the_connection_is_made_anew(server):
    section, process = server
    port = int(section["url"].split(":")[2].split("/")[0])

    async def episodes() -> None:
        environment = await begin(section, timeout_s=60)
        assert await texts(environment, call("multiply", a=6, b=7)) == ["42"]
        process.kill()
        process.wait()
        with pytest.raises(ToolUnavailable, match=section["url"]):
            await texts(environment, call("multiply", a=6, b=7))
        with pytest.raises(ToolUnavailable, match="does not connect"):
            await begin(section)
        again = start(port)
        try:
            environment = await begin(section, timeout_s=60)
            assert await texts(environment, call("multiply", a=2, b=3)) == ["6"]
            await close_servers()
        finally:
            again.kill()
            again.wait()

    run(episodes)


def test_command_that_is_no_server_is_an_error_of_the_episode():
    async def episodes() -> None:
        with pytest.raises(ToolUnavailable, match="does not connect"):
            await begin({"command": [sys.executable, "-c", "pass"]})

    run(episodes)


def test_program_that_is_missing_is_named():
    async def episodes() -> None:
        with pytest.raises(UserError, match="no program no-such-program; write its path"):
            await begin({"command": ["no-such-program"]})

    run(episodes)


def test_connection_that_is_given_up_ends_its_process():
    async def episodes() -> None:
        environment = await begin(COMMAND, timeout_s=60)
        (process,) = await texts(environment, call("process"))
        await mcp_server(McpSection.model_validate(COMMAND)).close()
        assert not Path(f"/proc/{process}").exists()

    run(episodes)

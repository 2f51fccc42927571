"""Tools of MCP servers: one connection for each server and replica, shared by its episodes, made anew when it dies.

The client of the `mcp` package is entered and left in one task, as its task groups require; other tasks call it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pydantic import Field, model_validator

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_llm.tools.tool import Tool, ToolError, ToolUnavailable

if TYPE_CHECKING:
    from mcp import Client

CONNECT_S = 30.0
"""Maximum time until a server has started and listed its tools."""
_MODEL_FAULTS = (-32602, -32603, -32601)
"""JSON-RPC: wrong parameters, an error inside of the tool, and a method that is unknown."""


class McpSection(Strict):
    """A server: a command that speaks MCP over its standard input and output, or the URL of one that is running."""

    command: tuple[str, ...] = ()
    env: Mapping[str, str] = Field(default_factory=dict)
    """Variables of the command beside PATH, HOME and a few others; it gets no other ones."""
    url: str = ""

    @model_validator(mode="after")
    def _one_of_two(self) -> McpSection:
        if bool(self.command) == bool(self.url):
            raise ValueError('it has either command = ["python", "server.py"] or url = "http://.../mcp"')
        return self

    @property
    def label(self) -> str:
        return self.url or " ".join(self.command)


class McpServer:
    """A connection to a server."""

    def __init__(self, section: McpSection) -> None:
        self.section = section
        self._connecting = asyncio.Lock()
        self._client: Client | None = None
        self._owner: asyncio.Task[None] | None = None
        self._tools: list[McpTool] = []

    async def tools(self) -> list[McpTool]:
        """Return the server's tools, as it listed them when the connection was made. Raises ToolUnavailable."""
        await self.client()
        return self._tools

    async def client(self) -> Client:
        """Return the connection; make it if there is none. Raises ToolUnavailable, and UserError."""
        async with self._connecting:
            if self._client is None:
                await self._connect()
            assert self._client is not None, "connected"
            return self._client

    async def _connect(self) -> None:
        ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(_target(self.section), ready))
        try:
            async with asyncio.timeout(CONNECT_S):
                client = await ready
                self._tools = await self._list(client)
            self._client = client
        except Exception as error:
            raise ToolUnavailable(f"MCP server {self.section.label} does not connect: {_reason(error)}") from error
        finally:
            if self._client is None:
                await self.close()

    async def _own(self, target: Any, ready: asyncio.Future[Client]) -> None:
        """Hold the connection open until this task is cancelled."""
        from mcp import Client

        try:
            async with Client(target) as client:
                ready.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)

    async def _list(self, client: Client) -> list[McpTool]:
        page = await client.list_tools()
        tools = [*page.tools]
        while page.next_cursor is not None:
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        return [McpTool(self, tool) for tool in tools]

    async def lost(self, client: Client) -> None:
        """End a connection that failed a call, unless another call has done so."""
        async with self._connecting:
            if self._client is client:
                await self.close()

    async def close(self) -> None:
        """End the connection, and the server if it was started by us."""
        owner, self._client, self._owner = self._owner, None, None
        if owner is not None:
            owner.cancel()
            await asyncio.wait([owner])  # the client's own waits have limits


class McpTool(Tool):
    """A tool of a server."""

    def __init__(self, server: McpServer, listed: Any) -> None:
        self._server = server
        self.name = listed.name
        description = listed.description or listed.title or ""
        function = {"name": listed.name, "description": description, "parameters": dict(listed.input_schema)}
        self.schema = {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> Any:
        from mcp import MCPError

        client = await self._server.client()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                result = await client.call_tool(self.name, dict(arguments))
        except TimeoutError:
            assert limit.expired(), "the client raises MCPError for its own limits"
            raise ToolError(f"{self.name} did not answer within {timeout_s:g} s") from None
        except MCPError as error:
            if error.code in _MODEL_FAULTS:
                raise ToolError(f"{self.name}: {error.message}") from error
            await self._server.lost(client)
            raise ToolUnavailable(f"MCP server {self._server.section.label}: {error.message}") from error
        except Exception as error:  # of the transport
            await self._server.lost(client)
            raise ToolUnavailable(f"MCP server {self._server.section.label}: {_reason(error)}") from error
        text = _text_of(result)
        if result.is_error:
            raise ToolError(text or f"{self.name} failed without a reason")
        return text


_SERVERS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, McpServer]] = WeakKeyDictionary()
"""Connections of this process, by event loop and section."""


def mcp_server(section: McpSection) -> McpServer:
    """Return the connection to a server that all episodes of this event loop share."""
    servers = _SERVERS.setdefault(asyncio.get_running_loop(), {})
    return servers.setdefault(section.model_dump_json(), McpServer(section))


async def close_servers() -> None:
    """End all connections of this event loop. A loop that ends without it cancels them, which ends the servers too."""
    servers = _SERVERS.pop(asyncio.get_running_loop(), {})
    await asyncio.gather(*(server.close() for server in servers.values()))


def _target(section: McpSection) -> Any:
    """A server as the client takes it. Raises UserError where the command or the package is missing."""
    try:
        from mcp import StdioServerParameters
    except ImportError as error:
        raise UserError(
            f"MCP server {section.label} needs the package mcp: {pip_install('cosmos-rl-llm[mcp]')}"
        ) from error
    if section.url:
        return section.url
    program, *arguments = section.command
    if shutil.which(program) is None:
        raise UserError(f"MCP server {section.label}: no program {program}; write its path, or put it on PATH")
    return StdioServerParameters(command=program, args=arguments, env=dict(section.env))


def _text_of(result: Any) -> Any:
    """The parts of a result as text, or else its object. A picture or another file is named, with its size."""
    if not result.content and result.structured_content is not None:
        return result.structured_content
    sizes = [len(getattr(part, "data", "")) * 3 // 4 for part in result.content]  # of base64
    return "\n".join(
        part.text if part.type == "text" else f"[{part.type} {getattr(part, 'mime_type', '')} of {size} bytes: no text]"
        for part, size in zip(result.content, sizes, strict=True)
    )


def _reason(error: BaseException) -> str:
    """The first reason in a group of errors, as task groups raise them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"it was not ready within {CONNECT_S:g} s"
    return f"{type(error).__name__}: {error}"

"""An MCP server for tests: `python mcp_tools_server.py` over stdio, or with a port over streamable HTTP."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tools")


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@server.tool()
def process() -> int:
    """Return the process id."""
    return os.getpid()


@server.tool()
def refuse() -> str:
    """Raise an error."""
    raise ToolError("not today")


@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "done"


@server.tool()
def picture() -> Image:
    """Return a picture."""
    return Image(data=b"\x89PNG" * 3, format="png")


@server.tool()
def die() -> str:
    """End the process."""
    os._exit(1)


if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run()

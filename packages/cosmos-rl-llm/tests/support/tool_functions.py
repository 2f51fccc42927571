"""Functions that tests offer as tools."""

from __future__ import annotations

import asyncio
import threading
from typing import Literal

from cosmos_rl_llm.tools.tool import ToolUnavailable

released = threading.Event()
"""Lets `hang` return."""


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second one.
    """
    return a + b


async def shout(text: str, how: Literal["loud", "quiet"] = "loud") -> str:
    """Return a text in capitals."""
    await asyncio.sleep(0)
    return text.upper() if how == "loud" else text


def fail(kind: str) -> None:
    """Raise an error."""
    if kind == "exit":
        raise SystemExit(3)
    if kind == "stop":
        raise StopIteration
    raise ZeroDivisionError("division by zero")


def hang() -> str:
    """Wait until the test ends."""
    released.wait()
    return "late"


async def sleep() -> str:
    """Wait forever."""
    await asyncio.Event().wait()
    return "never"


async def cancelled() -> None:
    """Raise what a cancelled task raises."""
    raise asyncio.CancelledError


def flood(num_bytes: int) -> str:
    """Return a long text."""
    return "é" * (num_bytes // 2)


def noise() -> bytes:
    """Return bytes that are no text."""
    return b"\xff\xfe\x00"


def circle() -> list:
    """Return a list that contains itself."""
    value: list = []
    value.append(value)
    return value


def gone() -> str:
    """Say that the service is not there."""
    raise ToolUnavailable("no service at 127.0.0.1:1")


def untyped(a, b: int) -> int:
    """Have no type."""
    return a + b


def undocumented(a: int) -> int:
    return a


def many(*numbers: int) -> int:
    """Take many numbers."""
    return sum(numbers)


def odd(value: threading.Event) -> int:
    """Take what JSON has not."""
    return 0

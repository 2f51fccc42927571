"""A tool, and its answer as text that a model can read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticSerializationError, to_json


class ToolError(Exception):
    """A call that failed, by a fault that the model can mend or live with. The message is its answer."""


class ToolUnavailable(Exception):
    """A tool whose service is not there: the episode is tried again. Functions may raise it."""


class Tool(ABC):
    """A function that a model may call."""

    name: str
    schema: Mapping[str, Any]
    """{"type": "function", "function": {"name", "description", "parameters"}}."""

    @abstractmethod
    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Return the tool's answer, of any type. Raises ToolError and ToolUnavailable."""


def answer_text(value: Any, *, max_bytes: int) -> str:
    """Return an answer as text of at most `max_bytes`: a text as it is, all else as JSON. What is cut is said.

    Raises ToolError for bytes that are no text.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            value = bytes(value).decode()
        except UnicodeDecodeError:
            raise ToolError(f"the tool answered {len(value)} bytes that are no text") from None
    if not isinstance(value, str):
        value = _as_text(value)
    data = value.encode(errors="replace")  # half of a surrogate pair is no text
    if len(data) <= max_bytes:
        return data.decode()
    kept = data[:max_bytes].decode(errors="ignore")
    return f"{kept}\n[cut: the answer has {len(data)} bytes, and these are the first {max_bytes}]"


def _as_text(value: Any) -> str:
    try:
        return to_json(value).decode()
    except (PydanticSerializationError, ValueError, RecursionError):  # such as a matrix, or a list of itself
        pass
    try:
        return str(value)
    except Exception as error:  # of the object's own code
        raise ToolError(f"the tool answered {type(value).__name__}, which has no text") from error

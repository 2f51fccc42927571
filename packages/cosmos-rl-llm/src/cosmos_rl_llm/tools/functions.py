"""Typed Python functions as tools: the schema from the signature and the docstring, and the call.

def add(a: int, b: int) -> int:
    \"\"\"Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    \"\"\"
    return a + b
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, NotRequired, get_type_hints

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError
from cosmos_rl_llm.tools.tool import Tool, ToolError, ToolUnavailable

MAX_HUNG = 64
"""Threads of one function that may go on after their time limit; then it counts as dead."""


class FunctionTool(Tool):
    """A Python function. Plain ones run in threads, which a time limit leaves behind but cannot stop."""

    def __init__(self, function: Callable[..., Any], *, where: str) -> None:
        """where: location of the function, for messages. Raises UserError for one that has no schema."""
        self._function, self._where = function, where
        self.name = function.__name__
        self._arguments, self.schema = _schema_of(function, where)
        self._hung = 0

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> Any:
        try:
            values = self._arguments.validate_python(dict(arguments))
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise ToolError(f"wrong arguments of {self.name}: {'; '.join(faults)}") from None
        if self._hung >= MAX_HUNG:
            raise ToolUnavailable(f"{self._where} has {self._hung} calls that went on after their time limit")
        if inspect.iscoroutinefunction(self._function):
            work = asyncio.ensure_future(self._function(**values))
        else:
            work = _in_thread(lambda: self._function(**values))
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await asyncio.shield(work)
        except ToolUnavailable:
            raise
        except asyncio.CancelledError:
            if not work.cancelled():
                raise
            raise ToolError(f"{self.name} was cancelled") from None
        except TimeoutError as error:
            if not limit.expired():
                raise ToolError(f"TimeoutError: {error}") from error
            raise ToolError(f"{self.name} did not answer within {timeout_s:g} s") from None
        except Exception as error:  # a user's function may raise anything; the model reads it
            raise ToolError(f"{type(error).__name__}: {error}") from error
        finally:
            if not work.done():
                self._leave(work)

    def _leave(self, work: asyncio.Future[Any]) -> None:
        """Leave a call behind: cancel it, and count it until it has ended."""
        self._hung += 1

        def ended(work: asyncio.Future[Any]) -> None:
            self._hung -= 1
            if not work.cancelled():
                work.exception()  # nobody waits for it

        work.add_done_callback(ended)
        if isinstance(work, asyncio.Task):
            work.cancel()


@cache
def function_tool(name: str) -> FunctionTool:
    """Return the tool "module:attribute". Raises UserError."""
    if ":" not in name:
        raise UserError(f'tool {name!r}: write "module:function", such as "calculator:add"')
    function = plugins.load("tools", name)
    if not inspect.isroutine(function):
        raise UserError(f"tool {name}: {type(function).__name__} instead of a function; name one with `def`")
    return FunctionTool(function, where=name)


def _in_thread(function: Callable[[], Any]) -> asyncio.Future[Any]:
    """Run a function in a thread of its own, so that one that hangs takes no place of another, nor holds up the end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def finish(result: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = context.run(function)
        except StopIteration:  # a future cannot have it
            failure = RuntimeError("StopIteration")
        except Exception as error:
            failure = error
        except BaseException as error:  # SystemExit ends the thread alone
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=run, name="tool", daemon=True).start()
    return future


class _Untitled(GenerateJsonSchema):
    """Schemas without the titles that repeat names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _schema_of(function: Callable[..., Any], where: str) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    """Return the validation of a function's arguments and its schema. Raises UserError."""
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    description, about, _ = parse_google_format_docstring(inspect.getdoc(function) or "")
    if not description:
        raise UserError(f"tool {where} has no docstring, and that is what the model reads about it; write one")
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:  # names in annotations are evaluated
        raise UserError(f"tool {where}: its types cannot be read: {error}; import what they name") from error
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"tool {where}: a model cannot give {parameter}; name each parameter")
        if parameter.name not in hints:
            raise UserError(f"tool {where}: parameter {parameter.name} has no type; write {parameter.name}: int")
        text = (about or {}).get(parameter.name)
        hint = Annotated[hints[parameter.name], Field(description=text)] if text else hints[parameter.name]
        fields[parameter.name] = hint if parameter.default is parameter.empty else NotRequired[hint]  # type: ignore[valid-type]
    typed = TypedDict(function.__name__, fields)  # type: ignore[operator]
    typed.__pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=False)  # type: ignore[attr-defined]
    try:
        adapter = TypeAdapter(typed)
        parameters = adapter.json_schema(schema_generator=_Untitled)
    except PydanticUserError as error:
        raise UserError(f"tool {where}: a type has no JSON schema: {error}; use JSON's types") from error
    parameters = {"properties": {}, **{key: value for key, value in parameters.items() if key != "title"}}
    schema = {"name": function.__name__, "description": description, "parameters": parameters}
    return adapter, {"type": "function", "function": schema}

"""Tests that run beside an answer, in another protected process, and call its functions over a socket.

    the tests (`test`) --[operation, arguments]--> the answer (`serve`)
                       <--plain data, or the number of an object--

The answer's process never has the tests: it gets arguments and returns plain data, which are compared where the answer
cannot reach. Any other object stays where it is. The tests may call, index and iterate it and get and set its
attributes, but not compare it or compute with it: that would ask the answer for the verdict.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.abc
import importlib.util
import json
import operator
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

FILE = "answer.py"
WRONG, ERROR, BROKEN_TEST, NO_MEMORY = 1, 2, 3, 77
"""Exit codes: an assertion failed; any other exception; the test itself cannot run; MemoryError."""
_CHANNEL = 3
_PLAIN = (type(None), bool, int, float, str)
_IMMUTABLE = {"tuple": tuple, "set": set, "frozenset": frozenset}
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "call": lambda function, *positional, **named: function(*positional, **named),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "len": len,
    "iter": iter,
    "next": next,
    "bool": bool,
    "str": str,
}


class BrokenTestError(Exception):
    """A test passes the program a value that cannot be sent to it: the test is wrong, whatever the program does."""


class RemoteError(Exception):
    """An exception of the answer, of a class of its own."""


class _Source(importlib.abc.InspectLoader):
    """A program as a module, for tracebacks with its lines."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.code: Any = None

    def get_source(self, fullname: str) -> str:
        return self._source

    def get_code(self, fullname: str) -> Any:
        self.code = compile(self._source, FILE, "exec", dont_inherit=True)
        return self.code


def run(source: str, names: Mapping[str, Any]) -> int:
    """Run a program as `__main__`, with names that exist before it. Returns the exit code; prints a traceback."""
    loader = _Source(source)
    spec = importlib.util.spec_from_loader("__main__", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(names)
    sys.modules["__main__"] = module
    try:
        loader.exec_module(module)
    except SystemExit:
        raise
    except BaseException as error:  # of a program that may raise anything
        place = error.__traceback__
        while place is not None and place.tb_frame.f_code.co_filename != FILE:
            place = place.tb_next
        traceback.print_exception(type(error), error, place)
        if isinstance(error, BrokenTestError) or loader.code is None:
            return BROKEN_TEST
        return NO_MEMORY if isinstance(error, MemoryError) else WRONG if isinstance(error, AssertionError) else ERROR
    return 0


def serve(source: str) -> int:
    """Run an answer, then what its tests ask for, until they end."""
    code = run(source, {})
    if code:
        return code
    objects = _Objects()
    with open(_CHANNEL, "rb", closefd=False) as requests, open(_CHANNEL, "wb", closefd=False) as replies:
        replies.write(_line(objects.encode(_public(vars(sys.modules["__main__"])))))
        replies.flush()
        for request in requests:
            replies.write(objects.answer(request))
            replies.flush()
    return 0


def _public(names: Mapping[str, Any]) -> dict[str, Any]:
    """The names of an answer that its tests can use: those of Python itself stay Python's."""
    own = {*vars(builtins), *sys.stdlib_module_names}
    return {name: value for name, value in names.items() if not name.startswith("__") and name not in own}


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


class _Objects:
    """The answer's objects that its tests have, by number."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def encode(self, value: Any) -> Any:
        return _encode(value, self._number)

    def answer(self, request: bytes) -> bytes:
        operation, positional, named = json.loads(request)
        try:
            positional, named = _decode(positional, self._objects.__getitem__), _decode(named, None)
            result = _OPERATIONS[operation](*positional, **named)
            return _line({"value": self.encode(result), "arguments": self.encode(positional)})
        except MemoryError:
            os._exit(NO_MEMORY)
        except Exception as error:  # of the answer, for its tests
            return _line({"error": type(error).__name__, "text": str(error)})

    def _number(self, value: Any) -> Any:
        if tolist := getattr(type(value), "tolist", None):  # of arrays and their numbers
            return self.encode(tolist(value))
        if id(value) not in self._numbers:  # it is kept, so that no other object gets its id
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return {"object": self._numbers[id(value)]}


def _encode(value: Any, number: Callable[[Any], Any]) -> Any:
    """Return plain data as JSON, of subclasses as of their base, and any other object as `number` does."""
    if isinstance(value, _PLAIN):
        base: Any = next(kind for kind in _PLAIN if isinstance(value, kind))
        return value if type(value) is base else base(value)
    if isinstance(value, list):
        return [_encode(each, number) for each in value]
    if isinstance(value, dict):
        return {"dict": [[_encode(key, number), _encode(each, number)] for key, each in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for name, kind in _IMMUTABLE.items():
        if isinstance(value, kind):
            return {name: [_encode(each, number) for each in value]}
    return number(value)


def _decode(value: Any, find: Callable[[int], Any] | None) -> Any:
    if isinstance(value, list):
        return [_decode(each, find) for each in value]
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name == "object":
        assert find is not None
        return find(content)
    if name == "dict":
        return {_decode(key, find): _decode(each, find) for key, each in content}
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "complex":
        return complex(*content)
    return _IMMUTABLE[name](_decode(each, find) for each in content)


def test(source: str) -> int:
    """Run tests with the names of the answer, which is at the other end of the channel."""
    answer = _Answer()
    modules = [name for name in sys.stdlib_module_names if name in source and not name.startswith("_")]
    names = {name: importlib.import_module(name) for name in modules if name in sys.modules}
    return run(source, {**names, **answer.names()})


class _Answer:
    """The answer's process, for its tests."""

    def __init__(self) -> None:
        self._replies = open(_CHANNEL, "rb", closefd=False)  # noqa: SIM115
        self._remotes: dict[int, Remote] = {}

    def names(self) -> dict[str, Any]:
        names = _decode(self._receive(), self._remote)
        return _public(names) if isinstance(names, dict) else {}

    def ask(self, operation: str, *positional: Any, **named: Any) -> Any:
        request = [operation, _encode([*positional], _number), _encode(named, _number)]
        data = _line(request)
        while data:
            data = data[os.write(_CHANNEL, data) :]
        reply = self._receive()
        if "error" in reply:
            raise _exception(str(reply["error"]), str(reply["text"]), operation)
        if reply["value"] is not None:
            return _decode(reply["value"], self._remote)
        for ours, theirs in zip(positional, _decode(reply["arguments"], self._remote)):  # as of a sort in place
            if isinstance(ours, list) and isinstance(theirs, list):
                ours[:] = theirs
            elif isinstance(ours, dict | set) and type(ours) is type(theirs):
                ours.clear()
                ours.update(theirs)
        return None

    def _receive(self) -> Any:
        line = self._replies.readline()
        if not line:
            raise RemoteError("the answer's process has ended")
        return json.loads(line)

    def _remote(self, number: int) -> Remote:
        if number not in self._remotes:
            self._remotes[number] = Remote(self, number)
        return self._remotes[number]


def _exception(name: str, text: str, operation: str) -> Exception:
    """The exception that a test sees: Python's own by its name, where it cannot end a loop of the test early."""
    kind = getattr(builtins, name, None)
    stops = name in ("StopIteration", "StopAsyncIteration") and operation != "next"
    if isinstance(kind, type) and issubclass(kind, Exception) and not stops and not issubclass(kind, UnicodeError):
        return kind(text)
    return RemoteError(f"{name}: {text}")


class Remote:
    """An object in the answer's process."""

    def __init__(self, answer: _Answer, number: int) -> None:
        vars(self).update(_answer=answer, _number=number)

    def _ask(self, operation: str, *positional: Any, **named: Any) -> Any:
        return self._answer.ask(operation, self, *positional, **named)

    __getattr__ = functools.partialmethod(_ask, "getattr")
    __call__ = functools.partialmethod(_ask, "call")
    __getitem__ = functools.partialmethod(_ask, "getitem")
    __setitem__ = functools.partialmethod(_ask, "setitem")
    __len__ = functools.partialmethod(_ask, "len")
    __iter__ = functools.partialmethod(_ask, "iter")
    __next__ = functools.partialmethod(_ask, "next")
    __bool__ = functools.partialmethod(_ask, "bool")

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __str__(self) -> str:
        return str(self._ask("str"))


ROLES: Mapping[str, Callable[[str], int]] = {"program": lambda source: run(source, {}), "answer": serve, "tests": test}
"""The work of a protected process, from its source to its exit code."""


def _number(value: Any) -> Any:
    if isinstance(value, Remote):
        return {"object": vars(value)["_number"]}
    raise BrokenTestError(f"a test passes a {type(value).__name__}, and only plain data can be sent to an answer")

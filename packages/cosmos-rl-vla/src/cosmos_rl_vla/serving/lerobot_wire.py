"""Messages of lerobot's asynchronous inference, which hold pickles: read and written here without unpickling.

    Observation   {1: part of a message, 2: bytes}     pickle of TimedObservation, in parts
    PolicySetup   {1: bytes}                           pickle of RemotePolicyConfig
    Actions       {1: bytes}                           pickle of a list of TimedAction

A pickle is a program that calls the functions it names. The reader is a machine for those opcodes that pickles of plain
values, numpy arrays and these classes consist of: it records which names are called with what, and calls none.
"""

from __future__ import annotations

import math
import pickletools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from cosmos_rl_vla.serving.observations import BadObservation

MAX_BYTES = 64 * 2**20
"""Of a message."""
BEGIN, MIDDLE, END = 1, 2, 3
"""Parts of a message."""
_ARRAYS = ("multiarray._reconstruct", "numeric._frombuffer", "multiarray.scalar")
_LITERALS = "BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES"
_PUSHED = frozenset((*_LITERALS.split(), "BINBYTES8", "BYTEARRAY8"))
_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}
_POPPED = {"APPEND": 1, "APPENDS": 0, "BUILD": 1, "NEWOBJ": 2, "REDUCE": 2, "SETITEM": 2, "SETITEMS": 0}
_POPPED |= {"STACK_GLOBAL": 2, "TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
"""Opcodes that combine values, and how many; 0: those above the mark."""
_FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions that a damaged or malicious pickle raises on the way."""


@dataclass(frozen=True, slots=True)
class PickledName:
    """A function or class that a pickle names."""

    name: str


@dataclass(slots=True)
class PickledCall:
    """A call that a pickle asks for, and the state that it gives to the result."""

    name: str
    arguments: Any
    state: Any = None


def read_pickle(content: bytes) -> Any:
    """Return the plain values, arrays and `PickledCall`s of a pickle. Raises BadObservation for anything else."""
    try:
        return with_arrays(_Machine().run(content))
    except RecursionError:
        raise BadObservation("a pickle that is nested too deeply") from None
    except _FAULTS as error:
        raise BadObservation(f"not a pickle as lerobot's client sends it: {error}") from error


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(content):
            self._step(opcode.name, argument)
        (result,) = self._stack
        return result

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _PUSHED:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            self._memo[len(self._memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in _POPPED:
            self._combine(name, self._pop(count) if (count := _POPPED[name]) else self._marked())
        elif name == "GLOBAL":
            stack.append(PickledName(_of(str, argument).replace(" ", ".")))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"opcode {name}")

    def _combine(self, name: str, values: list[Any]) -> None:
        """Put what was popped into one value, or into the one on top of the stack."""
        stack = self._stack
        if name.startswith("TUPLE"):
            stack.append(tuple(values))
        elif name.startswith("APPEND"):
            _of(list, stack[-1]).extend(values)
        elif name.startswith("SETITEM"):
            keys = [_of(str, key) for key in values[::2]]
            _of(dict, stack[-1]).update(zip(keys, values[1::2], strict=True))
        elif name == "STACK_GLOBAL":
            stack.append(PickledName(".".join(_of(str, part) for part in values)))
        elif name == "BUILD":
            _of(PickledCall, stack[-1]).state = values[0]
        else:  # a call
            stack.append(PickledCall(_of(PickledName, values[0]).name, values[1]))

    def _pop(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise ValueError("an empty stack")
        values = self._stack[-count:]
        del self._stack[-count:]
        return values

    def _marked(self) -> list[Any]:
        return self._pop(count) if (count := len(self._stack) - self._marks.pop()) else []


def with_arrays(value: Any) -> Any:
    """Return a value with arrays and numbers in place of the calls that make them."""
    match value:
        case dict():
            return {key: with_arrays(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(map(with_arrays, value))
        case PickledCall(name, arguments) if name.removeprefix("numpy.").lstrip("_").removeprefix("core.") in _ARRAYS:
            return _array(name.rpartition(".")[2], arguments, value.state)
        case PickledCall(name, arguments, state) if name.startswith("lerobot."):
            return PickledCall(name, with_arrays(arguments), with_arrays(state))
        case PickledCall(name) | PickledName(name):
            raise ValueError(f"{name[:80]} in a pickle")
    return value


def _array(function: str, arguments: Any, state: Any) -> Any:
    if function == "scalar":
        dtype, content = arguments
        return np.frombuffer(content, _dtype(dtype))[0]
    if function == "_frombuffer":
        content, dtype, shape, order = arguments
    else:
        _, shape, dtype, fortran, content = state
        order = "F" if fortran else "C"
    dtype = _dtype(dtype)
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"an array of {shape} {dtype} in {len(content)} bytes")
    return np.frombuffer(content, dtype).reshape(shape, order=order)


def _dtype(value: Any) -> np.dtype[Any]:
    call = _of(PickledCall, value)
    if call.name != "numpy.dtype":
        raise ValueError(f"{call.name[:80]} as a dtype")
    dtype, order = np.dtype(_of(str, call.arguments[0])), (call.state or (3, "|"))[1]
    if dtype.kind not in "biuf" or order not in ("<", "|", "="):
        raise ValueError(f"an array of {dtype} with byte order {order!r}")
    return dtype


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} in place of {kind.__name__}")
    return value


def pickled_actions(actions: np.ndarray, *, module: str, timestep: int, timestamp: float, step_s: float) -> bytes:
    """Return the pickle of a list of `module`.TimedAction, of consecutive steps.

    actions: [n, D]; they become tensors of torch on the client. timestamp: of the first, in seconds. step_s: between
    two of them.
    """
    made, tensor = f"c{module}\nTimedAction\n".encode(), b"ctorch\ntensor\n"
    parts = [b"\x80\x02](" if len(actions) else b"\x80\x02]"]  # PROTO 2, EMPTY_LIST, MARK
    for place, action in enumerate(actions):
        parts.append(made + _float(timestamp + place * step_s) + b"J" + struct.pack("<i", timestep + place))
        # torch.tensor([...]): GLOBAL, EMPTY_LIST, MARK, ... APPENDS, TUPLE1, REDUCE; then TUPLE3, REDUCE
        parts.append(tensor + b"](" + b"".join(map(_float, action)) + b"e\x85R" + b"\x87R")
    return b"".join([*parts, b"e." if len(actions) else b"."])


def _float(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


def _messages(fields: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return classes of messages by name, from the names of their fields in order."""
    file = descriptor_pb2.FileDescriptorProto(name="lerobot_services.proto", package="transport", syntax="proto3")
    for name, names in fields.items():
        message = file.message_type.add(name=name)
        for number, field in enumerate(names, 1):
            kind = message.field.add(name=field, number=number)
            # an enum is an int32 on the wire
            kind.type = kind.TYPE_BYTES if field == "data" else kind.TYPE_INT32
    pool = descriptor_pool.DescriptorPool()  # not the default one: lerobot may be imported too
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"transport.{name}")) for name in fields}


MESSAGES = _messages(
    {"Empty": (), "Observation": ("transfer_state", "data"), "PolicySetup": ("data",), "Actions": ("data",)}
)
"""Classes of the service's messages."""

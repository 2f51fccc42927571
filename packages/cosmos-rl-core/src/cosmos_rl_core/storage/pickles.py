"""Reads the first array of a pickle: numpy arrays and torch tensors, alone or in lists, tuples and dicts. No torch.

    bytes --operations, as pickletools lists them--> a stack --stand-ins for the few names of arrays--> one array

A pickle is a program that calls the functions it names. It is not run here: of its operations only those that build
data are followed, calls are made only to the stand-ins below, and any other operation or name is refused. Neither
Python's unpickler nor that of numpy or torch reads the file (docs/decisions/0015). Work and memory are bounded by the
size of the file: arrays are views of its bytes until the first one is copied out. bfloat16 comes back as float32.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pickletools import genops
from typing import Any

import numpy as np

from cosmos_rl_core.errors import UserError

MAX_OPERATIONS = 100_000
"""Operations of one file; an array takes about 40."""
MAX_DIMS = 32
MAX_DEPTH = 64
"""Lists, tuples and dicts around the first array."""
MAX_KEY = 2**31
"""Integer keys of dicts below it: larger ones can be chosen to collide."""

STORAGE_MAGIC = 0x1950A86A20F9469CFC6C
STORAGE_PROTOCOL = 1001
STORAGES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "|b1",
}
"""Names of torch's storages and the types of their elements."""
NUMBERS = re.compile("[biufc](1|2|4|8|16)")
"""Names of numpy's types of numbers."""

FAULTS = (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError, struct.error)
"""Exceptions that a damaged or malicious pickle can raise on the way."""


class ForbiddenPickle(Exception):
    """An operation or name that no pickle of arrays needs; the message is a phrase."""


def read_array(data: bytes, *, name: str) -> np.ndarray:
    """Return a copy of the first array that a pickle holds: itself, or the first of a list, tuple or dict.

    Raises:
        UserError: it is damaged, holds no array, or asks for anything else (the message names it). Nothing that it
            names has been called then.
    """
    if data[:4] == b"PK\x03\x04":
        raise UserError(f"{name} is an archive of torch.save; save the tensor as safetensors instead")
    try:
        content = PickleMachine(Budget(num_bytes=2 * len(data))).run(io.BytesIO(data))
        for _ in range(MAX_DEPTH):
            match content:
                case Array(view=np.ndarray()):
                    return content.copy()
                case [first, *_]:
                    content = first
                case dict() if content:
                    content = next(iter(content.values()))
                case _:
                    break
    except ForbiddenPickle as refused:
        raise UserError(f"{name}: refused: the pickle asks for {refused}; only arrays and tensors are read") from None
    except FAULTS as error:
        cause = f"{type(error).__name__}: {str(error)[:200]}"
        raise UserError(f"{name} is damaged or no pickle of arrays ({cause})") from None
    raise UserError(f"{name} holds no array but a {type(content).__name__}")


@dataclass(slots=True)
class Budget:
    """The remaining work for one file, with the storages inside of it."""

    num_bytes: int
    """Bytes and characters given to calls. Two calls need each byte of a file: from text to bytes, and to numbers."""
    operations: int = MAX_OPERATIONS

    def operation(self) -> None:
        self.operations -= 1
        if self.operations < 0:
            raise ForbiddenPickle(f"more than {MAX_OPERATIONS} operations")

    def call(self, arguments: tuple[Any, ...]) -> None:
        self.num_bytes -= sum(len(given) for given in arguments if isinstance(given, bytes | bytearray | str))
        if self.num_bytes < 0:
            raise ForbiddenPickle("the same bytes again and again")


@dataclass(frozen=True, slots=True)
class StandIn:
    """Stands for a name."""

    name: str
    call: Callable[..., Any] | None = None
    """The function that a call of it runs; None for a name that is only passed on."""


class PickleMachine:
    """Follows the operations of one pickle."""

    def __init__(
        self,
        budget: Budget,
        *,
        in_storage: bool = False,
        storages: Callable[[StandIn, str], Storage] | None = None,
    ) -> None:
        self._budget = budget
        self._storages = storages
        """Of the archive that this pickle is in: type, key -> storage."""
        self._in_storage = in_storage
        """Whether this is one of the pickles of a torch storage, which hold none themselves."""
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        """The stack under each open mark."""
        self._memo: dict[int, Any] = {}

    def run(self, file: io.BytesIO) -> Any:
        """Return the object that the pickle at the file's position builds, and leave the file at its end.

        Raises:
            Refused: an operation or name that arrays do not need, or too many of them.
        """
        for operation, argument, _ in genops(file):
            self._budget.operation()
            name = operation.name
            if name == "STOP":
                break
            if name in LITERALS:
                self._stack.append(argument)
            elif name in EMPTY:
                self._stack.append(EMPTY[name]())
            elif name in OPERATIONS:
                OPERATIONS[name](self, argument)
            else:
                raise ForbiddenPickle(f"the operation {name}")
        return self._stack.pop()

    def _mark(self, _: None) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _to_mark(self) -> list[Any]:
        """Take all items above the last mark."""
        taken, self._stack = self._stack, self._below.pop()
        return taken

    def _take(self, count: int) -> list[Any]:
        if count > len(self._stack):
            raise IndexError("the stack is empty")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _tuple(self, items: list[Any]) -> None:
        self._stack.append(tuple(items))

    def _append(self, items: list[Any]) -> None:
        self._of(list).extend(items)

    def _set(self, items: list[Any]) -> None:
        for key in items[::2]:  # the hash of a nested tuple takes for ever, and integers can be made to collide
            if type(key) is not str and not (type(key) is int and abs(key) < MAX_KEY):
                raise ForbiddenPickle(f"a dict with {_shown(key)} as a key")
        self._of(dict).update(zip(items[::2], items[1::2], strict=True))

    def _of(self, kind: type) -> Any:
        """The top of the stack, which must be of type `kind`."""
        if type(self._stack[-1]) is not kind:
            raise ForbiddenPickle(f"a {type(self._stack[-1]).__name__} as a {kind.__name__}")
        return self._stack[-1]

    def _remember(self, place: int | None) -> None:
        self._memo[len(self._memo) if place is None else place] = self._stack[-1]

    def _recall(self, place: int) -> None:
        self._stack.append(self._memo[place])

    def _name(self, name: str | None) -> None:
        module, attribute = self._take(2) if name is None else name.split(" ", 1)
        if type(module) is not str or type(attribute) is not str:
            raise ForbiddenPickle("a name that is no text")
        known = STAND_INS.get((module, attribute))
        if known is None:
            raise ForbiddenPickle(f"{module[:80]}.{attribute[:80]}")
        self._stack.append(known)

    def _call(self, _: None) -> None:
        function, arguments = self._take(2)
        if not isinstance(function, StandIn) or type(arguments) is not tuple:
            raise ForbiddenPickle(f"a call of {_shown(function)}")
        self._budget.call(arguments)
        if function is LOAD_STORAGE and not self._in_storage:
            self._stack.append(load_storage(*arguments, budget=self._budget))
        elif function.call is not None:
            self._stack.append(function.call(*arguments))
        else:
            raise ForbiddenPickle(f"a call of {_shown(function)}")

    def _build(self, _: None) -> None:
        (state,) = self._take(1)
        built = self._stack[-1]
        if self._storages is not None and type(built) is dict:
            return  # the state is an attribute of a state dict: the versions of its modules
        if not isinstance(built, Array | Dtype):
            raise ForbiddenPickle(f"the state of {_shown(built)}")
        built.build(*state)

    def _persistent(self, _: None) -> None:
        """("storage", type, key, device, numel) of an archive; inside of a storage's bytes only the type matters."""
        match self._take(1):
            case [("storage", StandIn() as kind, str() as key, *_)] if self._storages is not None:
                self._stack.append(self._storages(kind, key))
            case [("storage", StandIn() as kind, *_)]:
                self._stack.append(kind)
            case [pid]:
                raise ForbiddenPickle(f"an object outside the file ({type(pid).__name__})")


class Dtype:
    """A numpy dtype as pickled: made by its name, then given its byte order."""

    def __init__(self, name: str, *_: Any) -> None:
        if not isinstance(name, str) or not NUMBERS.fullmatch(name):
            raise ForbiddenPickle(f"an array of {_shown(name)}")
        self.dtype = np.dtype(name)

    def build(self, version: int, order: str, *_: Any) -> None:
        if type(order) is not str or order not in "<>|=" or len(order) != 1:
            raise ForbiddenPickle(f"byte order {_shown(order)}")
        self.dtype = self.dtype.newbyteorder(order)  # pyright: ignore[reportArgumentType]


@dataclass(slots=True)
class Array:
    """A numpy array as pickled: made empty, then given its bytes. A view: it costs nothing until copied."""

    view: np.ndarray | None = None
    is_bfloat16: bool = False
    """The view is of uint16, which are the bits of bfloat16."""

    def build(self, version: int, shape: Any, dtype: Dtype, fortran: bool, data: bytes) -> None:
        self.view = array_of(data, dtype, shape, "F" if fortran is True else "C").view

    def copy(self) -> np.ndarray:
        assert self.view is not None
        return widen(self.view) if self.is_bfloat16 else self.view.copy()


@dataclass(frozen=True, slots=True)
class Storage:
    """The flat memory that tensors are views of."""

    elements: np.ndarray
    is_bfloat16: bool


def widen(halves: np.ndarray) -> np.ndarray:
    """bfloat16 as uint16 -> float32, exactly."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def array_of(data: bytes, dtype: Dtype, shape: Any, order: Any) -> Array:
    """numpy's `_frombuffer`."""
    if not isinstance(dtype, Dtype) or not isinstance(data, bytes | bytearray) or order not in ("C", "F"):
        raise ForbiddenPickle("an array of objects")
    return Array(np.frombuffer(data, dtype.dtype).reshape(_sizes(shape), order=order))


def tensor_of(storage: Storage, offset: int, size: Any, stride: Any, *_: Any) -> Array:
    """torch's `_rebuild_tensor_v2`: a strided view of a storage, never outside of it."""
    size, stride, (offset,) = _sizes(size), _sizes(stride), _sizes((offset,))
    if not isinstance(storage, Storage) or len(size) != len(stride):
        raise ForbiddenPickle("a tensor without a storage")
    elements = storage.elements
    if 0 in size:
        return Array(np.zeros(size, elements.dtype), storage.is_bfloat16)
    last = offset + sum((length - 1) * step for length, step in zip(size, stride))
    if last >= len(elements) or prod(size) > len(elements):
        raise ForbiddenPickle("a tensor larger than its storage")
    steps = [step * elements.itemsize for step in stride]
    return Array(np.lib.stride_tricks.as_strided(elements[offset:], size, steps), storage.is_bfloat16)


def load_storage(data: bytes, *, budget: Budget) -> Storage:
    """Read the bytes of a torch storage: pickles of magic, protocol, system, type, keys; then count and elements."""
    file = io.BytesIO(data)
    magic, protocol, system, kind, _ = (PickleMachine(budget, in_storage=True).run(file) for _ in range(5))
    if (magic, protocol) != (STORAGE_MAGIC, STORAGE_PROTOCOL) or system["little_endian"] is not True:
        raise ForbiddenPickle("a storage of an unknown format")
    (count,) = struct.unpack("<q", file.read(8))
    dtype = STORAGES[kind.name.removeprefix("torch.")]
    is_bfloat16 = dtype == "bfloat16"
    elements = np.frombuffer(data, "<u2" if is_bfloat16 else dtype, count=count, offset=file.tell())
    return Storage(elements, is_bfloat16)


def _sizes(given: Any) -> tuple[int, ...]:
    """A shape or strides: a few natural numbers."""
    if not isinstance(given, tuple | list) or len(given) > MAX_DIMS:
        raise ForbiddenPickle("an array without a shape")
    if any(type(size) is not int or size < 0 for size in given):
        raise ForbiddenPickle("a negative size, or none")
    return tuple(given)


def _shown(value: Any) -> str:
    """A value for a message: nested ones can be longer than any memory."""
    if isinstance(value, StandIn):
        return value.name
    return repr(value[:40]) if isinstance(value, str) else f"a {type(value).__name__}"


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ForbiddenPickle(f"the codec {_shown(encoding)}")
    return text.encode("latin1")


def _stand_ins() -> Mapping[tuple[str, str], StandIn]:
    """The names that pickles of numpy arrays and torch tensors ask for."""
    ndarray = StandIn("numpy.ndarray")

    def reconstruct(kind: StandIn, shape: Any, code: Any) -> Array:
        if kind is not ndarray:
            raise ForbiddenPickle(f"an array of the class {_shown(kind)}")
        return Array()

    known: dict[tuple[str, str], Callable[..., Any]] = {
        ("numpy", "dtype"): Dtype,
        **{(f"numpy.{core}.multiarray", "_reconstruct"): reconstruct for core in ("core", "_core")},
        **{(f"numpy.{core}.numeric", "_frombuffer"): array_of for core in ("core", "_core")},
        ("__builtin__", "bytes"): lambda: b"",  # how pickles of protocol 2 hold no bytes
        ("_codecs", "encode"): _latin1,  # and how they hold some
        ("collections", "OrderedDict"): lambda: {},  # the backward hooks of a tensor: none
        ("torch._utils", "_rebuild_tensor_v2"): tensor_of,
        ("torch._utils", "_rebuild_parameter"): lambda data, requires_grad, hooks: data,
    }
    return {
        ("numpy", "ndarray"): ndarray,
        ("torch.storage", "_load_from_bytes"): LOAD_STORAGE,
        **{("torch", name): StandIn(f"torch.{name}") for name in STORAGES},
        **{at: StandIn(".".join(at), call) for at, call in known.items()},
    }


LOAD_STORAGE = StandIn("torch.storage._load_from_bytes")
STAND_INS = _stand_ins()

NUMERALS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
STRINGS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8")
LITERALS = frozenset((*NUMERALS, *STRINGS))
"""Operations that put their argument on the stack. Those of text, of protocols 0 and 1, are not among them."""

EMPTY: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
}
"""Operations without an argument that put a value there."""

OPERATIONS: Mapping[str, Callable[[PickleMachine, Any], None]] = {
    "PROTO": lambda machine, version: None,
    "FRAME": lambda machine, length: None,
    "MARK": PickleMachine._mark,
    "TUPLE": lambda machine, _: machine._tuple(machine._to_mark()),
    "TUPLE1": lambda machine, _: machine._tuple(machine._take(1)),
    "TUPLE2": lambda machine, _: machine._tuple(machine._take(2)),
    "TUPLE3": lambda machine, _: machine._tuple(machine._take(3)),
    "APPEND": lambda machine, _: machine._append(machine._take(1)),
    "APPENDS": lambda machine, _: machine._append(machine._to_mark()),
    "SETITEM": lambda machine, _: machine._set(machine._take(2)),
    "SETITEMS": lambda machine, _: machine._set(machine._to_mark()),
    "MEMOIZE": PickleMachine._remember,
    "BINPUT": PickleMachine._remember,
    "LONG_BINPUT": PickleMachine._remember,
    "BINGET": PickleMachine._recall,
    "LONG_BINGET": PickleMachine._recall,
    "GLOBAL": PickleMachine._name,
    "STACK_GLOBAL": PickleMachine._name,
    "REDUCE": PickleMachine._call,
    "BUILD": PickleMachine._build,
    "BINPERSID": PickleMachine._persistent,
}

"""Finds the arrays of a pickle: the program of the child process of `pickles`. Needs the standard library alone.

    stdin: a pickle --Unpickler, which records calls--> arrays --> stdout: a line of JSON that describes them | bytes

A pickle is a program that calls the functions it names. Here each name that pickles of arrays need is a `Name`, whose
calls are recorded, and any other is refused: nothing is imported or called for it. The unpickler can still be kept busy
(a tuple of shared tuples is hashed as a tree) or made to allocate; the limits of this process end that.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import resource
import sys
from collections.abc import Callable

MAX_DEPTH = 64
"""Lists, tuples and dicts around the first array."""
STORAGES = {
    "torch.DoubleStorage": "<f8",
    "torch.FloatStorage": "<f4",
    "torch.HalfStorage": "<f2",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "<i8",
    "torch.IntStorage": "<i4",
    "torch.ShortStorage": "<i2",
    "torch.CharStorage": "<i1",
    "torch.ByteStorage": "<u1",
    "torch.BoolStorage": "|b1",
}
"""Names of torch's storages and the types of their elements."""
NAMES = {
    *STORAGES,
    "__builtin__.bytes",
    "_codecs.encode",
    "collections.OrderedDict",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.numeric._frombuffer",
    "numpy.dtype",
    "numpy.ndarray",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_tensor_v2",
    "torch.storage._load_from_bytes",
}
"""The names that pickles of numpy arrays and torch tensors ask for."""
NUMBERS = re.compile("[biufc](1|2|4|8|16)")
"""Names of numpy's types of numbers."""
FAULTS = (ArithmeticError, AttributeError, EOFError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that a damaged or malicious pickle raises on the way, besides UnpicklingError."""


Answer = dict[str, object]
"""A line of JSON, or the part of it that describes one array."""
Content = bytes | bytearray | memoryview


class RefusedPickle(Exception):
    """A name or value that no pickle of arrays needs; the message is a phrase."""


class Call:
    """A call that a pickle asks for, and the state that it gives to the result."""

    __slots__ = ("arguments", "name", "state")
    __match_args__ = ("name", "arguments", "state")

    def __init__(self, name: str, arguments: object) -> None:
        self.name, self.arguments = name, arguments
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class StateDict(dict):
    """An OrderedDict. That of a model has a state too, the versions of its modules, which nothing here needs."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


class Name:
    """A function or class that a pickle names. As it has __setstate__, the unpickler sets no attributes of it."""

    __slots__ = ("name",)
    __match_args__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: object) -> Call | StateDict:
        return StateDict() if self.name == "collections.OrderedDict" else Call(self.name, arguments)

    def __setstate__(self, state: object) -> None:
        raise RefusedPickle(f"the state of {self.name}")


class ArrayUnpickler(pickle.Unpickler):
    """An unpickler that records calls. An object outside of the pickle is a call of "persistent"."""

    def find_class(self, module: str, name: str) -> Name:
        known = f"{module}.{name}".replace("numpy.core.", "numpy._core.")  # its name before numpy 2
        if known not in NAMES:
            raise RefusedPickle(f"{module[:80]}.{name[:80]}")
        return Name(known)

    def persistent_load(self, pid: object) -> Call:
        return Call("persistent", pid)


def array_of(made: object) -> tuple[Answer, Content | None]:
    """Return the description of an array, and its bytes; None for those outside of the pickle.

    `pickles` checks shape, strides and offset: here they may be anything.
    """
    match made:
        case Call("torch._utils._rebuild_parameter", (data, *_)):
            return array_of(data)
        case Call("torch._utils._rebuild_tensor_v2", (storage, offset, shape, strides, *_)):
            described, content = storage_of(storage)
            return {**described, "offset": offset, "shape": shape, "strides": strides}, content
        case Call("numpy._core.numeric._frombuffer", (content, dtype, shape, order)):
            return {"dtype": dtype_of(dtype), "shape": shape, "order": order}, bytes_of(content)
        case Call(
            "numpy._core.multiarray._reconstruct",
            (Name("numpy.ndarray"), *_),
            (_, shape, dtype, fortran, content),
        ):
            order = "F" if fortran is True else "C"
            return {"dtype": dtype_of(dtype), "shape": shape, "order": order}, bytes_of(content)
    raise RefusedPickle(f"{made.name if isinstance(made, Call) else type(made).__name__} as an array")


def storage_of(made: object) -> tuple[Answer, Content | None]:
    """Return the description and bytes of the flat memory that a tensor is a view of."""
    match made:
        case Call("persistent", ("storage", Name(kind), str(key), *_)):
            return {"dtype": STORAGES[kind], "storage": key}, None
        case Call("torch.storage._load_from_bytes", (content,)):
            file = io.BytesIO(bytes_of(content))
            match [ArrayUnpickler(file).load() for _ in range(5)]:
                case [
                    0x1950A86A20F9469CFC6C,  # torch.serialization.MAGIC_NUMBER
                    1001,  # its PROTOCOL_VERSION
                    {"little_endian": True},
                    Call("persistent", ("storage", Name(kind), *_)),
                    _,
                ]:
                    return {"dtype": STORAGES[kind]}, file.getbuffer()[file.tell() + 8 :]  # behind their number
            raise RefusedPickle("a storage of an unknown format")
    raise RefusedPickle("a tensor without a storage")


def dtype_of(made: object) -> str:
    """Return the type of an array's elements as text, such as <f4."""
    match made:
        case Call("numpy.dtype", (str(name), *_), (_, "<" | ">" | "|" | "=" as order, *_)) if NUMBERS.fullmatch(name):
            return order + name
        case Call("numpy.dtype", (str(name), *_)):
            raise RefusedPickle(f"an array of {name[:40]!r}")
    raise RefusedPickle("an array of objects")


def bytes_of(made: object) -> bytes | bytearray:
    """Return bytes, which pickles of protocol 2 hold as text."""
    match made:
        case bytes() | bytearray():
            return made
        case Call("_codecs.encode", (str(text), "latin1")):
            return text.encode("latin1")
        case Call("__builtin__.bytes", ()):
            return b""
    raise RefusedPickle("an array of objects")


def first_array(data: bytes) -> tuple[Answer, Content]:
    """Return the answer for the first array of a pickle, itself or that of a list, tuple or dict, and its bytes."""
    content = ArrayUnpickler(io.BytesIO(data)).load()
    for _ in range(MAX_DEPTH):
        match content:
            case Call():
                described, inside = array_of(content)
                if inside is None:
                    raise RefusedPickle("an object outside the file")
                return {"arrays": {"": described}}, inside
            case [first, *_]:
                content = first
            case dict() if content:
                content = next(iter(content.values()))
            case _:
                break
    return {"other": type(content).__name__}, b""


def state_dict(data: bytes) -> tuple[Answer, Content]:
    """Return the answer for the tensors of a flat dict, whose bytes are outside of the pickle, and no bytes."""
    content = ArrayUnpickler(io.BytesIO(data)).load()
    if not isinstance(content, dict) or not all(isinstance(tensor, Call) for tensor in content.values()):
        return {"other": type(content).__name__}, b""
    return {"arrays": {name: array_of(tensor)[0] for name, tensor in content.items()}}, b""


def answer(read: Callable[[bytes], tuple[Answer, Content]], data: bytes) -> tuple[bytes, Content]:
    """Return the line that describes the arrays, or why there are none, and the bytes of an array."""
    try:
        described, content = read(data)
        return json.dumps(described).encode(), content
    except RefusedPickle as refused:
        reason = {"refused": ascii(str(refused))[1:-1]}
    except (*FAULTS, pickle.UnpicklingError) as error:
        reason = {"damaged": f"{type(error).__name__}: {ascii(str(error)[:200])[1:-1]}"}
    return json.dumps(reason).encode(), b""


def main(read: str, cpu_s: str, memory_bytes: str) -> None:
    limits = {
        resource.RLIMIT_CPU: int(cpu_s),
        resource.RLIMIT_AS: int(memory_bytes),
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 0,  # stdin and stdout are open; no other file or socket can be
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))
    try:
        line, content = answer({"first": first_array, "archive": state_dict}[read], sys.stdin.buffer.read())
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    except MemoryError:
        os.abort()  # as the other limits end it
    os._exit(0)  # freeing nested objects takes time


if __name__ == "__main__":
    main(*sys.argv[1:])

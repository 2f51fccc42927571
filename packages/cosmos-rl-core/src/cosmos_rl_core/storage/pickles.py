"""Reads the first array of a pickle: numpy arrays and torch tensors, alone or in lists, tuples and dicts. No torch.

    bytes --child process: an Unpickler with an allow-list (unpickle.py)--> type, shape, bytes --checked--> one array

No pickle is loaded in this process. The child has limits of time and memory that follow the size of the file, and
answers with numbers and bytes (docs/decisions/0015). bfloat16 comes back as float32.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from cosmos_rl_core.errors import UserError

PROGRAM = Path(__file__).with_name("unpickle.py")
CPU_S, CPU_BYTES = 1, 16 << 20
"""Limit of processor time: the seconds of any pickle, and the bytes that each further second is for."""
MEMORY_BYTES, MEMORY_COPIES = 256 << 20, 8
"""Limit of memory: the bytes of any pickle, and the copies of it that may be made."""


class ForbiddenPickle(Exception):
    """Something that no pickle of arrays needs; the message is a phrase."""


class DamagedPickle(Exception):
    """No pickle, or one of something else."""


Natural = Annotated[int, msgspec.Meta(ge=0)]
Sizes = Annotated[list[Natural], msgspec.Meta(max_length=32)]


class PickledArray(msgspec.Struct):
    """An array as the child describes it."""

    dtype: str
    shape: Sizes
    storage: str | None = None
    """Key of its storage in an archive; None for bytes in the pickle."""
    order: Literal["C", "F"] = "C"
    offset: Natural = 0
    strides: Sizes | None = None
    """Of a tensor; in elements, as the offset."""


class Unpickled(msgspec.Struct):
    """The answer of the child: one of these."""

    arrays: dict[str, PickledArray] | None = None
    """By name; the first array is ""."""
    other: str = ""
    """Type of an object that is no array and has none."""
    refused: str = ""
    damaged: str = ""


@dataclass(frozen=True, slots=True)
class Array:
    """A view of the bytes of an array."""

    view: np.ndarray
    is_bfloat16: bool
    """The view is of uint16, which are the bits of bfloat16."""

    def copy(self) -> np.ndarray:
        return widen(self.view) if self.is_bfloat16 else self.view.copy()


def read_array(data: bytes, *, name: str) -> np.ndarray:
    """Return a copy of the first array that a pickle holds: itself, or the first of a list, tuple or dict.

    Raises:
        UserError: it is damaged, holds no array, or asks for anything else (the message names it). Nothing that it
            names has been called then.
    """
    if data[:4] == b"PK\x03\x04":
        raise UserError(f"{name} is an archive of torch.save; save the tensor as safetensors instead")
    try:
        answer, content = run_unpickle("first", data)
        if answer.arrays is not None:
            return array_in(content, answer.arrays[""]).copy()
    except ForbiddenPickle as refused:
        raise UserError(f"{name}: refused: the pickle asks for {refused}; only arrays and tensors are read") from None
    except (DamagedPickle, ValueError) as error:
        raise UserError(f"{name} is damaged or no pickle of arrays ({error})") from None
    raise UserError(f"{name} holds no array but a {answer.other}")


def run_unpickle(read: Literal["first", "archive"], data: bytes) -> tuple[Unpickled, memoryview]:
    """Run unpickle.py on a pickle; return its answer and the bytes of the first array.

    Raises:
        ForbiddenPickle: it asks for a name that is not allowed, or for more time or memory than the limits.
        DamagedPickle: it cannot be unpickled.
    """
    cpu_s, memory_bytes = CPU_S + len(data) // CPU_BYTES, MEMORY_BYTES + MEMORY_COPIES * len(data)
    child = subprocess.run(
        [sys.executable, "-I", "-S", str(PROGRAM), read, str(cpu_s), str(memory_bytes)],
        input=data,
        capture_output=True,
        check=False,
    )
    if child.returncode < 0:  # killed at a limit, or the C stack was full
        raise ForbiddenPickle(f"more than {cpu_s} s of processor time or {memory_bytes >> 20} MiB of memory")
    assert child.returncode == 0, child.stderr.decode(errors="replace")
    end = child.stdout.index(b"\n")
    try:
        answer = msgspec.json.decode(child.stdout[:end], type=Unpickled)
    except msgspec.ValidationError as error:
        raise ForbiddenPickle(f"an array without a shape ({error})") from None
    if answer.refused:
        raise ForbiddenPickle(answer.refused)
    if answer.damaged:
        raise DamagedPickle(answer.damaged)
    return answer, memoryview(child.stdout)[end + 1 :]


def array_in(storage: memoryview | np.ndarray, described: PickledArray) -> Array:
    """Return an array of a storage, a buffer of bytes; it is never outside of it.

    Raises:
        ForbiddenPickle: a tensor that is larger than its storage.
        ValueError: an array of another size than its bytes.
    """
    is_bfloat16 = described.dtype == "bfloat16"
    dtype = np.dtype("<u2" if is_bfloat16 else described.dtype)
    shape, stride, offset = described.shape, described.strides, described.offset
    if stride is None:
        return Array(np.frombuffer(storage, dtype).reshape(shape, order=described.order), is_bfloat16)
    if len(shape) != len(stride):
        raise ForbiddenPickle("a tensor with other strides than its shape")
    if 0 in shape:
        return Array(np.zeros(shape, dtype), is_bfloat16)
    elements = np.frombuffer(storage, dtype, count=storage.nbytes // dtype.itemsize)
    last = offset + sum((length - 1) * step for length, step in zip(shape, stride))
    if last >= len(elements) or prod(shape) > len(elements):
        raise ForbiddenPickle("a tensor larger than its storage")
    steps = [step * dtype.itemsize for step in stride]
    return Array(np.lib.stride_tricks.as_strided(elements[offset:], shape, steps), is_bfloat16)


def widen(halves: np.ndarray) -> np.ndarray:
    """bfloat16 as uint16 -> float32, exactly."""
    return (halves.astype(np.uint32) << 16).view(np.float32)

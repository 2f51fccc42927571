"""Locates the arrays in a request body: safetensors, or one .npy file. Copies and unpickles nothing."""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

Buffer = bytes | mmap.mmap
"""Memory of a request body."""

_DTYPES = {
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_NPY_MAGIC = b"\x93NUMPY"
_NPY_SIZES = {
    b"\x01\x00": struct.Struct("<H"),
    b"\x02\x00": struct.Struct("<I"),
    b"\x03\x00": struct.Struct("<I"),
}
"""Encoding of the header's size, by version."""
_NPY_HEADER = re.compile(
    rb"\s*\{\s*'descr':\s*'([<>|][a-zA-Z]\d{0,2})',\s*'fortran_order':\s*(True|False),"
    rb"\s*'shape':\s*\(([\d, ]*)\),?\s*\}\s*"
)
_MAX_NPY_DIGITS = 18
NPY_NAME = "array"
_NPY_DTYPES = {dtype.str: dtype for known in _NAMES for dtype in (known, known.newbyteorder(">"))}
_MAX_INDEX_BYTES = 2**20
_MAX_DIMS = 8

_Size = Annotated[int, msgspec.Meta(ge=0)]


class MalformedBody(ValueError):
    """A body that violates the protocol. The message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayLocation:
    """Location, dtype and shape of an array in a body."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the body."""
    fortran: bool = False
    """Whether the array is in column-major order, as .npy allows."""

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def read(self, buffer: Buffer) -> np.ndarray:
        """Return the array as a view of the buffer, or as a copy if it is not aligned."""
        flat = np.frombuffer(buffer, self.dtype, count=math.prod(self.shape), offset=self.start)
        flat = flat if flat.flags.aligned else flat.copy()
        return flat.reshape(self.shape[::-1]).T if self.fortran else flat.reshape(self.shape)


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=_MAX_DIMS)]
    data_offsets: tuple[_Size, _Size]


_decode_index = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_entry = msgspec.json.Decoder(_Entry).decode


def find_arrays(buffer: Buffer, start: int) -> dict[str, ArrayLocation]:
    """Return the arrays from byte `start` on, by name; a .npy file has a single one, with the name `NPY_NAME`.

    Raises MalformedBody for another format, for Python objects, for an unsupported dtype and for an incomplete array.
    """
    if start == len(buffer):
        return {}
    if buffer[start : start + len(_NPY_MAGIC)] == _NPY_MAGIC:
        return {NPY_NAME: _npy_place(buffer, start)}
    return _safetensors_places(buffer, start)


def _safetensors_places(buffer: Buffer, start: int) -> dict[str, ArrayLocation]:
    if len(buffer) - start < 8:
        raise MalformedBody(f"after the header line come {len(buffer) - start} bytes; safetensors are 8 or more")
    (size,) = struct.unpack("<Q", buffer[start : start + 8])
    data = start + 8 + size
    if size > _MAX_INDEX_BYTES or data > len(buffer):
        raise MalformedBody(f"after the header line comes no safetensors: its index would have {size} bytes")
    try:
        entries = _decode_index(buffer[start + 8 : data])
        entries.pop("__metadata__", None)
        decoded = {name: _decode_entry(raw) for name, raw in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBody(f"the safetensors index is malformed: {error}") from error
    places = {name: _place(name, entry, data) for name, entry in decoded.items()}
    end = data
    for name, place in sorted(places.items(), key=lambda item: item[1].start):
        if place.start != end:
            raise MalformedBody(f"array {name!r} starts at byte {place.start - data} of the data, not {end - data}")
        end = place.start + place.num_bytes
    if end != len(buffer):
        raise MalformedBody(f"the arrays take {end - data} bytes of data; received {len(buffer) - data}")
    return places


def _place(name: str, entry: _Entry, data: int) -> ArrayLocation:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise MalformedBody(f"array {name!r} has dtype {entry.dtype}; supported: {', '.join(_DTYPES)}")
    first, last = entry.data_offsets
    place = ArrayLocation(dtype=dtype, shape=entry.shape, start=data + first)
    if last - first != place.num_bytes:
        raise MalformedBody(
            f"array {name!r} {list(entry.shape)} has {place.num_bytes} bytes, its offsets {last - first}"
        )
    return place


def _npy_place(buffer: Buffer, start: int) -> ArrayLocation:
    text, data = _npy_header(buffer, start)
    match = _NPY_HEADER.fullmatch(text)
    if match is None:
        raise MalformedBody("the .npy header is malformed: numpy.save writes none like it for an array of numbers")
    name, order, sizes = (group.decode() for group in match.groups())
    if name == "|O":
        raise MalformedBody("the .npy file holds Python objects, which are not accepted; send numbers")
    dtype = _NPY_DTYPES.get(name)
    if dtype is None:
        raise MalformedBody(f"the .npy file has dtype {name}; supported: {', '.join(map(str, _NAMES))}")
    lengths = [size.strip() for size in sizes.split(",") if size.strip()]
    if len(lengths) > _MAX_DIMS or not all(size.isdecimal() and len(size) <= _MAX_NPY_DIGITS for size in lengths):
        raise MalformedBody(f"the .npy header is malformed: shape ({sizes[:100]})")
    shape = tuple(int(size) for size in lengths)
    place = ArrayLocation(dtype=dtype, shape=shape, start=data, fortran=order == "True")
    if place.start + place.num_bytes != len(buffer):
        raise MalformedBody(f"the .npy file {list(shape)} of {dtype} does not end where the body does")
    return place


def _npy_header(buffer: Buffer, start: int) -> tuple[bytes, int]:
    """Return the text of a .npy file's header and the offset of its data. (numpy's reader evaluates the text.)"""
    at = start + len(_NPY_MAGIC) + 2
    size = _NPY_SIZES.get(buffer[at - 2 : at])
    if size is None or at + size.size > len(buffer):
        raise MalformedBody("the .npy header is malformed: it is of no version from 1.0 to 3.0")
    (num_bytes,) = size.unpack(buffer[at : at + size.size])
    data = at + size.size + num_bytes
    if num_bytes > _MAX_INDEX_BYTES or data > len(buffer):
        raise MalformedBody(f"the .npy header is malformed: it would have {num_bytes} bytes")
    return buffer[at + size.size : data], data


def safetensors_parts(arrays: Mapping[str, Sequence[np.ndarray]]) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file in pieces; each name has its arrays stacked as [B, ...].

    Raises ValueError for arrays of one name with different shapes or dtypes, or with an unsupported dtype.
    """
    index: dict[str, _Entry] = {}
    end = 0
    widest_first = sorted(arrays.items(), key=lambda item: -item[1][0].dtype.itemsize)  # keeps each one aligned
    for name, parts in widest_first:
        shape, dtype = parts[0].shape, parts[0].dtype.newbyteorder("<")
        for i, part in enumerate(parts):
            if part.shape != shape or part.dtype != parts[0].dtype:
                raise ValueError(
                    f"{name!r} of sample {i} is {part.dtype} {part.shape}; that of sample 0 {dtype} {shape}"
                )
        if dtype not in _NAMES:
            raise ValueError(f"{name!r} has dtype {dtype}; supported: {', '.join(map(str, _NAMES))}")
        start, end = end, end + len(parts) * dtype.itemsize * math.prod(shape)
        index[name] = _Entry(dtype=_NAMES[dtype], shape=(len(parts), *shape), data_offsets=(start, end))
    text = msgspec.json.encode(index)
    text += b" " * (-len(text) % 8)
    yield memoryview(struct.pack("<Q", len(text)) + text)
    for _, parts in widest_first:
        for part in parts:
            little = np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<"))
            yield little.reshape(-1).view(np.uint8).data

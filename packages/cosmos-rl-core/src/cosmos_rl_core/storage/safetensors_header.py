"""The tensors of a safetensors file, by its header alone. No torch.

[8 bytes: n] [n bytes: JSON, name -> dtype, shape, offsets] [the tensors' bytes, one after another]

Headers are not trusted: every tensor has to be inside of the file, and its length has to match its shape.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.json_files import parse_json, read_json_object

MAX_HEADER_BYTES = 100 * 2**20
"""The format's own limit."""
MAX_DIMS = 64
ITEM_BYTES: Mapping[str, int] = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8},
}
"""Bytes of an element, for the types whose elements are whole bytes."""


@dataclass(frozen=True, slots=True)
class TensorPosition:
    """Position of a tensor in a file."""

    start: int
    """First byte."""
    dtype: str
    """In the format's spelling, such as BF16."""
    shape: tuple[int, ...]


def weight_files(directory: Path, pattern: str = "*.safetensors") -> list[Path]:
    """Return the files of the one set of weights in a model's directory that transformers would load.

    Published models have other sets beside it, such as Mistral's consolidated.safetensors. A directory without
    model.safetensors and its index has the files of `pattern`, but none of a copy.

    Raises:
        UserError: the index is not readable.
    """
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = read_json_object(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise UserError(f"{index} has no weight_map from names of weights to files; copy it from the model again")
        return sorted({directory / name for name in names.values()})
    return [path for path in sorted(directory.glob(pattern)) if not path.name.startswith((".", "consolidated"))]


def read_header(file: BufferedIOBase | BinaryIO, *, name: str, alone: bool = False) -> dict[str, TensorPosition]:
    """Return the tensors of an open file by name, without its metadata.

    alone: accept a file that ends after its header.

    Raises:
        UserError: it is not a safetensors file, or its header refers to bytes that the file does not have.
    """
    try:
        file_size = file.seek(0, os.SEEK_END)
        file.seek(0)
        (size,) = struct.unpack("<Q", file.read(8))
        if size > min(MAX_HEADER_BYTES, file_size - 8):
            raise ValueError(f"its header claims {size:,} bytes; the file has {file_size:,}")
        entries = parse_json(file.read(size), where="its header")
        if not isinstance(entries, dict):
            raise ValueError("its header is not an object")
        data = 8 + size
        room = sys.maxsize if alone and file_size == data else file_size - data
        return {key: _place(key, entry, data, room) for key, entry in entries.items() if key != "__metadata__"}
    except (ValueError, struct.error) as error:
        raise UserError(f"{name} is not a safetensors file ({error})") from error


def _place(key: str, entry: Any, data: int, room: int) -> TensorPosition:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]} if _is_shape(shape):
            pass
        case _:
            raise ValueError(f"{key[:200]} has no valid dtype, shape or data_offsets")
    if not 0 <= start <= end <= room:
        raise ValueError(f"{key[:200]} is at bytes {start:,} to {end:,} of {room:,}")
    expected = prod(shape) * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else end - start
    if end - start != expected:
        raise ValueError(f"{key[:200]} has {end - start:,} bytes, but its shape {shape[:8]} of {dtype} {expected:,}")
    return TensorPosition(data + start, dtype, tuple(shape))


def _is_shape(sizes: list[Any]) -> bool:
    return len(sizes) <= MAX_DIMS and all(type(size) is int and 0 <= size < 2**63 for size in sizes)

"""A safetensors file, written in pieces as they come and read box by box, on a disk or in an object store.

[8 bytes: n] [n bytes: JSON, name -> dtype, shape, offsets] [the tensors' bytes, one after another]
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedIOBase
from math import prod

import torch
from torch import Tensor

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.folder import Folder
from cosmos_rl_core.storage.safetensors_header import TensorPosition, read_header

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_FROM_NAME = {name: dtype for dtype, name in _DTYPES.items()}

Spec = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor in a file."""


def num_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return dtype.itemsize * prod(shape)


def by_alignment(specs: Iterable[Spec]) -> list[Spec]:
    """Order tensors so that each starts at a multiple of its element's size: the widest elements first."""
    return sorted(specs, key=lambda spec: -spec[1].itemsize)


def header(specs: Sequence[Spec]) -> bytes:
    """The bytes before the tensors, which follow in the order of `specs`."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, dtype, shape in specs:
        end = start + num_bytes(dtype, shape)
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors start aligned
    return struct.pack("<Q", len(text)) + text


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous and in the host's memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_tensors(folder: Folder, name: str, tensors: Mapping[str, Tensor]) -> str:
    """Write whole tensors into one file and return its SHA-256."""
    specs = by_alignment((key, tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items())

    def parts() -> Iterator[bytes | memoryview]:
        yield header(specs)
        for key, _, _ in specs:
            yield as_bytes(tensors[key])

    return folder.write(name, parts())


class SafetensorsFile:
    """An open file. `read` returns tensors, or whole rows of them.

    with SafetensorsFile(folder, "model/rank_0.safetensors") as file:
        rows = file.read("embed.weight", first=1024, rows=512)
    """

    def __init__(self, folder: Folder, name: str) -> None:
        """Open and read the header. Raises UserError for a file that is not a safetensors file."""
        self._name = f"{folder / name}"
        self._file = folder.open(name)
        self.places: dict[str, TensorPosition] = read_header(self._file, name=self._name)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, name: str, *, first: int = 0, rows: int | None = None) -> Tensor:
        """Return a tensor, or `rows` of its first dim from `first` on."""
        try:
            place = self.places[name]
            dtype = _FROM_NAME[place.dtype]
        except KeyError as error:
            raise UserError(f"{self._name}: no tensor {name} of a supported dtype ({error})") from None
        shape = place.shape
        if rows is not None:
            if not shape or not 0 <= first <= first + rows <= shape[0]:
                raise UserError(f"{self._name}: {name} of shape {list(shape)} has no rows {first} to {first + rows}")
            shape = (rows, *shape[1:])
        skipped = num_bytes(dtype, (first, *place.shape[1:])) if first else 0
        data = torch.empty(num_bytes(dtype, shape), dtype=torch.uint8)
        self._file.seek(place.start + skipped)
        _fill(data.numpy().data, self._file)
        return data.view(dtype).reshape(shape)


def _fill(target: memoryview, file: BufferedIOBase) -> None:
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])
        if not count:
            raise OSError(f"the file ends {len(target) - done} bytes early")
        done += count

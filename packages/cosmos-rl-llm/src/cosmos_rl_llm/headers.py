"""What a safetensors directory holds, from the files' headers alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from cosmos_rl_core.interfaces import UserError
from cosmos_rl_core.types import WeightSpec

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}
_MAX_HEADER_BYTES = 100 * 2**20
"""The format's own limit."""


def read_specs(directory: Path) -> list[WeightSpec]:
    """Return the weights of all *.safetensors in `directory`, by name. Raises UserError for a damaged file."""
    specs = [spec for file in sorted(directory.glob("*.safetensors")) for spec in _read_header(file)]
    return sorted(specs, key=lambda spec: spec.name)


def _read_header(path: Path) -> list[WeightSpec]:
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"its header claims {size} bytes")
            header = json.loads(file.read(size))
    except (OSError, ValueError, struct.error) as error:
        raise UserError(f"model.path: {path} is not a safetensors file ({error})") from error
    return [
        WeightSpec(name=name, shape=tuple(entry["shape"]), dtype=_DTYPES.get(entry["dtype"]) or str(entry["dtype"]))
        for name, entry in header.items()
        if name != "__metadata__"
    ]

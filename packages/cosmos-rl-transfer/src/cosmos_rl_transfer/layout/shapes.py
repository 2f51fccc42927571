"""Names, shapes and dtypes of a model's tensors, from a preset or from files; no tensor is read.

llama-8b                          a preset (`decoder.PRESETS`)
model.safetensors.index.json      the headers of the files it names, which lie beside it
model.safetensors                 its header
config.json                       arithmetic, for the families that `decoder.decoder_of` knows
a folder                          the first of these files that it has
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.safetensors_header import read_header
from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.decoder import PRESETS, Decoder, decoder_of
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES

_DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
_FILES = ("model.safetensors.index.json", "model.safetensors", "config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The tensors of a model."""

    name: str
    specs: tuple[WeightSpec, ...]
    """In the order of the forward pass, as far as it is known."""
    kv_heads: int | None = None
    """Key-value heads, which tensor parallelism keeps whole; None where nobody says."""

    @classmethod
    def of(cls, decoder: Decoder, *, name: str) -> Shapes:
        """Return the shapes of a model of these sizes."""
        return cls(name=name, specs=decoder.specs(), kv_heads=None if decoder.latent else decoder.kv_heads)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(spec.shape) for spec in self.specs)

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(spec.shape) * ITEM_BYTES[spec.dtype] for spec in self.specs)


def read_shapes(given: str) -> Shapes:
    """Return the shapes of a preset, a file or a folder. Raises LayoutError that says what would be known."""
    if given in PRESETS:
        return Shapes.of(PRESETS[given], name=given)
    path = Path(given).expanduser()
    if path.is_dir():
        path = next((path / name for name in _FILES if (path / name).exists()), path / _FILES[0])
    if not path.exists():
        close = difflib.get_close_matches(given, PRESETS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise LayoutError(
            f"{given!r} is no file and no preset{hint}; known: {', '.join(PRESETS)}, "
            "or the path of a model.safetensors.index.json, a .safetensors file or a config.json"
        )
    if path.suffix == ".safetensors":
        return Shapes(name=path.name, specs=_in_order(_header(path)), kv_heads=_kv_heads(path))
    content = _json(path)
    if "weight_map" in content:
        return Shapes(name=path.parent.name or path.name, specs=_indexed(path, content), kv_heads=_kv_heads(path))
    return Shapes.of(decoder_of(_language(content)), name=path.parent.name or path.name)


def _indexed(path: Path, index: dict[str, Any]) -> tuple[WeightSpec, ...]:
    """Read the headers of all files that an index names."""
    files = sorted(set(index["weight_map"].values()))
    if missing := [name for name in files if not (path.parent / name).exists()]:
        raise LayoutError(
            f"{path} names {missing[0]}, which is not beside it ({len(missing)} of {len(files)} files are missing): "
            "their headers hold the shapes"
        )
    return _in_order(spec for name in files for spec in _header(path.parent / name))


def _header(path: Path) -> Iterator[WeightSpec]:
    """Yield the tensors that the header of a safetensors file names."""
    try:
        with path.open("rb") as file:
            places = read_header(file, name=str(path), alone=True)
    except UserError as error:
        raise LayoutError(str(error)) from error
    for name, place in places.items():
        if place.dtype not in _DTYPES:
            raise LayoutError(f"{path}: {name} has dtype {place.dtype}; known: {', '.join(_DTYPES)}")
        yield WeightSpec(name=name, shape=place.shape, dtype=_DTYPES[place.dtype])


def _json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LayoutError(f"{path} is neither a safetensors file nor JSON with one object ({error})") from error


def _kv_heads(path: Path) -> int | None:
    """Return what a config.json beside `path` says."""
    config = path.parent / "config.json"
    if not config.exists():
        return None
    language = _language(_json(config))
    return None if "kv_lora_rank" in language else language.get("num_key_value_heads")


def _language(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that describes the language model."""
    return config.get("text_config") or config


def _in_order(specs: Iterable[WeightSpec]) -> tuple[WeightSpec, ...]:
    """Sort into the order of the forward pass, by name: the embedding, layer 9, layer 10, what follows."""

    def place(spec: WeightSpec) -> tuple[int, list[tuple[int, int | str]]]:
        parts = re.split(r"(\d+)", spec.name)
        outside = 0 if "embed" in spec.name else 2
        return (1 if len(parts) > 1 else outside), [(0, int(p)) if p.isdigit() else (1, p) for p in parts]

    return tuple(sorted(specs, key=place))

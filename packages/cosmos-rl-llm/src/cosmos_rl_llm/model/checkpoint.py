"""A model's directory: where it is, and what its safetensors hold by their headers alone. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.safetensors_header import read_header
from cosmos_rl_core.types import WeightSpec

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}


def resolve(path_or_id: str | os.PathLike[str]) -> str:
    """Return what transformers should open, or say what is missing on this disk."""
    text = os.fspath(path_or_id)
    path = Path(text).expanduser()
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            raise UserError(
                f"model.path = {text!r} holds adapters of another model; give that model, or what "
                "`cosmos-rl export --merge-adapters` makes of both"
            )
        if not (path / "config.json").is_file():
            raise UserError(f"model.path = {text!r} has no config.json; give a Hugging Face directory")
        return str(path)
    looks_local = path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1 or path.exists()
    if looks_local:
        raise UserError(
            f"model.path = {text!r} is not a directory; give one with config.json and *.safetensors, "
            "or a Hugging Face id"
        )
    return text


def read_specs(directory: Path) -> list[WeightSpec]:
    """Return the weights of all *.safetensors in `directory`, by name. Raises UserError for a damaged file."""
    specs = [spec for file in sorted(directory.glob("*.safetensors")) for spec in _read_header(file)]
    return sorted(specs, key=lambda spec: spec.name)


def _read_header(path: Path) -> list[WeightSpec]:
    try:
        with path.open("rb") as file:
            places = read_header(file, name=f"model.path: {path}")
    except OSError as error:
        raise UserError(f"model.path: {path} cannot be read: {error.strerror}") from error
    return [
        WeightSpec(name=name, shape=place.shape, dtype=_DTYPES.get(place.dtype) or place.dtype)
        for name, place in places.items()
    ]

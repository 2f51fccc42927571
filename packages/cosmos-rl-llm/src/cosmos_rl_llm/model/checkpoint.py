"""A model's directory: its location and the weights in its safetensors, by their headers only. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.safetensors_header import read_header
from cosmos_rl_core.types import WeightSpec

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}


def resolve(path_or_id: str | os.PathLike[str]) -> str:
    """Return the path or id for transformers. Raises UserError for an incomplete local directory."""
    text = os.fspath(path_or_id)
    path = Path(text).expanduser()
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            raise UserError(
                f"model.path = {text!r} contains adapters of another model; set it to that model, or to the result of "
                "`cosmos-rl export --merge-adapters`"
            )
        if not (path / "config.json").is_file():
            raise UserError(f"model.path = {text!r} has no config.json; set it to a Hugging Face directory")
        return str(path)
    looks_local = path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1 or path.exists()
    if looks_local:
        raise UserError(
            f"model.path = {text!r} is not a directory; set it to one with config.json and *.safetensors, "
            "or to a Hugging Face id"
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

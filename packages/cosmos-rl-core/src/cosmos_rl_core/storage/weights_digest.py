"""Whether the weights of a model are still those of an earlier time, by reading little of them. No torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from cosmos_rl_core.storage import hub
from cosmos_rl_core.storage.safetensors_header import read_header, weight_files

SAMPLE_BYTES = 4096
"""Read in the middle of each tensor."""
_CONFIGS = ("config.json", "model_index.json")


def base_digests(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each weights file of the base model of a recipe's adapters, by its name in the directory.

    Empty for a recipe without adapters, and for a model that is not on this machine. Raises UserError for a file that
    is not safetensors.
    """
    model = recipe.get("model", {})
    directory = _directory(str(model.get("path", "")), model.get("revision")) if model.get("lora") else None
    if directory is None:
        return {}
    files = weight_files(directory) or sorted(directory.rglob("*.safetensors"))  # a pipeline has them in folders
    return {path.relative_to(directory).as_posix(): weights_digest(path) for path in files if path.is_file()}


def weights_digest(path: Path) -> str:
    """Return the SHA-256 of a safetensors file's size and header, and of `SAMPLE_BYTES` of each tensor."""
    with path.open("rb") as file:
        starts = sorted(place.start for place in read_header(file, name=str(path)).values())
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        digest = hashlib.sha256(b"%d " % size + file.read(starts[0] if starts else size))
        for start, end in pairwise([*starts, size]):
            file.seek(max(start, (start + end - SAMPLE_BYTES) // 2))
            digest.update(file.read(min(SAMPLE_BYTES, end - start)))
    return digest.hexdigest()


def _directory(path: str, revision: str | None) -> Path | None:
    """Return the directory of a path or of a hub's id."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    return hub.cached_model(path, revision, files=_CONFIGS) if find_spec("huggingface_hub") else None

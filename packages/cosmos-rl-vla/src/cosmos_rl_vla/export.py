"""Exports a checkpoint in another program's format, with that program's camera names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_vla.data.config import VLADataConfig
from cosmos_rl_vla.data.lerobot import read_dataset
from cosmos_rl_vla.models.config import VLAModelConfig
from cosmos_rl_vla.models.pi_export import export_pi

_CAMERA = "observation.images."


def export_as(
    format: str,
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    model: VLAModelConfig,
    data: VLADataConfig,
) -> Iterable[tuple[str, Tensor]]:
    """Rewrite an export in another program's format; see `abilities.ExportsFormats`."""
    return export_pi(format, directory, tensors, cameras=camera_names(model, data))


def camera_names(model: VLAModelConfig, data: VLADataConfig) -> Sequence[str]:
    """Return lerobot's names of the model's cameras, in order; () if the recipe has none.

    Sources, in order: the demonstrations, the lerobot model that training began with, the simulator's options.
    """
    if data.cameras:
        return data.cameras
    if data.demos and Path(data.demos).expanduser().is_dir():
        return read_dataset(Path(data.demos).expanduser()).cameras
    config = Path(model.path).expanduser() / "config.json"
    if model.path and config.is_file():
        features = read_json_object(config).get("input_features") or {}
        if pictures := [name for name, feature in features.items() if feature.get("type") == "VISUAL"]:
            return pictures
    return tuple(f"{_CAMERA}{name}" for name in data.options.get("cameras", ()))

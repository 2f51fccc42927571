"""Statistics published by others beside a model: openpi's norm_stats.json, lerobot's processors. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_vla.normalise import Bounds, Kind, Spread, narrowest, widened

LEROBOT_FILE = "policy_preprocessor.json"
"""lerobot's normalisation; the numbers are in a safetensors file that it names."""
OPENPI_FILE = "norm_stats.json"
"""openpi's statistics, in assets/<name of the data>/."""
OPENPI_EPSILON = 1e-6
"""Added by openpi to the denominators q99 - q01 and std."""
_MODES: Mapping[str, tuple[Kind, tuple[str, str]]] = {
    "QUANTILES": ("quantile", ("q01", "q99")),
    "QUANTILE10": ("quantile", ("q10", "q90")),
    "MIN_MAX": ("quantile", ("min", "max")),
    "MEAN_STD": ("mean_std", ("mean", "std")),
}
_NORMALIZER = "normalizer_processor"


def openpi_file(directory: Path) -> Path | None:
    """Return the statistics file in an openpi checkpoint's assets/; None without. Raises UserError for several."""
    files = sorted(directory.glob(f"assets/**/{OPENPI_FILE}"))
    if len(files) > 1:
        names = ", ".join(map(str, files))
        raise UserError(f"{directory} has statistics of several data sets: set [model] stats to one of {names}")
    return files[0] if files else None


def openpi_spreads(stats: Mapping[str, Any], *, family: str, origin: str) -> dict[str, Spread]:
    """Read {"norm_stats": {"actions": {...}, "state": {...}}} as spreads of "action" and "state".

    family: of the model. openpi's files have percentiles, and mean and std: pi0 uses mean and std, the others
    percentiles if there are any. Raises UserError.
    """
    spreads = {}
    for ours, theirs in (("action", "actions"), ("state", "state")):
        spread = stats["norm_stats"].get(theirs)
        if spread is None:
            continue
        percentiles = spread.get("q01") is not None
        filled = {} if percentiles else {"q01": spread.get("mean"), "q99": spread.get("mean")}
        read = Spread.from_json({**spread, **filled, "kind": "mean_std"}, origin=f'{origin}, "{theirs}"')
        if percentiles and family != "pi0":
            low, high = (np.asarray(spread[name], np.float64) for name in ("q01", "q99"))
            high = np.where(low == high, high, high + OPENPI_EPSILON)
            spreads[ours] = _interval((low, high), spread, name=f'{origin}, "{theirs}"')
        else:
            std = np.asarray(spread["std"], np.float64) + OPENPI_EPSILON
            spreads[ours] = replace(read, std=std.astype(np.float32))
    return spreads


def has_lerobot_spreads(directory: Path) -> bool:
    """Return whether lerobot saved statistics there. The normalising step of published base models has none."""
    path = directory / LEROBOT_FILE
    return path.is_file() and "state_file" in (_normalizing_step(path) or {})


def lerobot_spreads(directory: Path) -> dict[str, Spread]:
    """Read the normalising step of a saved policy as spreads of "action" and "state". Raises UserError."""
    path = directory / LEROBOT_FILE
    step = _normalizing_step(path)
    if step is None or "state_file" not in step:
        raise UserError(f"{path} names no statistics; measure those of demonstrations")
    modes, numbers = lerobot_modes(step["config"]["norm_map"], where=str(path)), directory / step["state_file"]
    try:
        tensors = load_file(numbers)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{numbers} cannot be read as safetensors: {error}") from error
    columns = (("action", "action", "ACTION"), ("state", "observation.state", "STATE"))
    # a mode without statistics, such as "IDENTITY", leaves the values unchanged
    known = {ours: (theirs, modes[kind]) for ours, theirs, kind in columns if modes.get(kind) in _MODES}
    return {ours: _spread(tensors, theirs, mode, origin=numbers) for ours, (theirs, mode) in known.items()}


def lerobot_modes(modes: Mapping[str, Any], *, where: str) -> Mapping[str, Any]:
    """Return the modes by type of feature. Raises UserError for an unknown one, and for images that are normalised."""
    for kind, mode in modes.items():
        known = ("IDENTITY",) if kind == "VISUAL" else ("IDENTITY", *_MODES)
        if mode not in known:
            raise UserError(f"{where}: {kind} is normalised by {mode}, which is not supported; {', '.join(known)} are")
    return modes


def lerobot_cameras(config: Mapping[str, Any]) -> list[str]:
    """Return the cameras in lerobot's config.json, without those that its `empty_cameras` adds as a mask."""
    features = config.get("input_features") or {}
    cameras = [name for name, feature in features.items() if feature.get("type") == "VISUAL"]
    return [name for name in cameras if ".empty_camera_" not in name]


def _normalizing_step(path: Path) -> dict[str, Any] | None:
    steps = read_json_object(path).get("steps", ())
    return next((step for step in steps if step.get("registry_name") == _NORMALIZER), None)


def _spread(tensors: Mapping[str, np.ndarray], name: str, mode: str, *, origin: Path) -> Spread:
    kind, bounds = _MODES[mode]
    if missing := [bound for bound in bounds if f"{name}.{bound}" not in tensors]:
        raise UserError(f"{origin}: no {name}.{missing[0]}, which mode {mode} needs")
    low, high = (tensors[f"{name}.{bound}"].astype(np.float32) for bound in bounds)
    if kind == "quantile":
        numbers = {
            bound: tensors[key] for bound in ("min", "max", "mean", "std") if (key := f"{name}.{bound}") in tensors
        }
        return _interval((low, high), numbers, name=f"{origin}, {name}")
    return replace(Spread.between(low, high), kind=kind, mean=low, std=high)


def _interval(bounds: Bounds, numbers: Mapping[str, Any], *, name: str) -> Spread:
    """Return the spread that maps low to -1 and high to 1; equal ones to -1, as openpi and lerobot do.

    numbers: the other statistics.
    """
    low, high = widened(bounds, from_low(bounds[0], numbers), name=name)
    spread = Spread.between(low, np.where(low == high, low + 2 * narrowest(low), high))
    return replace(spread, mean=np.asarray(numbers.get("mean", low), np.float32))


def from_low(low: np.ndarray, numbers: Mapping[str, Any]) -> Bounds:
    """Return the interval that begins at `low`, which models are trained to map to -1, as wide as the values' range.

    numbers: statistics, with min and max, or std, of which two are taken.
    """
    if "min" in numbers and "max" in numbers:
        least, most = (np.asarray(numbers[name], np.float32) for name in ("min", "max"))
        return low, low + most - least
    return low, low + 2 * np.asarray(numbers.get("std", 0.0), np.float32)

"""Statistics as others publish them beside a model: openpi's norm_stats.json, lerobot's processors. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.json_files import read_json_object
from cosmos_rl_vla.spread import Kind, Spread

LEROBOT_FILE = "policy_preprocessor.json"
"""Where lerobot says how it normalises; the numbers lie in a safetensors file that it names."""
_MODES: Mapping[str, tuple[Kind, tuple[str, str]]] = {
    "QUANTILES": ("quantile", ("q01", "q99")),
    "QUANTILE10": ("quantile", ("q10", "q90")),
    "MIN_MAX": ("quantile", ("min", "max")),
    "MEAN_STD": ("mean_std", ("mean", "std")),
}
_NORMALIZER = "normalizer_processor"


def openpi_spreads(held: Mapping[str, Any], *, origin: str) -> dict[str, Spread]:
    """Read {"norm_stats": {"actions": {...}, "state": {...}}} as spreads of "action" and "state".

    Percentiles where it has them (pi0.5), else mean and std (pi0). Raises UserError.
    """
    found = {}
    for ours, theirs in (("action", "actions"), ("state", "state")):
        spread = held["norm_stats"].get(theirs)
        if spread is None:
            continue
        quantiles = spread.get("q01") is not None
        bounds = {} if quantiles else {"q01": spread.get("mean"), "q99": spread.get("mean")}
        kind = "quantile" if quantiles else "mean_std"
        found[ours] = Spread.from_json({**spread, **bounds, "kind": kind}, origin=f'{origin}, "{theirs}"')
    return found


def has_lerobot_spreads(directory: Path) -> bool:
    """Return whether lerobot saved statistics there. Bases are published with a normalising step that names none."""
    path = directory / LEROBOT_FILE
    return path.is_file() and "state_file" in (_normalizing_step(path) or {})


def lerobot_spreads(directory: Path) -> dict[str, Spread]:
    """Read the normalising step of a saved policy as spreads of "action" and "state". Raises UserError."""
    path = directory / LEROBOT_FILE
    step = _normalizing_step(path)
    if step is None or "state_file" not in step:
        raise UserError(f"{path} names no statistics; measure those of demonstrations")
    modes, numbers = step["config"]["norm_map"], directory / step["state_file"]
    try:
        held = load_file(numbers)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{numbers} cannot be read as safetensors: {error}") from error
    asked = (("action", "action", modes.get("ACTION")), ("state", "observation.state", modes.get("STATE")))
    # a mode that is not known, such as "IDENTITY", hands them over as they are
    return {ours: _spread(held, theirs, mode, origin=numbers) for ours, theirs, mode in asked if mode in _MODES}


def _normalizing_step(path: Path) -> dict[str, Any] | None:
    steps = read_json_object(path).get("steps", ())
    return next((step for step in steps if step.get("registry_name") == _NORMALIZER), None)


def _spread(held: Mapping[str, np.ndarray], name: str, mode: str, *, origin: Path) -> Spread:
    kind, bounds = _MODES[mode]
    if missing := [bound for bound in bounds if f"{name}.{bound}" not in held]:
        raise UserError(f"{origin}: no {name}.{missing[0]}, which mode {mode} wants")
    low, high = (held[f"{name}.{bound}"].astype(np.float32) for bound in bounds)
    spread = Spread.between(low, high)
    return spread if kind == "quantile" else replace(spread, kind=kind, mean=low, std=high)

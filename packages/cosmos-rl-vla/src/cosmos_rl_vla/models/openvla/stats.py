"""Statistics in OpenVLA's format, by training dataset: config.json or dataset_statistics.json.

    {"libero_10_no_noops": {"action": {"q01": [...], "q99": [...], "mask": [...], ...}, "proprio": {...}}, ...}

No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_vla.actions import ActionStats, Gripper
from cosmos_rl_vla.normalise import Spread, widened
from cosmos_rl_vla.published import from_low

FILE = "dataset_statistics.json"
_LIBERO = Gripper(dim=-1, unit=True, binary=True, invert=True)
"""In LIBERO's demonstrations 1 opens the gripper and 0 closes it; its simulator opens at -1 and closes at 1."""


def published_stats(place: Path, *, key: str) -> ActionStats | None:
    """Return the statistics of a dataset, from a model's directory or a file; None if it has none in this format.

    key: name of the dataset; "" for the only one.
    Raises UserError for an unknown key, and for "" with several datasets.
    """
    files = (place / FILE, place / "config.json") if place.is_dir() else (place,)
    for path in files:
        datasets = _datasets(path)
        if datasets:
            return _stats_of(datasets, key=key, origin=path)
    return None


def to_published(stats: ActionStats) -> dict[str, Any]:
    """Return one dataset's statistics in OpenVLA's format."""
    spreads = {"action": stats.action, "proprio": stats.state}
    return {name: _published(spread) for name, spread in spreads.items() if spread is not None}


def _datasets(path: Path) -> Mapping[str, Any]:
    """Return statistics by dataset; empty for a file of another format."""
    if not path.is_file():
        return {}
    content = read_json_object(path)
    datasets = content.get("norm_stats", content)
    datasets = datasets if isinstance(datasets, dict) else {}
    with_action = {name: inside for name, inside in datasets.items() if isinstance(inside, dict) and "action" in inside}
    return with_action if len(with_action) == len(datasets) else {}


def _stats_of(datasets: Mapping[str, Any], *, key: str, origin: Path) -> ActionStats:
    names = ", ".join(sorted(datasets))
    if not key and len(datasets) > 1:
        raise UserError(f"{origin} has statistics of several datasets: set [model] unnorm_key to one of {names}")
    key = key or next(iter(datasets))
    if key not in datasets:
        raise UserError(f"[model] unnorm_key: {origin} has no statistics of {key!r}, but of {names}")
    dataset = datasets[key]
    state = dataset.get("proprio")
    return ActionStats(
        action=_spread(dataset["action"], origin=f"{origin}, {key}, action"),
        # datasets without proprioception are published with zeros
        state=_spread(state, origin=f"{origin}, {key}, proprio") if state and np.any(state.get("std", 0)) else None,
        gripper=_LIBERO if key.startswith("libero") else None,
    )


def _spread(numbers: Mapping[str, Any], *, origin: str) -> Spread:
    spread = Spread.from_json({**numbers, "kind": "mean_std"}, origin=origin)
    low, high = widened((spread.q01, spread.q99), from_low(spread.q01, numbers), mask=spread.mask, name=origin)
    return replace(spread, kind="quantile", q01=low, q99=high)


def _published(spread: Spread) -> dict[str, Any]:
    """Return the numbers of a spread; one by mean and std has the bounds that it maps to [-1, 1]."""
    low, high = (spread.unnormalise(np.full(len(spread), bound, np.float32)) for bound in (-1, 1))
    arrays = {"q01": low, "q99": high, "min": low, "max": high, "mean": spread.mean, "std": spread.std}
    masked = {name: np.where(spread.mask, array, getattr(spread, name, array)) for name, array in arrays.items()}
    return {**{name: array.tolist() for name, array in masked.items()}, "mask": spread.mask.tolist()}

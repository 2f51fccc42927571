"""Which checkpoints there are, whether they are whole, and where they stand: all that needs no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_rl_core.interfaces import UserError

MANIFEST = "manifest.json"
"""SHA-256 of every other file of a checkpoint; written last."""
STATE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Where a run stands between two steps."""

    step: int
    """Optimizer steps done; equals the policy version."""
    next_sample: int = 0
    """First id of the prompt stream that was never issued."""
    unfinished: tuple[int, ...] = ()
    """Issued ids that are neither in the weights nor dropped."""


def write_manifest(path: Path) -> None:
    """Write down what the files of a checkpoint hold."""
    write_json(path / MANIFEST, {"files": _digests(path)})


def verify(path: Path) -> None:
    """Compare every file with the manifest; raises UserError naming the first that differs."""
    try:
        wanted = json.loads((path / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not a complete checkpoint: its {MANIFEST} cannot be read ({error})") from error
    found = _digests(path)
    for name, digest in wanted.items():
        if found.get(name) != digest:
            raise UserError(
                f"checkpoint file {path / name} is damaged or missing; resume from another one by --resume PATH"
            )


def read_state(path: Path) -> TrainState:
    """Verify a checkpoint and return its step and stream position. Raises UserError for a damaged one."""
    verify(path)
    return train_state(read_json(path / STATE))


def train_state(state: Mapping[str, Any]) -> TrainState:
    return TrainState(step=state["step"], next_sample=state["next_sample"], unfinished=tuple(state["unfinished"]))


def list_steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints under `root`, oldest first."""
    names = (path.parent.name.removeprefix("step_") for path in root.glob(f"step_*/{MANIFEST}"))
    return sorted(int(name) for name in names if name.isdecimal())  # a user may have kept a copy as step_12_best


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _digests(root: Path) -> dict[str, str]:
    files = sorted(p for p in root.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {p.relative_to(root).as_posix(): _sha256(p) for p in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

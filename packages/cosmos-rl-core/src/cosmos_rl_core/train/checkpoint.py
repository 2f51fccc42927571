"""Checkpoints of one policy replica: a directory that is complete or absent.

    checkpoints/step_12/
        policy/            weights and what is needed to load the model elsewhere (safetensors, written by the policy)
        optimizer.safetensors
        state.json         step, next sample, random state
        manifest.json      SHA-256 of every file

It is written under a temporary name, synced and renamed; a reader checks the manifest. Nothing is pickled.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cosmos_rl_core.interfaces import Policy, UserError

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Where a run stands between two steps."""

    step: int
    """Optimizer steps done; equals the policy version."""
    next_sample: int = 0
    """First id of the prompt stream that was never issued."""
    unfinished: tuple[int, ...] = ()
    """Issued ids that are neither in the weights nor dropped."""


def save(root: Path, *, state: TrainState, policy: Policy, optimizer: torch.optim.Optimizer, keep: int) -> Path:
    """Write `root/step_N` and drop all but the newest `keep`. Raises UserError when the disk is full."""
    final = root / f"step_{state.step}"
    if final.exists():
        return final
    temporary = root / f".step_{state.step}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        policy.save(temporary / "policy")
        tensors, scalars = _flatten(optimizer)
        save_file(tensors, temporary / "optimizer.safetensors")
        _write_json(temporary / "state.json", {**asdict(state), "optimizer": scalars, "rng": _rng_state()})
        _write_json(temporary / MANIFEST, {"files": _digests(temporary)})
        _sync(temporary)
        temporary.rename(final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            f"cannot write the checkpoint {final}: {error.strerror}. Earlier ones are untouched."
        ) from error
    for old in list_steps(root)[:-keep]:
        shutil.rmtree(root / f"step_{old}")
    return final


def load(path: Path, *, policy: Policy, optimizer: torch.optim.Optimizer) -> TrainState:
    """Verify `path` against its manifest and read weights, optimizer and random state into the live objects."""
    verify(path)
    state = json.loads((path / "state.json").read_text())
    load_policy(path / "policy", policy)
    _restore(optimizer, load_file(path / "optimizer.safetensors"), state["optimizer"])
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["rng"])), dtype=torch.uint8))
    return _train_state(state)


def load_policy(directory: Path, policy: Policy) -> None:
    """Copy the safetensors of `directory` into the policy's live weights by name."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    weights = policy.weights()
    missing = sorted(set(weights) - set(found))
    if missing:
        raise UserError(f"{directory} lacks {len(missing)} tensors of this model, first {missing[0]}: another model?")
    with torch.no_grad():
        for name, live in weights.items():
            live.copy_(found[name])


def read_state(path: Path) -> TrainState:
    """Step and stream position of a checkpoint, without torch work."""
    return _train_state(json.loads((path / "state.json").read_text()))


def verify(path: Path) -> None:
    """Compare every file with the manifest; raises UserError naming the first that differs."""
    try:
        wanted = json.loads((path / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not a complete checkpoint: its {MANIFEST} cannot be read ({error})") from error
    found = _digests(path)
    for name, digest in wanted.items():
        if found.get(name) != digest:
            raise UserError(f"checkpoint file {path / name} is damaged or missing; use an earlier checkpoint")


def list_steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints under `root`, oldest first."""
    return sorted(int(p.name.removeprefix("step_")) for p in root.glob("step_*") if (p / MANIFEST).exists())


def _flatten(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Optimizer state -> tensors by "<parameter index>/<name>" and the rest as JSON."""
    state = optimizer.state_dict()
    tensors = {
        f"{index}/{name}": value.contiguous()
        for index, entries in state["state"].items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    }
    groups = [
        {k: v for k, v in group.items() if isinstance(v, int | float | str | bool | list | tuple | None)}
        for group in state["param_groups"]
    ]
    return tensors, {"param_groups": groups}


def _restore(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, object]
) -> None:
    entries: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split("/", 1)
        entries.setdefault(int(index), {})[name] = value
    current = optimizer.state_dict()
    saved = scalars["param_groups"]
    assert isinstance(saved, list)
    groups = [{**now, "params": was["params"]} for now, was in zip(current["param_groups"], saved, strict=True)]
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


def _train_state(state: Mapping[str, Any]) -> TrainState:
    return TrainState(step=state["step"], next_sample=state["next_sample"], unfinished=tuple(state["unfinished"]))


def _rng_state() -> str:
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def _digests(root: Path) -> dict[str, str]:
    files = sorted(p for p in root.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {p.relative_to(root).as_posix(): _sha256(p) for p in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _sync(root: Path) -> None:
    for path in [*(p for p in root.rglob("*") if p.is_file()), root]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

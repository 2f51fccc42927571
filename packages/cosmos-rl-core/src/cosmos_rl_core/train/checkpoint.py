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
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cosmos_rl_core.interfaces import Policy, UserError
from cosmos_rl_core.train.manifest import (
    STATE,
    TrainState,
    list_steps,
    read_json,
    train_state,
    verify,
    write_json,
    write_manifest,
)


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
        write_json(temporary / STATE, {**asdict(state), "optimizer": scalars, "rng": _rng_state()})
        write_manifest(temporary)
        _sync(temporary)
        temporary.rename(final)
        _sync_one(root)
    except (OSError, SafetensorError) as error:  # safetensors wraps what the disk says
        shutil.rmtree(temporary, ignore_errors=True)
        cause = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"cannot write the checkpoint {final}: {cause}. Earlier ones are untouched.") from error
    for old in list_steps(root)[:-keep]:
        shutil.rmtree(root / f"step_{old}")
    return final


def load(path: Path, *, policy: Policy, optimizer: torch.optim.Optimizer) -> TrainState:
    """Verify `path` against its manifest and read weights, optimizer and random state into the live objects."""
    verify(path)
    state = read_json(path / STATE)
    load_policy(path / "policy", policy)
    _restore(optimizer, load_file(path / "optimizer.safetensors"), state["optimizer"])
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["rng"])), dtype=torch.uint8))
    return train_state(state)


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
            if live.shape != found[name].shape:
                shapes = f"{list(found[name].shape)} there, {list(live.shape)} in this model"
                raise UserError(f"{directory}: {name} is {shapes}: another model?")
            live.copy_(found[name])


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


def _rng_state() -> str:
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def _sync(root: Path) -> None:
    for path in [*root.rglob("*"), root]:
        _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Lists checkpoints, verifies them, and reads their step and origin. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.folder import Folder, store_errors
from cosmos_rl_core.storage.weights_digest import base_digests

MANIFEST = "manifest.json"
"""SHA-256 of every other file of a checkpoint; written last."""
STATE = "state.json"
WEIGHTS = ".safetensors"
"""Suffix of files with tensors; a checkpoint has at least one."""
ROLLED_BACK = "rolled_back.json"
"""Marks a checkpoint that the monitor has set aside, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The position of a run between two steps."""

    step: int
    """Optimizer steps done; equals the policy version."""
    next_sample: int = 0
    """First id of the prompt stream that was never issued."""
    unfinished: tuple[int, ...] = ()
    """Issued ids that are neither in the weights nor dropped."""
    objective: tuple[float, ...] = ()
    """`Objective.state`."""
    successes: bytes = b""
    """The curriculum's memory; empty without one. In the file in hexadecimal digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The run that wrote a checkpoint."""

    num_ranks: int = 1
    """Ranks of the replica."""
    layout: str = "one rank"
    """The axes of the replica: "dp_shard 4 x tp 2"."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """The resolved recipe, section by section."""
    base: Mapping[str, str] = field(default_factory=dict)
    """Digests of the base model's files (`weights_digest.base_digests`), where adapters are trained."""


def write_json(folder: Folder, name: str, value: object) -> str:
    """Write a file of JSON and return its SHA-256."""
    return folder.write(name, [(json.dumps(value, indent=1) + "\n").encode()])


def write_manifest(location: str | Path | Folder, digests: Mapping[str, str] | None = None) -> None:
    """Write the SHA-256 of a checkpoint's files; without `digests` the files are read and hashed."""
    folder = Folder.at(location)
    files = _digests(folder, [name for name in folder.walk() if name != MANIFEST]) if digests is None else digests
    write_json(folder, MANIFEST, {"files": dict(sorted(files.items()))})


def verify(location: str | Path | Folder) -> None:
    """Compare every file with the manifest; raises UserError for the first that differs, or for a missing entry."""
    folder = Folder.at(location)
    digests = _listed(folder)
    names = set(folder.walk())
    actual = _digests(folder, [name for name in digests if name in names])
    for name, digest in digests.items():
        if actual.get(name) != digest:
            raise UserError(
                f"checkpoint file {folder / name} is damaged or missing; resume from another one by --resume PATH"
            )


def has_all_files(location: str | Path | Folder) -> bool:
    """Whether every file of the manifest exists, without reading them: much cheaper than `verify`."""
    folder = Folder.at(location)
    try:
        return _listed(folder).keys() <= set(folder.walk())
    except UserError:
        return False


def _listed(folder: Folder) -> dict[str, str]:
    """Names and SHA-256 of a checkpoint's files. Raises UserError for a manifest that lists no state or no weights."""
    damaged = f"{folder} is not a complete checkpoint: its {MANIFEST}"
    try:
        manifest = json.loads(folder.read(MANIFEST))
    except (*store_errors(), ValueError, RecursionError) as error:
        raise UserError(f"{damaged} cannot be read ({error})") from error
    match manifest:
        case {"files": dict(files)} if all(isinstance(digest, str) for digest in files.values()):
            pass
        case _:
            raise UserError(f"{damaged} lists no files")
    if STATE not in files or not any(name.endswith(WEIGHTS) for name in files):
        raise UserError(f"{damaged} lists no {STATE}, or no weights (*{WEIGHTS})")
    return files


def read_state(location: str | Path | Folder) -> TrainState:
    """Verify a checkpoint and return its step and stream position. Raises UserError for a damaged one."""
    folder = Folder.at(location)
    verify(folder)
    return train_state(folder)


def train_state(folder: Folder) -> TrainState:
    """Return the step and stream position of a checkpoint as it is. Raises UserError for a file of another form."""
    match _state(folder):
        case {"step": int(step), "next_sample": int(first), "unfinished": [*ids]} if all(type(i) is int for i in ids):
            state = _state(folder)
            return TrainState(
                step=step,
                next_sample=first,
                unfinished=tuple(ids),
                objective=tuple(map(float, state.get("objective", ()))),
                successes=bytes.fromhex(state.get("successes", "")),
            )
    raise UserError(f"{folder / STATE} has no valid step, next_sample and unfinished")


def read_origin(location: str | Path | Folder) -> Origin:
    """Return the origin of a checkpoint. Raises UserError for a file of another form."""
    folder = Folder.at(location)
    match _state(folder).get("origin", {}):
        case dict(origin):
            entries = {field.name: origin[field.name] for field in fields(Origin) if field.name in origin}
            saved = Origin(**entries)
            are_tables = isinstance(saved.recipe, Mapping) and isinstance(saved.base, Mapping)
            if isinstance(saved.num_ranks, int) and saved.num_ranks > 0 and are_tables:
                return saved
    raise UserError(f"{folder / STATE} has no valid origin (num_ranks, layout, recipe, base)")


def check_base(location: str | Path | Folder, recipe: Mapping[str, Any] | None = None) -> None:
    """Raise UserError where the base model of a checkpoint's adapters has other weights than when they were trained.

    recipe: has the base in [model]; None: the checkpoint's own. Nothing is compared where the base is not on this
    machine, and for a checkpoint without digests.
    """
    folder = Folder.at(location)
    origin = read_origin(folder)
    recipe = origin.recipe if recipe is None else recipe
    if not (origin.base and (now := base_digests(recipe))):
        return
    if changed := sorted(name for name in {*origin.base, *now} if origin.base.get(name) != now.get(name)):
        raise UserError(
            f"the base model of the adapters in {folder} has changed since they were trained: {changed[0]} of "
            f"model.path = {recipe['model']['path']!r} has other weights. Put back the model that they were trained "
            "with; for new adapters on this one, choose another [run] output_dir."
        )


def _state(folder: Folder) -> dict[str, Any]:
    try:
        state = json.loads(folder.read(STATE))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{folder / STATE} cannot be read ({error})") from error
    return state if isinstance(state, dict) else {}


def mark_rolled_back(folder: Folder, *, to: int, reason: str) -> None:
    """Set a checkpoint aside: it stays whole, but `list_steps` skips it. `to`: the step that the run goes back to."""
    write_json(folder, ROLLED_BACK, {"to": to, "reason": reason})


def list_steps(root: str | Path | Folder, *, rolled_back: bool = False) -> list[int]:
    """Steps of the complete checkpoints under `root`, oldest first; with `rolled_back` also of those set aside."""
    folder = Folder.at(root)
    folders = {step_of(name): folder / name for name in folder.folders()}
    complete = {step: at for step, at in folders.items() if step is not None and at.has(MANIFEST)}
    return sorted(step for step, at in complete.items() if rolled_back or not at.has(ROLLED_BACK))


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder; None for any other, such as a user's copy step_12_best."""
    number = name.removeprefix("step_")
    return int(number) if number != name and re.fullmatch("0|[1-9][0-9]*", number) else None


def _digests(folder: Folder, names: list[str]) -> dict[str, str]:
    with ThreadPoolExecutor(max_workers=4) as readers:  # hashing and reading release the GIL
        return dict(zip(names, readers.map(folder.digest, names)))

"""Resume from the newest whole checkpoint, under a compatible recipe; roll back to a healthy one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_rl_core.checkpoint.changes import KeyChange, changes, notes_of, refused
from cosmos_rl_core.checkpoint.manifest import (
    MANIFEST,
    TrainState,
    check_base,
    list_steps,
    mark_rolled_back,
    read_origin,
    read_state,
    train_state,
)
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.settings.base import Problem
from cosmos_rl_core.settings.problems import as_toml
from cosmos_rl_core.storage.folder import Folder, store_errors

ELSE = (
    "for a new run from its weights, set model.path to an export of the checkpoint and choose another [run] output_dir"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """The checkpoint that a run goes on from."""

    folder: Folder
    """The checkpoint, verified."""
    state: TrainState
    notes: tuple[str, ...] = ()
    """Notes for the user: damaged checkpoints that were skipped, keys that have changed."""


def checkpoint_root(config: RunConfig, run_dir: Path) -> Folder:
    """The folder of a run's checkpoints."""
    return Folder.at(config.checkpoint.path or run_dir / "checkpoints")


def find_resumption(config: RunConfig, run_dir: Path, resume: str) -> Resumption | None:
    """Return the checkpoint of "auto" or of a path; None for "auto" where there is no checkpoint yet.

    Raises UserError when none is whole, when newer ones than the path's exist, for a recipe that has changed in a key
    that must not, and for a folder that cannot be read.
    """
    root = checkpoint_root(config, run_dir)
    with _within_reach(root if resume == "auto" else resume):
        checkpoint = _newest(root) if resume == "auto" else _named(root, resume)
        if checkpoint is None:
            return None
        changed = _changes(checkpoint.folder, config)
    if fixed := refused(changed):
        raise UserError(
            f"the checkpoint was written with another recipe: {'; '.join(map(str, fixed))}. Restore that to resume "
            f"this run; {ELSE}."
        )
    return Resumption(folder=checkpoint.folder, state=checkpoint.state, notes=(*checkpoint.notes, *notes_of(changed)))


def resume_problems(config: RunConfig, run_dir: Path, resume: str) -> list[Problem]:
    """Return the problems that `find_resumption` and `notes_of_resumption` would have, without reading the weights."""
    root = checkpoint_root(config, run_dir)
    try:
        with _within_reach(root if resume == "auto" else resume):
            if resume == "auto":
                steps = list_steps(root)
                if not steps:
                    return []
                folder, step = root / f"step_{steps[-1]}", steps[-1]
            else:
                folder = _place(root, resume)
                step = train_state(folder).step
                _must_be_newest(root, resume, step)
            changed = _changes(folder, config)
    except UserError as error:
        return [Problem(key="", wrong=str(error))]
    problems = [_problem(change, folder) for change in refused(changed)]
    if (limit := config.run.max_steps) is not None and step > limit:
        wrong = f"is below the step of {folder}: there is nothing to do"
        problems.append(
            Problem(key="run.max_steps", given=str(limit), wrong=wrong, suggestion="raise it to train further")
        )
    return problems


def _problem(change: KeyChange, folder: Folder) -> Problem:
    value = "" if change.now is None or isinstance(change.now, Mapping) else as_toml(change.now)
    was = "was not set" if change.was is None else f"was {as_toml(change.was)}"
    return Problem(key=change.key, given=value, wrong=f"{was} in {folder}", suggestion=f"restore that; {ELSE}")


def notes_of_resumption(resumption: Resumption | None, max_steps: int) -> tuple[str, ...]:
    """Return the notes on the checkpoint of a run of `max_steps`. Raises UserError if the checkpoint is beyond them."""
    if resumption is None:
        return ()
    step = resumption.state.step
    if step > max_steps:
        raise UserError(
            f"nothing to do: the checkpoint is of step {step}, and the run has {max_steps} steps. Raise [run] "
            "max_steps, or [prompts] epochs, to train further."
        )
    last = (f"nothing is left to train: the checkpoint is of step {step}, the last",) if step == max_steps else ()
    return (*resumption.notes, *last)


def claim_root(config: RunConfig, run_dir: Path, *, overwrite: bool) -> None:
    """Make sure that a new run's [checkpoint] path holds no earlier run; `overwrite` clears it."""
    if not config.checkpoint.path:
        return
    root = checkpoint_root(config, run_dir)
    with _within_reach(root):
        steps = list_steps(root, rolled_back=True)
        if steps and not overwrite:
            raise UserError(
                f"[checkpoint] path = {config.checkpoint.path!r} holds checkpoints of an earlier run "
                f"(step_{steps[-1]}). Resume it by --resume auto, replace it by --overwrite, or choose another path."
            )
        for step in steps:
            (root / f"step_{step}").remove()


def recipe_of(config: RunConfig) -> dict[str, Any]:
    """The resolved recipe as JSON, section by section, as a checkpoint keeps it: with the keys that are not set."""
    return config.model_dump(mode="json")


@contextmanager
def _within_reach(place: Folder | str) -> Iterator[None]:
    """Raise UserError where a store or disk does not answer."""
    try:
        yield
    except store_errors() as error:
        raise UserError(
            f"checkpoints in {place} cannot be reached: {error}. Check [checkpoint] path, the network and the keys."
        ) from error


def _newest(root: Folder) -> Resumption | None:
    damaged: list[str] = []
    for step in reversed(list_steps(root)):
        folder = root / f"step_{step}"
        try:
            return Resumption(folder=folder, state=read_state(folder), notes=tuple(damaged))
        except UserError as error:
            damaged.append(f"{error.args[0].partition(';')[0]}; going on from the one before")
    if damaged:
        raise UserError(
            f"none of the checkpoints in {root} is whole: {damaged[0].partition(';')[0]}"
            + (f", and {len(damaged) - 1} more" if len(damaged) > 1 else "")
            + ". Repair one of them, or start anew by --overwrite."
        )
    return None


def _named(root: Folder, resume: str) -> Resumption:
    folder = _place(root, resume)
    state = read_state(folder)
    _must_be_newest(root, resume, state.step)
    return Resumption(folder=folder, state=state)


def _place(root: Folder, resume: str) -> Folder:
    """Return the folder of a checkpoint. Raises UserError for another one, with the checkpoints in or beside it."""
    folder = Folder.at(resume)
    if folder.has(MANIFEST):
        return folder
    places = (folder, folder / "checkpoints", root)
    checkpoints = next(
        ([place / f"step_{step}" for step in steps] for place in places if (steps := list_steps(place))), []
    )
    hint = f"; there are {', '.join(map(str, checkpoints))}" if checkpoints else ""
    raise UserError(f"--resume {resume}: no checkpoint there (a folder with a {MANIFEST}){hint}")


def _must_be_newest(root: Folder, resume: str, own: int) -> None:
    if later := [f"step_{step}" for step in list_steps(root) if step > own]:
        raise UserError(
            f"--resume {resume}: {root} holds later checkpoints, which the run would clash with "
            f"({', '.join(later)}). Move them away, or choose another [run] output_dir."
        )


def _changes(folder: Folder, config: RunConfig) -> list[KeyChange]:
    """Differences of a recipe from that of a checkpoint; none for a checkpoint without one.

    Raises UserError for adapters whose base model has changed.
    """
    check_base(folder)
    saved = read_origin(folder).recipe
    return list(changes(saved, recipe_of(config))) if saved else []


def roll_back(root: Folder, *, to: int, reason: str) -> int | None:
    """Mark the checkpoints after step `to`, and return the newest step up to it; None, and no mark, if there is none.

    A marked checkpoint is whole and can be resumed by its path; as a run's newest checkpoint it no longer counts.
    """
    steps = list_steps(root)
    healthy = max((step for step in steps if step <= to), default=None)
    if healthy is None:
        return None
    for step in reversed(steps):  # newest first: after a kill in between the next check finds the others again
        if step > to:
            mark_rolled_back(root / f"step_{step}", to=healthy, reason=reason)
    return healthy

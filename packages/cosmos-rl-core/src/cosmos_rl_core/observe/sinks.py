"""Sinks of metrics and images of samples: metrics.jsonl, and those of observe/services.py."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.observe.services import MLflow, RunLabels, Sink, TensorBoard, Trackio, Wandb


class JsonLines(Sink):
    """metrics.jsonl: one object per step, written before the next step starts.

    A resumed run appends, after dropping earlier lines of `first_step` and later. A number that is not finite is
    written as null, as JSON has no NaN. If the file is removed meanwhile, a new one is started.
    """

    def __init__(self, path: Path, *, first_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        keep_earlier(path, first_step)
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not os.fstat(self._file.fileno()).st_nlink:
            self._file.close()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
        self._file.flush()

    def roll_back(self, step: int) -> None:
        self._file.close()
        keep_earlier(self._path, step)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()


_SERVICES: dict[str, Callable[[Path, RunLabels], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": MLflow,
}


def build_sinks(
    names: Sequence[str], run_dir: Path, *, labels: RunLabels | None = None, first_step: int | None = None
) -> list[Sink]:
    """Return the sinks by name, each writing into `run_dir` or to its service from `first_step` on.

    labels: of the run in a service; default: the folder's name. Raises `UserError` for an unknown name, or with the
    `pip install` command for a missing extra.
    """
    known = ("jsonl", *_SERVICES)
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"unknown metrics sink {unknown[0]!r}: choose from {', '.join(known)}")
    labels = labels or RunLabels(name=run_dir.name)

    def build(name: str) -> Sink:
        if name == "jsonl":
            return JsonLines(run_dir / "metrics.jsonl", first_step=first_step)
        return _SERVICES[name](run_dir, labels)

    with ExitStack() as opened:  # closes the opened ones if one fails
        sinks = [opened.enter_context(closing(build(name))) for name in dict.fromkeys(names)]
        opened.pop_all()
    return sinks


def read_lines(path: Path, *, first_step: int, last_step: int) -> Iterator[dict[str, float]]:
    """Yield the lines of a file of `JsonLines` from `first_step` to `last_step`, null as NaN; none without a file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            values = _as_step(line)
            if values is not None and first_step <= values["step"] <= last_step:
                yield {name: math.nan if value is None else value for name, value in values.items()}


def keep_earlier(path: Path, first_step: int | None) -> None:
    """Remove lines of `first_step` and later, if given, and an incomplete last line of a killed run.

    Every line must have a step: see `set_damage_aside`.
    """
    if not path.exists():
        return
    kept = [line for line in _complete_lines(path) if first_step is None or json.loads(line)["step"] < first_step]
    _rewrite(path, kept)


def set_damage_aside(path: Path) -> str:
    """Keep the lines of a file that are objects with a step. Returns a message for the user if it was damaged.

    A file with other lines, or a folder in its place, is renamed. Raises OSError if it cannot be read.
    """
    if not path.exists():
        return ""
    complete = [] if path.is_dir() else _complete_lines(path)
    kept = [line for line in complete if _as_step(line) is not None]
    if path.is_file() and len(kept) == len(complete):
        return ""
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in count())
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    _rewrite(path, kept)
    return f"{path} was damaged: {len(kept)} of {len(complete)} lines are kept; the original is {aside.name}"


def _complete_lines(path: Path) -> list[bytes]:
    """The complete lines."""
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _as_step(line: bytes) -> dict[str, Any] | None:
    """The object in a line; None for a damaged one and one without a step."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None


def _rewrite(path: Path, lines: Sequence[bytes]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(b"".join(lines))
    temporary.replace(path)


class Grids:
    """Sends new grids to the sinks.

    grids = Grids(run_dir / "media", sinks)       # existing grids were shown before the run was resumed
    grids.show_new()                               # periodically
    """

    def __init__(self, directory: Path, sinks: Sequence[Sink]) -> None:
        self._directory = directory
        self._sinks = tuple(sinks)
        self._read = {index: index.stat().st_size for index in self._indices()}
        """Number of processed bytes of each index."""

    def show_new(self) -> None:
        """Show each grid that was written since the last call, once."""
        for index in self._indices():
            grown = dict(filter(None, map(_grid_of, self._new_lines(index))))
            for grid, step in grown.items():
                with contextlib.suppress(FileNotFoundError):  # removed by the user
                    for sink in self._sinks:
                        sink.show(step, self._name(index), index.parent / grid)

    def _indices(self) -> list[Path]:
        """Index files of training and of evaluations."""
        return sorted([*self._directory.glob("index*.jsonl"), *self._directory.glob("eval/index*.jsonl")])

    def _new_lines(self, index: Path) -> list[bytes]:
        """The complete lines added since the last call."""
        with index.open("rb") as file:
            file.seek(self._read.get(index, 0))
            lines = [line for line in file if line.endswith(b"\n")]
        self._read[index] = self._read.get(index, 0) + sum(map(len, lines))
        return lines

    def _name(self, index: Path) -> str:
        """samples/rollout-0, samples/eval/rollout-0."""
        replica = index.stem.removeprefix("index").removeprefix("_")
        return "/".join(["samples", *index.parent.relative_to(self._directory).parts, *([replica] if replica else [])])


def _grid_of(line: bytes) -> tuple[str, int] | None:
    """The grid and step in a line of an index; None for a damaged line or one without a grid."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match entry:
        case {"grid": str(grid), "step": int(step)}:
            return grid, step
    return None

"""Sinks of metrics and images of samples: metrics.jsonl, TensorBoard, Weights & Biases."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from cosmos_rl_core.errors import UserError


class Sink(Protocol):
    """Receives metrics of each step, and images.

    for sink in sinks:
        sink.log(step, metrics)
        sink.show(step, "samples/rollout-0", run_dir / "media/step_000012/grid_rollout-0.gif")
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""
        ...

    def show(self, step: int, name: str, picture: Path) -> None:
        """Show a .png or an animated .gif of version `step`."""
        ...

    def roll_back(self, step: int) -> None:
        """Drop the metrics of this step and later ones, which are done again, if the sink can."""
        ...

    def close(self) -> None:
        """Flush all logged values; nothing is logged afterwards."""
        ...


class JsonLines:
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

    def show(self, step: int, name: str, picture: Path) -> None:
        """Do nothing: the image is already in the run's directory."""

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Curves and images for `tensorboard --logdir`, which plays .gif files. Needs no torch."""

    def __init__(self, run_dir: Path) -> None:
        _extra("tensorboard", "tensorboard")
        self._event_pb2 = import_module("tensorboard.compat.proto.event_pb2")
        self._summary_pb2 = import_module("tensorboard.compat.proto.summary_pb2")
        writer = import_module("tensorboard.summary.writer.event_file_writer")
        self._writer: Any = writer.EventFileWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        value = self._summary_pb2.Summary.Value
        self._add(step, [value(tag=name, simple_value=number) for name, number in metrics.items()])

    def show(self, step: int, name: str, picture: Path) -> None:
        data = picture.read_bytes()
        width, height = size_of(data)
        image = self._summary_pb2.Summary.Image(encoded_image_string=data, width=width, height=height, colorspace=3)
        self._add(step, [self._summary_pb2.Summary.Value(tag=name, image=image)])

    def roll_back(self, step: int) -> None:
        """Do nothing: the curves show the undone steps too."""

    def _add(self, step: int, values: list[Any]) -> None:
        summary = self._summary_pb2.Summary(value=values)
        self._writer.add_event(self._event_pb2.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A Weights & Biases run named after the run directory, configured by WANDB_* variables."""

    def __init__(self, run_dir: Path, wandb: Any = None) -> None:
        """wandb: the package; default: the installed one."""
        self._wandb: Any = wandb or _extra("wandb", "wandb")
        self._run = self._wandb.init(project="cosmos-rl", name=run_dir.name, dir=str(run_dir), resume="allow")
        self._step = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._run.log(dict(metrics), step=step)

    def show(self, step: int, name: str, picture: Path) -> None:
        """Log it at the newest step, with its own step as caption: wandb accepts nothing for an earlier step."""
        media = self._wandb.Video if picture.suffix == ".gif" else self._wandb.Image
        self._run.log({name: media(str(picture), caption=f"step {step}")}, step=max(step, self._step))
        self._step = max(step, self._step)

    def roll_back(self, step: int) -> None:
        """Do nothing: wandb accepts nothing for an earlier step, and ignores the steps that are done again."""

    def close(self) -> None:
        self._run.finish()


_SINKS: dict[str, Callable[[Path, int | None], Sink]] = {
    "jsonl": lambda run_dir, first_step: JsonLines(run_dir / "metrics.jsonl", first_step=first_step),
    "tensorboard": lambda run_dir, first_step: TensorBoard(run_dir),
    "wandb": lambda run_dir, first_step: Wandb(run_dir),
}


def build_sinks(names: Sequence[str], run_dir: Path, *, first_step: int | None = None) -> list[Sink]:
    """Return the sinks by name, each writing into `run_dir` from `first_step` on.

    Raises `UserError` for an unknown name, or with the `pip install` command for a missing extra.
    """
    unknown = [name for name in names if name not in _SINKS]
    if unknown:
        raise UserError(f"unknown metrics sink {unknown[0]!r}: choose from {', '.join(_SINKS)}")
    with ExitStack() as opened:  # closes the opened ones if one fails
        sinks = [opened.enter_context(closing(_SINKS[name](run_dir, first_step))) for name in dict.fromkeys(names)]
        opened.pop_all()
    return sinks


def size_of(picture: bytes) -> tuple[int, int]:
    """Return width and height of a GIF or PNG, from its header."""
    if picture.startswith(b"GIF8"):
        return int.from_bytes(picture[6:8], "little"), int.from_bytes(picture[8:10], "little")
    assert picture.startswith(b"\x89PNG"), "samples are shown as .gif or .png"
    return int.from_bytes(picture[16:20], "big"), int.from_bytes(picture[20:24], "big")


def _extra(module: str, extra: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UserError(
            f"the {extra} sink needs a package that is not installed: pip install 'cosmos-rl-core[{extra}]'"
        ) from error


def keep_earlier(path: Path, first_step: int | None) -> None:
    """Remove lines of `first_step` and later, if given, and an incomplete last line of a killed run.

    Every line must have a step: see `set_damage_aside`.
    """
    if not path.exists():
        return
    kept = [line for line in _whole(path) if first_step is None or json.loads(line)["step"] < first_step]
    _rewrite(path, kept)


def set_damage_aside(path: Path) -> str:
    """Keep the lines of a file that are objects with a step. Returns a message for the user if it was damaged.

    A file with other lines, or a folder in its place, is renamed. Raises OSError if it cannot be read.
    """
    if not path.exists():
        return ""
    whole = [] if path.is_dir() else _whole(path)
    kept = [line for line in whole if _has_step(line)]
    if path.is_file() and len(kept) == len(whole):
        return ""
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in count())
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    _rewrite(path, kept)
    return f"{path} was damaged: {len(kept)} of {len(whole)} lines are kept; the original is {aside.name}"


def _whole(path: Path) -> list[bytes]:
    """The complete lines."""
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _has_step(line: bytes) -> bool:
    try:
        held = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(held, dict) and isinstance(held.get("step"), int)


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
        held = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match held:
        case {"grid": str(grid), "step": int(step)}:
            return grid, step
    return None

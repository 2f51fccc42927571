"""Where a step's metrics go: metrics.jsonl, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from cosmos_rl_core.interfaces import UserError


class Sink(Protocol):
    """Takes metrics, step by step.

    for sink in sinks:
        sink.log(step, metrics)
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""
        ...

    def close(self) -> None:
        """Make what was logged durable; nothing is logged afterwards."""
        ...


class JsonLines:
    """metrics.jsonl: one object a step, on disk before the next step starts; a resumed run appends.

    A number that is not finite is written as null: NaN is no JSON.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Curves for `tensorboard --logdir`, without torch."""

    def __init__(self, run_dir: Path) -> None:
        _extra("tensorboard", "tensorboard")
        self._event_pb2 = import_module("tensorboard.compat.proto.event_pb2")
        self._summary_pb2 = import_module("tensorboard.compat.proto.summary_pb2")
        writer = import_module("tensorboard.summary.writer.event_file_writer")
        self._writer: Any = writer.EventFileWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        summary = self._summary_pb2.Summary(value=values)
        self._writer.add_event(self._event_pb2.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A Weights & Biases run named after the run directory; WANDB_* variables say where it goes."""

    def __init__(self, run_dir: Path) -> None:
        wandb: Any = _extra("wandb", "wandb")
        self._run = wandb.init(project="cosmos-rl", name=run_dir.name, dir=str(run_dir), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


_SINKS: dict[str, Callable[[Path], Sink]] = {
    "jsonl": lambda run_dir: JsonLines(run_dir / "metrics.jsonl"),
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}


def build_sinks(names: Sequence[str], run_dir: Path) -> list[Sink]:
    """Return the sinks by name, each writing into `run_dir`.

    Raises `UserError` for an unknown name, or with the `pip install` line where an extra is missing.
    """
    unknown = [name for name in names if name not in _SINKS]
    if unknown:
        raise UserError(f"unknown metrics sink {unknown[0]!r}: choose from {', '.join(_SINKS)}")
    return [_SINKS[name](run_dir) for name in dict.fromkeys(names)]


def _extra(module: str, extra: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UserError(
            f"the {extra} sink needs a package that is not installed: pip install 'cosmos-rl-core[{extra}]'"
        ) from error


def _drop_torn_line(path: Path) -> None:
    """Remove a last line that a killed run left half written."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("rb+") as file:
            file.truncate(whole)

"""Metric services, each with a package of its own: TensorBoard, Weights & Biases, trackio, MLflow.

Trackio and MLflow are no extras: their upper bounds on other packages would hold for all who install from uv.lock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install

REQUIREMENT = {
    "tensorboard": "cosmos-rl-core[tensorboard]",
    "wandb": "cosmos-rl-core[wandb]",
    "trackio": "trackio",
    "mlflow": "mlflow",
}
"""Requirement of a service's package, by the name of sink and package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLabels:
    """A run's place in a metric service."""

    name: str
    project: str = "cosmos-rl"
    """Project, or MLflow's experiment."""
    group: str = ""
    """Group of runs within the project; empty: none."""


class Sink:
    """Receives metrics of each step, and images.

    for sink in sinks:
        sink.log(step, metrics)
        sink.show(step, "samples/rollout-0", run_dir / "media/step_000012/grid_rollout-0.gif")
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""
        raise NotImplementedError

    def show(self, step: int, name: str, picture: Path) -> None:
        """Show a .png or an animated .gif of version `step`; by default not: it is in the run's directory anyway."""

    def roll_back(self, step: int) -> None:
        """Drop the metrics of this step and later ones, which are done again; by default they are shown too."""

    def close(self) -> None:
        """Flush all logged values; nothing is logged afterwards."""
        raise NotImplementedError


class TensorBoard(Sink):
    """Curves and images for `tensorboard --logdir`, which plays .gif files. Needs no torch."""

    def __init__(self, run_dir: Path, labels: RunLabels) -> None:
        _package("tensorboard")
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

    def _add(self, step: int, values: list[Any]) -> None:
        summary = self._summary_pb2.Summary(value=values)
        self._writer.add_event(self._event_pb2.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class Wandb(Sink):
    """A Weights & Biases run, configured by WANDB_* variables. It ignores steps that are done again."""

    package = "wandb"

    def __init__(self, run_dir: Path, labels: RunLabels, wandb: Any = None) -> None:
        """wandb: the package; default: the installed one."""
        self._wandb: Any = wandb or _package(self.package)
        self._run = self._start(run_dir, labels)
        self._step = 0

    def _start(self, run_dir: Path, labels: RunLabels) -> Any:
        return self._wandb.init(
            project=labels.project, name=labels.name, group=labels.group or None, dir=str(run_dir), resume="allow"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._run.log(dict(metrics), step=step)

    def show(self, step: int, name: str, picture: Path) -> None:
        """Log it at the newest step, with its own step as caption: wandb accepts nothing for an earlier step."""
        media = self._wandb.Video if picture.suffix == ".gif" else self._wandb.Image
        self._run.log({name: media(str(picture), caption=f"step {step}")}, step=max(step, self._step))
        self._step = max(step, self._step)

    def close(self) -> None:
        self._run.finish()


class Trackio(Wandb):
    """A trackio run, with wandb's interface, in a database of this machine (TRACKIO_DIR) or a Space."""

    package = "trackio"

    def _start(self, run_dir: Path, labels: RunLabels) -> Any:
        return self._wandb.init(
            project=labels.project, name=labels.name, group=labels.group or None, resume="allow", embed=False
        )


class MLflow(Sink):
    """An MLflow run, at MLFLOW_TRACKING_URI or in MLflow's own database of this folder."""

    def __init__(self, run_dir: Path, labels: RunLabels) -> None:
        self._mlflow: Any = _package("mlflow")
        self._client = self._mlflow.MlflowClient()
        existing = self._client.get_experiment_by_name(labels.project)
        experiment = self._client.create_experiment(labels.project) if existing is None else existing.experiment_id
        tags = {"directory": str(run_dir), **({"group": labels.group} if labels.group else {})}
        self._run = self._client.create_run(experiment, run_name=labels.name, tags=tags).info.run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now, metric = int(time.time() * 1000), self._mlflow.entities.Metric
        self._client.log_batch(self._run, metrics=[metric(name, value, now, step) for name, value in metrics.items()])

    def show(self, step: int, name: str, picture: Path) -> None:
        """Keep the file as an artifact of the run, in a folder of its name and step."""
        self._client.log_artifact(self._run, str(picture), f"{name}/step_{step:06d}")

    def close(self) -> None:
        self._client.set_terminated(self._run)


def size_of(picture: bytes) -> tuple[int, int]:
    """Return width and height of a GIF or PNG, from its header."""
    if picture.startswith(b"GIF8"):
        return int.from_bytes(picture[6:8], "little"), int.from_bytes(picture[8:10], "little")
    assert picture.startswith(b"\x89PNG"), "samples are shown as .gif or .png"
    return int.from_bytes(picture[16:20], "big"), int.from_bytes(picture[20:24], "big")


def _package(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        install = pip_install(REQUIREMENT[name])
        raise UserError(f"the {name} sink needs a package that is not installed: {install}") from error

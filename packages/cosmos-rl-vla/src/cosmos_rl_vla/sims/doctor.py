"""`python -m cosmos_rl_vla.sims.doctor [name ...]`: runs each simulator briefly and reports missing requirements."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from PIL import Image

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.interfaces import Check
from cosmos_rl_core.observe.console import table
from cosmos_rl_vla.config import SimulatorLimits
from cosmos_rl_vla.sims.base import GROUP
from cosmos_rl_vla.sims.pool.group import Lost
from cosmos_rl_vla.sims.pool.pool import SimulatorPool
from cosmos_rl_vla.sims.rendering import choose_gl


@dataclass(frozen=True)
class Probe:
    """Task and options for the trial of a simulator."""

    task: str
    options: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""
    """Module that it needs; empty: none, or an interpreter of its own."""
    renders_with: str = ""
    """"mujoco", "vulkan", or "" for no renderer of the machine."""
    variable: str = ""
    """Environment variable with its folder; empty: it needs none."""

    @property
    def is_installed(self) -> bool:
        return (not self.module or find_spec(self.module) is not None) and self.variable in ("", *os.environ)


PROBES: Mapping[str, Probe] = {
    "behavior": Probe("turning_on_radio", {"task": "turning_on_radio"}, "omnigibson", "vulkan"),
    "gymnasium": Probe("Pendulum-v1", {"id": "Pendulum-v1"}, "gymnasium"),
    "libero": Probe("libero_goal/0", {}, "libero", "mujoco"),
    "maniskill": Probe("PushCube-v1", {}, "mani_skill", "vulkan"),
    "maniskill_batch": Probe("PushCube-v1", {"task": "PushCube-v1"}, "mani_skill", "vulkan"),
    "metaworld": Probe("faucet-open", {}, "metaworld", "mujoco"),
    "reach": Probe("red"),
    "robotwin": Probe("place_empty_cup", {}, "sapien", "vulkan", variable="ROBOTWIN_PATH"),
}
"""Probes of this package's simulators, by name."""

_HEADER = ("simulator", "plays", "cameras", "steps/s", "renders with")
_STEPS_PER_CHUNK = 5
START_S = 60.0
"""Limit for building a simulator that `cosmos-rl doctor` tries."""
_PLAY_S = 2.0
"""Duration of the speed measurement."""


@dataclass(frozen=True)
class Report:
    """Result of one simulator's trial."""

    name: str
    cells: Sequence[str] = ("no", "", "", "")
    """Cells of the table row, after the name."""
    note: str = ""
    """Paths of its images, or the remedy."""

    @property
    def plays(self) -> bool:
        return self.cells[0] == "yes"


def checks() -> Iterator[Check]:
    """Yield the lines of `cosmos-rl doctor`: installed simulators play, the others are listed."""
    names = [name for name in plugins.names(GROUP) if name in PROBES]
    installed = [name for name in names if PROBES[name].is_installed]
    with tempfile.TemporaryDirectory(prefix="cosmos-rl-") as folder:
        for name in installed:
            result = examine(name, PROBES[name], folder=Path(folder), python=None, start_timeout_s=START_S)
            if result.plays:
                _, cameras, speed, renders = result.cells
                text = f"{speed} steps/s, cameras: {cameras}, renders with {renders}"
                yield Check("ok", f"simulator {name}", text)
            else:
                yield Check("bad", f"simulator {name}", result.note, f"python -m cosmos_rl_vla.sims.doctor {name}")
    if missing := [name for name in names if name not in installed]:
        yield Check("ok", "simulators", f"not installed here: {', '.join(missing)}")


def examine(name: str, probe: Probe, *, folder: Path, python: str | None, start_timeout_s: float) -> Report:
    """Play part of an episode in a process of its own, and write the first image of each camera."""
    limits = SimulatorLimits(
        start_timeout_s=start_timeout_s, reset_timeout_s=start_timeout_s, step_timeout_s=start_timeout_s, max_faults=0
    )
    try:
        pool = SimulatorPool(
            name,
            options=probe.options,
            python=python,
            limits=limits,
        )
        with pool:
            pool.start(0, task=probe.task, init=0)
            _wait_ready(pool)
            paths = [_write(folder / f"{name}_{camera}.png", images[0]) for camera, images in pool.images.items()]
            speed = _speed(pool)
            sizes = ", ".join(f"{camera} {height}x{width}" for camera, (height, width) in pool.spec.cameras.items())
        return Report(name, ("yes", sizes or "none", f"{speed:.0f}", _renders_with(probe)), ", ".join(map(str, paths)))
    except (UserError, WorkerFailed) as error:
        return Report(name, note=str(error))


def _wait_ready(pool: SimulatorPool) -> bool:
    """Wait for the one slot. Returns whether its episode is over."""
    (event,) = pool.wait()
    if isinstance(event, Lost):
        raise UserError(event.reason)
    return event.result is not None and event.result.done


def _speed(pool: SimulatorPool) -> float:
    """Return steps per second, with the cameras rendered once per chunk of steps."""
    middle = (np.asarray(pool.spec.action_low) + np.asarray(pool.spec.action_high)) / 2
    chunk = np.tile(middle.astype(np.float32), (1, _STEPS_PER_CHUNK, 1))
    begun, steps, done = time.monotonic(), 0, False
    while not done and (steps == 0 or time.monotonic() - begun < _PLAY_S):
        pool.submit([0], chunk)
        done = _wait_ready(pool)
        steps += _STEPS_PER_CHUNK
    return steps / (time.monotonic() - begun)


def _write(path: Path, image: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
    return path


def _renders_with(probe: Probe) -> str:
    if probe.renders_with == "mujoco":
        return f"MUJOCO_GL={choose_gl(dict(os.environ))}"
    if probe.renders_with == "vulkan":
        return os.environ.get("VK_DRIVER_FILES", "Vulkan")
    return "itself"


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Simulators to try; default: all installed.")] = None,
    pictures: Annotated[Path, typer.Option(help="Folder for one image of each camera.")] = Path("simulators"),
    python: Annotated[str | None, typer.Option(help="Interpreter that has the simulator's packages.")] = None,
    start_timeout_s: Annotated[float, typer.Option(help="Limit for building one, in seconds.")] = 300.0,
) -> None:
    """Build simulators, render an image with each camera, and report their speed or missing requirements."""
    reports = []
    for name in names or [name for name in plugins.names(GROUP) if name in PROBES]:
        if name not in PROBES:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(PROBES)}")
        reports.append(examine(name, PROBES[name], folder=pictures, python=python, start_timeout_s=start_timeout_s))
    typer.echo(table([(report.name, *report.cells) for report in reports], header=_HEADER))
    for report in reports:
        typer.echo(f"\n{report.name}: {report.note}" if report.note else "", nl=bool(report.note))
    if names and not all(report.plays for report in reports):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

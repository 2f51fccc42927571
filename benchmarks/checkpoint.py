"""The pause of training for a checkpoint, written in the background or waited for, in alternating saves.

.venv/bin/python benchmarks/checkpoint.py [--quick]

A policy of a few large matrices with AdamW, on a local disk, in one process. A round is a number of steps with one
save of either kind; the stall is the time inside `CheckpointSaver.after_step`, and the slow-down the extra time of
the steps of that round over those of a round without a save.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import torch
from _metrics import Figure, report
from torch import Tensor, nn

from cosmos_rl_core.checkpoint.manifest import TrainState, verify
from cosmos_rl_core.checkpoint.saver import CheckpointSaver
from cosmos_rl_core.recipe.sections import CheckpointSection
from cosmos_rl_core.storage.folder import Folder

STEPS_PER_SAVE = 3
"""Enough that the writing ends before the next save, as it does between the saves of a real run."""


class MatrixPolicy:
    """The part of a policy that a checkpoint reads."""

    def __init__(self, *, width: int, layers: int) -> None:
        self.module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def weights(self) -> Mapping[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}

    def save_config(self, directory: Path) -> None:
        (directory / "config.json").write_text("{}\n")


class MatrixTrainer:
    """Steps of a regression that keep the processor busy, as training does."""

    def __init__(self, policy: MatrixPolicy, *, width: int) -> None:
        self.policy = policy
        self.optimizer = torch.optim.AdamW(policy.module.parameters(), lr=1e-6, fused=True)
        self.version = 0
        self._rows = torch.randn(256, width)

    def step(self) -> None:
        self.policy.module(self._rows).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer rounds")
    quick = parser.parse_args().quick
    width, layers, rounds = (1024, 12, 5) if quick else (2048, 24, 9)
    torch.manual_seed(0)
    trainer = MatrixTrainer(MatrixPolicy(width=width, layers=layers), width=width)
    trainer.step()  # the optimizer's state is there from now on
    saved_bytes = 3 * sum(weight.nbytes for weight in trainer.policy.weights().values())
    with tempfile.TemporaryDirectory() as folder:
        stalls, steps = measure(trainer, Path(folder), rounds=rounds)
    middle = {name: median(values) for name, values in stalls.items()}
    pace = {name: median(values) for name, values in steps.items()}
    size = f"{saved_bytes / 1e9:.2f} GB of weights and AdamW state, {rounds} rounds, medians"
    report(
        "checkpoint",
        [
            Figure(metric="stall of a save that is waited for", value=middle["waited for"], unit="s", note=size),
            Figure(metric="stall of an asynchronous save", value=middle["asynchronous"], unit="s"),
            Figure(
                metric="asynchronous stall / waited-for stall",
                value=median(a / b for a, b in zip(stalls["asynchronous"], stalls["waited for"])),
                unit="",
                target="<= 0.1",
            ),
            Figure(metric="step, nothing is written", value=pace["none"], unit="s"),
            Figure(
                metric="step, beside an asynchronous save",
                value=pace["asynchronous"],
                unit="s",
                note="hashing and writing share the cores with training",
            ),
            Figure(metric="written a second", value=saved_bytes / middle["waited for"] / 1e6, unit="MB/s"),
        ],
    )


def measure(
    trainer: MatrixTrainer, folder: Path, *, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the stall of each save and the seconds of each step after it, by kind."""
    kinds = {"asynchronous": True, "waited for": False}
    savers = {
        name: CheckpointSaver(
            CheckpointSection(every_steps=1, keep=1, asynchronous=asynchronous),
            root=Folder.at(folder / name),
            trainer=trainer,  # type: ignore[arg-type]  # what a saver needs of one
            state=TrainState(step=0),
        )
        for name, asynchronous in kinds.items()
    }
    stalls: dict[str, list[float]] = {name: [] for name in kinds}
    steps: dict[str, list[float]] = {"none": [], **{name: [] for name in kinds}}
    for number in range(rounds + 1):
        for name in steps:
            if name in savers:
                stall = seconds(lambda saver=savers[name]: saver.after_step(TrainState(step=trainer.version)))
                if number > 0:  # the first round makes room for the copies
                    stalls[name].append(stall)
            taken = [seconds(trainer.step) for _ in range(STEPS_PER_SAVE)]
            steps[name] += taken
            if name in savers:
                savers[name].settle()  # the next kind is measured on a quiet disk
    for saver in savers.values():
        saver.after_step(TrainState(step=trainer.version))
        last = saver.finish()
        assert last is not None
        verify(last)
    return stalls, steps


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

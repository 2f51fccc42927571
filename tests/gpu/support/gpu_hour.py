"""One step of the first hour on GPUs: its device, its folder, the numbers that it measures and their targets.

    hour = Hour(device=torch.device("cuda", 0), directory=tmp_path)
    hour.measured("tokens trained", 15_200, "tokens/s", ">= 12000")
    hour.missed()                                    # names each target that was missed

A rehearsal has the same calls at tiny sizes, on a pretend GPU or on the CPU; only targets with `always` count there.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from gpu_software import ROOT, Need, Package, Software

sys.path.append(str(ROOT / "benchmarks"))

from _metrics import Figure

T = TypeVar("T")
GIB = float(1 << 30)


class Skipped(Exception):
    """The machine lacks what a step needs; has the reason."""


@dataclass(kw_only=True)
class Hour:
    """The inputs and results of one step."""

    device: torch.device
    directory: Path
    rehearsal: bool = False
    numbers: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Output of commands, and log lines."""

    def size(self, real: T, rehearsed: T) -> T:
        """Return the size for this machine: `rehearsed` in a rehearsal."""
        return rehearsed if self.rehearsal else real

    def measured(self, metric: str, value: float, unit: str, target: str = "", *, always: bool = False) -> float:
        """Print and keep a number; its target, such as ">= 20", counts in a rehearsal only with `always`."""
        if self.rehearsal and not always:
            target = ""
        number = Figure(metric=metric, value=float(value), unit=unit, target=target)
        self.numbers.append(number)
        verdict = {None: "", True: f"   (target {target}: met)", False: f"   (target {target}: MISSED)"}[number.met]
        print(f"  {metric}: {value:,.4g} {unit}{verdict}", flush=True)
        return float(value)

    def note(self, text: str) -> None:
        """Print and keep a text."""
        self.notes.append(text)
        print("  " + text.replace("\n", "\n  "), flush=True)

    def show(self, *command: str) -> str:
        """Run a command of the machine and note its output; "" where it does not exist or fails."""
        if shutil.which(command[0]) is None:
            self.note(f"$ {' '.join(command)}: not installed")
            return ""
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        self.note(f"$ {' '.join(command)}\n{(done.stdout + done.stderr).strip()}")
        return done.stdout if done.returncode == 0 else ""

    def missed(self) -> str:
        """Return the numbers that missed their targets; "" if none did."""
        missed = (n for n in self.numbers if n.met is False)
        return "; ".join(f"{n.metric}: {n.value:,.4g} {n.unit}, target {n.target}" for n in missed)

    def result(self) -> dict[str, Any]:
        """The numbers and notes, for JSON."""
        numbers = [{**asdict(number), "met": number.met} for number in self.numbers]
        return {"numbers": numbers, "notes": self.notes}

    def seconds(self, work: Callable[[], object], *, rounds: int = 5) -> float:
        """Median seconds of `work` on the device, after one round that is not counted."""
        taken = []
        for _ in range(1 + self.size(rounds, 1)):
            self.synchronize()
            begun = time.perf_counter()
            work()
            self.synchronize()
            taken.append(time.perf_counter() - begun)
        return statistics.median(taken[1:])

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Bytes that `work` allocates beside those that are allocated already, at its peak; 0 on a CPU."""
        if self.device.type == "cpu":
            work()
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def synchronize(self) -> None:
        """Wait for a GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the first hour. The docstring of `perform` has the expected numbers and the looks of a failure."""

    number: int
    """Its name in commands; the order is that of the table."""
    name: str
    perform: Callable[[Hour], None]
    minutes: float
    """Expected on an H100, start of its processes included."""
    gpus: int = 1
    needs: tuple[Need, ...] = ()
    timeout_s: float = 600.0
    on_cpu: bool = False
    """Whether a rehearsal is on the CPU, of steps that start processes or a process group; else on a pretend GPU."""

    @property
    def title(self) -> str:
        return f"{self.number} {self.name}"

    @property
    def expects(self) -> str:
        return (self.perform.__doc__ or "").strip()

    def missing(self, software: Software, *, rehearsal: bool = False) -> str:
        """Return why this machine cannot perform the step, or rehearse it; "" if it can."""
        if rehearsal:
            return software.lacking(each for each in self.needs if isinstance(each, Package) and each.in_rehearsals)
        if not software.torch_cuda:
            return f"torch {software.packages['torch']} is built without CUDA"
        if software.torch_gpus < self.gpus:
            return f"needs {self.gpus} GPUs, and {software.torch_gpus} are visible"
        return software.lacking(self.needs)


def visible_gpu(place: int, variables: Mapping[str, str] = os.environ) -> str:
    """Return the name of GPU number `place` of this process for CUDA_VISIBLE_DEVICES."""
    listed = [name for name in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return listed[place] if listed else str(place)


def gpu_processes() -> dict[str, set[str]]:
    """Processes by GPU, of `nvidia-smi`; empty without it."""
    found: dict[str, set[str]] = {}
    for gpu, pid in _query("--query-compute-apps=gpu_uuid,pid"):
        found.setdefault(gpu, set()).add(pid)
    return found


def used_mib() -> dict[str, float]:
    """Memory in use by GPU, in MiB, of `nvidia-smi`; empty without it."""
    return {gpu: float(used) for gpu, used in _query("--query-gpu=uuid,memory.used")}


def _query(question: str) -> Sequence[tuple[str, str]]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", question, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    rows = [line.split(", ") for line in done.stdout.splitlines() if line]
    return [(row[0], row[1]) for row in rows]

"""One step of the first hour on GPUs: its device, its folder, the numbers that it measures and their targets.

    hour = Hour(device=torch.device("cuda", 0), directory=tmp_path)
    hour.measured("tokens trained", 15_200, "tokens/s", ">= 12000")
    hour.judge()                                     # AssertionError that names each target that was missed

A rehearsal has the same calls at tiny sizes, on a pretend GPU or on the CPU; only targets with `always` count there.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "benchmarks"))

from _metrics import Figure  # noqa: E402  benchmarks is no package

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

    def judge(self) -> None:
        """Raise AssertionError if a target was missed."""
        missed = [f"{n.metric}: {n.value:,.4g} {n.unit}, target {n.target}" for n in self.numbers if n.met is False]
        assert not missed, "; ".join(missed)

    def result(self) -> dict[str, Any]:
        """The numbers and notes, for JSON."""
        numbers = [{**asdict(number), "met": number.met} for number in self.numbers]
        return {"numbers": numbers, "notes": self.notes}

    def seconds(self, work: Callable[[], object], *, rounds: int = 5) -> float:
        """Median seconds of `work` on the device, after one round that is not counted."""
        taken = []
        for _ in range(1 + self.size(rounds, 1)):
            torch.cuda.synchronize(self.device)
            begun = time.perf_counter()
            work()
            torch.cuda.synchronize(self.device)
            taken.append(time.perf_counter() - begun)
        return statistics.median(taken[1:])

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Bytes that `work` allocates on the device beside those that are allocated already, at its peak."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the first hour. The docstring of `perform` has the expected numbers and the looks of a failure."""

    number: int
    name: str
    perform: Callable[[Hour], None]
    gpus: int = 1
    timeout_s: float = 600.0
    starts_processes: bool = False
    """Whether it starts `cosmos-rl` or pytest; other steps are rehearsed on a pretend GPU."""

    @property
    def title(self) -> str:
        return f"{self.number} {self.name}"

    @property
    def expects(self) -> str:
        return (self.perform.__doc__ or "").strip()

    def missing(self) -> str:
        """The reason why this machine cannot perform the step; "" if it can."""
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA"
        found = torch.cuda.device_count()
        return "" if found >= self.gpus else f"needs {self.gpus} GPUs, and {found} are visible"


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

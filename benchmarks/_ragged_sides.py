"""The two sides of train_step.py and vlm_step.py: one workload, a process per run, and the ratios of their medians."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import _ragged
from _metrics import Figure

HERE = Path(__file__).resolve().parent
TRL_ROOT = HERE.parent / ".cache" / "trl"
TIMEOUT_S = 900.0
MIB = 1 << 20
MEMORY_NOTE = "peak RSS of the process (VmHWM), libraries included"


class SideFailed(Exception):
    """A side failed; has the end of its output."""


def run(python: str, script: str, *arguments: object, work: Path) -> list[dict[str, float]]:
    """Run a side to its end and return its steps."""
    out = work / "steps.jsonl"
    out.unlink(missing_ok=True)
    command = [python, str(HERE / script), *map(str, arguments), "--out", str(out)]
    threads = len(os.sched_getaffinity(0))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [*command, "--threads", str(threads)], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode != 0:
        raise SideFailed(f"{script} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return [json.loads(line) for line in out.read_text().splitlines()]


def steady(steps: list[dict[str, float]], *, warm: int = 1) -> float:
    """Median seconds of a step, without the first."""
    return median(step["step_s"] for step in steps[warm:])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A peer and us with the same samples."""

    kind: str
    """"sft" or "grpo"."""
    peer: str
    model: Path
    longest: int
    """Maximum tokens of an answer."""
    steps: int
    rounds: int
    target: float
    """Of the ratio of tokens a second."""
    pictures: _ragged.Pictures = "none"
    rows: int = 8
    """Sequences of average length that fill a microbatch of ours."""

    def figures(self, trl: str) -> list[Figure]:
        """Alternate the peer and us; tokens per second, memory and pictures in the tower.

        trl: the interpreter of the peer's environment.
        """
        samples = _ragged.samples(longest=self.longest, pictures=self.pictures)
        tokens = _ragged.num_tokens(samples)
        terms = max(self.rows * tokens // len(samples), *(len(s.prompt) + len(s.answer) for s in samples))
        shared = ("--kind", self.kind, "--model", self.model, "--longest", self.longest, "--steps", self.steps)
        shared += ("--pictures", self.pictures)
        done: dict[str, list[list[dict[str, float]]]] = {self.peer: [], "ours": []}
        for number in range(self.rounds):
            for side, found in done.items():
                if side == "ours":
                    own = (*shared, "--microbatch-terms", terms)
                    found.append(run(sys.executable, "_ragged_ours.py", *own, work=self.model.parent))
                else:
                    found.append(run(trl, "_ragged_peer.py", *shared, work=self.model.parent))
                last = found[-1]
                speed = f"{tokens / steady(last):,.0f} tokens/s"
                print(f"{self.kind}, round {number + 1}, {side}: {speed}, loss {last[-1]['loss']:.4f}")
        return self._ratios(done, tokens)

    def _ratios(self, done: dict[str, list[list[dict[str, float]]]], tokens: int) -> list[Figure]:
        title, metrics = self.kind.upper(), list[Figure]()
        speeds = {side: median(tokens / steady(steps) for steps in runs) for side, runs in done.items()}
        peaks = {side: median(steps[-1]["peak_bytes"] for steps in runs) for side, runs in done.items()}
        for side in done:
            metrics.append(Figure(metric=f"{title}: trained, {side}", value=speeds[side], unit="tokens/s"))
        for side in done:
            what = f"{title}: peak memory, {side}"
            metrics.append(Figure(metric=what, value=peaks[side] / MIB, unit="MiB", note=MEMORY_NOTE))
        what, ratio = f"{title}: tokens/s, ours / {self.peer}", speeds["ours"] / speeds[self.peer]
        metrics.append(Figure(metric=what, value=ratio, unit="x", target=f">= {self.target}"))
        what, ratio = f"{title}: peak memory, ours / {self.peer}", peaks["ours"] / peaks[self.peer]
        metrics.append(Figure(metric=what, value=ratio, unit="x", target="<= 0.7", note=MEMORY_NOTE))
        if self.pictures == "none":
            return metrics
        shown = {"group": _ragged.NUM_GROUPS, "sample": _ragged.NUM_GROUPS * _ragged.GROUP_SIZE}[self.pictures]
        for side, runs in done.items():
            seen = median(step["pictures"] for steps in runs for step in steps)
            target = f"<= {shown}" if side == "ours" else ""
            metrics.append(Figure(metric=f"{title}: pictures in the tower, {side}", value=seen, unit="", target=target))
        return metrics

"""One training step on ragged lengths: this framework beside transformers' Trainer (SFT) and TRL's loss (GRPO).

    .venv/bin/python benchmarks/train_step.py [--quick]

The same 64 samples a step (_ragged.py), the same Qwen3 of 11 million parameters with a vocabulary of 32,000, float32,
the same threads; each run is a process, runs alternate, and metrics are medians. The peers pad: SFT to the longest of 8
rows, GRPO to the longest of the step, as TRL does. Ours packs as many tokens into a forward pass as 8 rows hold on
average. Overhead compares the trainer with a hand-written loop over the same policy, alternating steps in one process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import _ragged
from _metrics import Figure, report
from _peer_env import TRL, peer_python

HERE = Path(__file__).resolve().parent
WORK = HERE.parent / ".cache" / "train_step"
TRL_ROOT = HERE.parent / ".cache" / "trl"
PEERS = {"sft": "transformers Trainer", "grpo": "TRL"}
TIMEOUT_S = 900.0
MIB = 1 << 20
MEMORY_NOTE = "peak RSS of the process (VmHWM), libraries included"


class SideFailed(Exception):
    """A side failed; has the end of its output."""


def run(python: str, script: str, *arguments: object) -> list[dict[str, float]]:
    """Run a side to its end and return its steps."""
    out = WORK / "steps.jsonl"
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
    return median(step["step_s"] for step in steps[warm:])


def compare(kind: str, trl: str, *, longest: int, steps: int, rounds: int) -> list[Figure]:
    """Alternate the peer and us; tokens per second and memory, each with its ratio."""
    work = _ragged.samples(longest=longest)
    tokens = _ragged.num_tokens(work)
    shared = ("--kind", kind, "--model", WORK / "model", "--longest", longest, "--steps", steps)
    terms = max(8 * tokens // len(work), longest + 64)
    speeds: dict[str, list[float]] = {"ours": [], PEERS[kind]: []}
    peaks: dict[str, list[float]] = {"ours": [], PEERS[kind]: []}
    for number in range(rounds):
        sides = {
            PEERS[kind]: run(trl, "_ragged_peer.py", *shared),
            "ours": run(sys.executable, "_ragged_ours.py", *shared, "--microbatch-terms", terms),
        }
        for side, done in sides.items():
            speeds[side].append(tokens / steady(done))
            peaks[side].append(done[-1]["peak_bytes"])
            print(f"{kind}, round {number + 1}, {side}: {speeds[side][-1]:,.0f} tokens/s, loss {done[-1]['loss']:.4f}")
    title = kind.upper()
    metrics = [
        Figure(metric=f"{title}: trained, {side}", value=median(values), unit="tokens/s")
        for side, values in speeds.items()
    ]
    metrics += [
        Figure(metric=f"{title}: peak memory, {side}", value=median(values) / MIB, unit="MiB", note=MEMORY_NOTE)
        for side, values in peaks.items()
    ]
    return [
        *metrics,
        Figure(
            metric=f"{title}: tokens/s, ours / {PEERS[kind]}",
            value=median(speeds["ours"]) / median(speeds[PEERS[kind]]),
            unit="x",
            target=">= 1.3",
        ),
        Figure(
            metric=f"{title}: peak memory, ours / {PEERS[kind]}",
            value=median(peaks["ours"]) / median(peaks[PEERS[kind]]),
            unit="x",
            target="<= 0.7",
            note=MEMORY_NOTE,
        ),
    ]


def overhead(*, longest: int, steps: int) -> Figure:
    """The trainer's step over a bare loop's, alternating in one process."""
    arguments = ("--kind", "overhead", "--model", WORK / "model", "--longest", longest, "--steps", steps)
    done = run(sys.executable, "_ragged_ours.py", *arguments, "--microbatch-terms", 1024)
    ratio = steady(done[::2], warm=2) / steady(done[1::2], warm=2)
    return Figure(metric="overhead over a bare loop", value=100 * (ratio - 1), unit="%", target="<= 3")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    quick = parser.parse_args().quick
    WORK.mkdir(parents=True, exist_ok=True)
    if not (WORK / "model" / "config.json").is_file():
        _ragged.write_model(WORK / "model")
    longest, steps, rounds = (256, 3, 1) if quick else (512, 6, 3)
    metrics = [overhead(longest=longest, steps=4 if quick else 12)]
    trl = peer_python(TRL, TRL_ROOT)
    for kind in PEERS:
        if isinstance(trl, str):
            what = f"{kind.upper()}: tokens/s, ours / {PEERS[kind]}"
            metrics.append(Figure(metric=what, value=math.nan, unit="x", target=">= 1.3", note=trl))
        else:
            metrics += compare(kind, str(trl), longest=longest, steps=steps, rounds=rounds)
    report("train_step", metrics)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One training step on ragged lengths: this framework beside transformers' Trainer (SFT) and TRL's loss (GRPO).

    .venv/bin/python benchmarks/train_step.py [--quick]

The same 64 samples a step (_ragged.py), the same Qwen3 of 11 million parameters with a vocabulary of 32,000, float32,
the same threads; each run is a process, runs alternate, and metrics are medians. The peers pad: SFT to the longest of 8
rows, GRPO to the longest of the step, as TRL does. Ours packs as many tokens into a forward pass as 8 rows hold on
average. Overhead compares the trainer with a hand-written loop over the same policy, alternating steps in one process.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import _ragged
from _metrics import Figure, report
from _peer_env import TRL, peer_python
from _ragged_sides import TRL_ROOT, Comparison, run, steady

HERE = Path(__file__).resolve().parent
WORK = HERE.parent / ".cache" / "train_step"
PEERS = {"sft": "transformers Trainer", "grpo": "TRL"}


def overhead(*, longest: int, steps: int) -> Figure:
    """The trainer's step over a bare loop's, alternating in one process."""
    arguments = ("--kind", "overhead", "--model", WORK / "model", "--longest", longest, "--steps", steps)
    arguments += ("--pictures", "none", "--microbatch-terms", 1024)
    done = run(sys.executable, "_ragged_ours.py", *arguments, work=WORK)
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
    for kind, peer in PEERS.items():
        if isinstance(trl, str):
            what = f"{kind.upper()}: tokens/s, ours / {peer}"
            metrics.append(Figure(metric=what, value=math.nan, unit="x", target=">= 1.3", note=trl))
            continue
        sides = Comparison(
            kind=kind, peer=peer, model=WORK / "model", longest=longest, steps=steps, rounds=rounds, target=1.3
        )
        metrics += sides.figures(str(trl))
    report("train_step", metrics)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A DPO step of a language model on the CPU: this framework beside TRL's DPOTrainer, the same pairs in turns.

    .venv/bin/python benchmarks/preference.py [--quick]

The Qwen3 of 11 million random parameters of train_step.py, with its vocabulary of 32,000, in float32; 8 pairs a step in
the same order, whose losses have to agree. Prompts are of 192 to 256 tokens, or of 16 to 64; answers of 8 to 32. TRL
pads 8 sequences in a forward pass; ours packs as many tokens as 8 hold on average. Each side computes the reference in
its steps (TRL's default, our first epoch), or has it already (TRL's precompute_ref_log_probs, our second epoch). Values
are medians over runs. Memory is read in the same runs, which slows both sides.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import _ragged
from _metrics import Figure, report
from _peer_env import TRL, peer_python
from _watch import CommandFailed, Watched, watch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent / ".cache"
WORK = ROOT / "preference"
PAIRS, ROWS, MIB = 8, 8, 1 << 20
PROMPTS = {"long prompts": (192, 256), "short prompts": (16, 64)}
OURS, PEER, PRECOMPUTED = "ours", "TRL", "TRL, precomputed"
SIDES = {PEER: "reference in the step", PRECOMPUTED: "reference kept"}
NOTE = (
    "trained tokens: those of both answers with their ends, which alone have a loss; a step's time is between the ends "
    "of two steps, with reading and tokenising where a side does it there. TRL's precomputed reference is not in its "
    "steps. On a busy machine seconds are noise, and CPU time counts"
)
MEMORY_NOTE = (
    "peak RSS: the peak of each process (VmHWM) added up, libraries included. TRL is one process; ours are the "
    "command, the controller, its guard of processes and the policy. PSS counts shared pages once"
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The pairs of one epoch."""

    file: Path
    steps: int
    longest: int
    """Tokens of the longest pair, its prompt counted for each answer."""
    tokens: int
    """Of all pairs, so counted."""
    trained: list[int]
    """Tokens of answers in each step."""


def write_pairs(title: str, *, steps: int) -> Work:
    """Write rows of texts of one number a token."""
    sample = random.Random(0)
    rows, trained, lengths = list[dict[str, str]](), [0] * steps, list[int]()
    for number in range(steps * PAIRS):
        prompt, chosen, rejected = sample.randint(*PROMPTS[title]), sample.randint(8, 32), sample.randint(8, 32)
        words = [str(sample.randrange(2, _ragged.VOCABULARY)) for _ in range(prompt + chosen + rejected)]
        ends = {"prompt": words[:prompt], "chosen": words[prompt : prompt + chosen], "rejected": words[-rejected:]}
        rows.append({name: " ".join(part) for name, part in ends.items()} | {"prompt": " ".join(words[:prompt]) + " "})
        trained[number // PAIRS] += chosen + rejected + 2
        lengths.append(2 * prompt + chosen + rejected + 2)
    file = WORK / f"{title.replace(' ', '_')}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Work(file=file, steps=steps, longest=max(lengths), tokens=sum(lengths), trained=trained)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run of a side."""

    times: list[float]
    losses: list[float]
    watched: Watched

    def speed(self, work: Work, epoch: int) -> float:
        """Trained tokens a second: the median over an epoch's steps without its first."""
        times = self.times[epoch * work.steps : (epoch + 1) * work.steps]
        pairs = zip(work.trained[1:], pairwise(times), strict=True)
        return median(tokens / (end - start) for tokens, (start, end) in pairs)

    def cpu_ms(self, work: Work, epoch: int) -> float:
        """CPU time of all processes a trained token, in an epoch without its first step."""
        seen = self.watched.cpu_s
        first, last = epoch * work.steps + 1, (epoch + 1) * work.steps - 1
        return 1000 * (seen[last] - seen[first]) / sum(work.trained[1:-1])


ROWS_OF = (
    ("trained", "tokens/s", Outcome.speed, ">= 1.5", NOTE),
    ("CPU time of a trained token", "ms", Outcome.cpu_ms, "", NOTE),
    ("peak RSS", "MiB", lambda one, *_: one.watched.peak_rss / MIB, "<= 0.7", MEMORY_NOTE),
    ("peak PSS", "MiB", lambda one, *_: one.watched.peak_pss / MIB, "<= 0.7", MEMORY_NOTE),
)


def run(side: str, work: Work, trl: Path, *, epochs: int) -> Outcome:
    out, threads = WORK / "run", str(len(os.sched_getaffinity(0)))
    shutil.rmtree(out, ignore_errors=True)
    if side == OURS:
        terms = max(work.longest, ROWS * work.tokens // (2 * PAIRS * work.steps))
        values = {
            "run.output_dir": out,
            "run.max_steps": epochs * work.steps,
            "model.path": WORK / "model",
            "data.path": work.file,
            "policy.microbatch_terms": terms,
        }
        program = str(Path(sys.executable).with_name("cosmos-rl"))
        command = [program, "run", str(HERE / "preference.toml"), *(f"{key}={value}" for key, value in values.items())]
    else:
        out.mkdir()
        command = [
            str(trl),
            str(HERE / "_preference_trl.py"),
            "--model",
            str(WORK / "model"),
            "--pairs",
            str(work.file),
        ]
        command += ["--steps", str(work.steps), "--pairs-per-step", str(PAIRS), "--pairs-per-pass", str(ROWS // 2)]
        command += ["--threads", threads, "--out", str(out), *(["--precompute"] if side == PRECOMPUTED else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    steps, log = out / "metrics.jsonl", WORK / "output.log"
    watched = watch(command, steps=steps, log=log, environment=environment, timeout_s=900.0, memory=True)
    lines = [json.loads(line) for line in steps.read_text().splitlines()]
    return Outcome(times=[one["time_s"] for one in lines], losses=[one["loss"] for one in lines], watched=watched)


def measure(title: str, trl: Path, *, steps: int, rounds: int, sides: Mapping[str, str]) -> list[Figure]:
    """Return speed and memory of both, alternating. sides: the peer that each epoch of ours is compared with."""
    work = write_pairs(title, steps=steps)
    done: dict[str, list[Outcome]] = {side: [] for side in (OURS, *sides)}
    for _ in range(rounds):
        for side, outcomes in done.items():
            outcomes.append(run(side, work, trl, epochs=len(sides)))
            print(f"{title}, {side}: losses {[round(loss, 5) for loss in outcomes[-1].losses]}", flush=True)
    losses = zip(done[OURS], done[PEER], strict=True)
    apart = max(abs(a - b) for ours, peer in losses for a, b in zip(ours.losses, peer.losses))
    metric = f"{title}: losses, greatest difference"
    figures = [Figure(metric=metric, value=apart, unit="", target="<= 1e-3")]
    for epoch, (side, name) in enumerate(sides.items()):
        for what, unit, of, target, note in ROWS_OF:
            ours = median(of(one, work, epoch) for one in done[OURS])
            peer = median(of(one, work, 0) for one in done[side])
            metric = f"{title}, {name}: {what}"
            figures += [
                Figure(metric=f"{metric}, {OURS}", value=ours, unit=unit, note=note),
                Figure(metric=f"{metric}, {PEER}", value=peer, unit=unit, note=note),
                Figure(metric=f"{metric}, {OURS} / {PEER}", value=ours / peer, unit="x", target=target, note=note),
            ]
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round of long prompts")
    given = parser.parse_args()
    trl = peer_python(TRL, ROOT / "trl")
    if isinstance(trl, str):
        metrics = {f"{title}: {what}, ours / TRL": target for title in PROMPTS for what, _, _, target, _ in ROWS_OF}
        figures = [Figure(metric=m, value=math.nan, unit="x", target=t, note=trl) for m, t in metrics.items() if t]
        report("preference", figures)
        return 0
    WORK.mkdir(parents=True, exist_ok=True)
    if not (WORK / "model" / "config.json").is_file():
        _ragged.write_model(WORK / "model")
    try:
        if given.quick:
            figures = measure("long prompts", trl, steps=3, rounds=1, sides={PEER: SIDES[PEER]})
        else:
            figures = [one for title in PROMPTS for one in measure(title, trl, steps=8, rounds=3, sides=SIDES)]
    except CommandFailed as error:
        print(error, file=sys.stderr)
        return 1
    report("preference", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

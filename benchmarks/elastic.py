"""Members that die, and what several policy replicas cost.

    .venv/bin/python benchmarks/elastic.py [--quick]

Kills: three policies train a toy model on their parts of every batch; SIGKILL of one of them at a random instant, again
and again. Beside it torchft 0.2 in an environment of its own: the same network and rows, three replicas, its defaults.
The recovery ends with the first commit of the others. Of ours it ends with the second step that is reported after the
loss, since the first may have been committed before.

Steps: two policy replicas of one rank beside one replica of dp_replicate 2 (FSDP2's HSDP): supervised runs of the same
model and batch in two processes, in turns.

Leases: a controller and workers that nobody starts again; SIGKILL of one of three rollout replicas. Read from the
journal.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from pathlib import Path
from statistics import median

import _elastic_kills as kills_
import _elastic_leases as leases
import _elastic_steps as steps_
from _elastic_kills import Kill
from _metrics import Figure, report
from _peer_env import peer_python

ROOT = Path(__file__).resolve().parent.parent / ".cache" / "torchft"
TORCHFT = "torchft==0.2.0"


def kill_figures(*, rounds: int, kills: int) -> list[Figure]:
    python = peer_python(TORCHFT, ROOT)
    sides: dict[str, list[Kill]] = {"ours": [], "torchft": []}
    step_s: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides:
            if side == "torchft" and isinstance(python, str):
                continue
            draw = random.Random(number)
            done = kills_.kill_ours(kills, draw) if side == "ours" else kills_.kill_torchft(str(python), kills, draw)
            sides[side] += done[0]
            step_s[side].append(done[1])
            print(f"kills, round {number + 1}, {side}: {done} (load {os.getloadavg()[0]:.0f})", flush=True)
    figures = [
        figure
        for side, found in sides.items()
        for figure in _of_kills(side, found, step_s=step_s[side], note="" if found else str(python))
    ]
    ours = _recovered(sides["ours"])
    beyond = max(ours, default=math.nan) - _median(step_s["ours"])
    ratio = _median(ours) / _median(_recovered(sides["torchft"]))
    return [
        *figures,
        Figure(metric="ours: longest recovery, less a step", value=beyond, unit="s", target="<= 2"),
        Figure(metric="recovery, medians: ours / torchft", value=ratio, unit="x"),
    ]


def _of_kills(side: str, found: list[Kill], *, step_s: list[float], note: str) -> list[Figure]:
    title, seconds = f"{side}, {len(found)} kills", _recovered(found)
    target = "<= 0" if side == "ours" else ""
    lost = float(sum(kill.survivors_lost for kill in found)) if found else math.nan
    standing = float(len(found) - len(seconds)) if found else math.nan
    return [
        Figure(metric=f"{title}: step before", value=_median(step_s), unit="s", note=note),
        Figure(metric=f"{title}: kills without a recovery", value=standing, unit="", target=target),
        Figure(metric=f"{title}: other replicas that died", value=lost, unit="", target=target),
        Figure(metric=f"{title}: recovery, median", value=_median(seconds), unit="s"),
        Figure(metric=f"{title}: recovery, longest", value=max(seconds, default=math.nan), unit="s"),
    ]


def _recovered(kills: list[Kill]) -> list[float]:
    return [kill.recovery_s for kill in kills if math.isfinite(kill.recovery_s)]


def step_figures(model: str, *, rounds: int, steps: int, target: str) -> list[Figure]:
    found: dict[str, list[float]] = {side: [] for side in steps_.SIDES}
    for number in range(rounds):
        for side in list(found)[:: 1 if number % 2 else -1]:
            found[side].append(steps_.step_s(model, side, steps=steps))
            print(f"{model}, round {number + 1}, {side}: {found[side][-1]:.4f} s a step", flush=True)
    replicas, ranks = found
    figures = [Figure(metric=f"{model}: step, {side}", value=_median(found[side]), unit="s") for side in found]
    ratio = _median(found[replicas]) / _median(found[ranks])
    return [*figures, Figure(metric=f"{model}: {replicas} / {ranks}", value=ratio, unit="x", target=target)]


def lease_figures(*, kills: int) -> list[Figure]:
    found = leases.kill_rollouts(kills, random.Random(0))
    print(f"leases held by others after {found} s (load {os.getloadavg()[0]:.0f})", flush=True)
    title = f"rollout killed, {kills} kills: until others hold its leases"
    return [
        Figure(metric=f"{title}, median", value=_median(found), unit="s"),
        Figure(metric=f"{title}, longest", value=max(found), unit="s", target="<= 3"),
    ]


def _median(values: list[float]) -> float:
    return median(values) if values else math.nan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer kills and rounds")
    parser.add_argument("--only", choices=("kills", "steps", "leases"), help="one part alone")
    arguments = parser.parse_args()
    quick, only = arguments.quick, arguments.only
    figures: list[Figure] = []
    if only in (None, "steps"):
        for model, target in (("Qwen3 of 11M", "<= 1.1"), ("toy of 0.5M", "")):
            if not (quick and model.startswith("toy")):
                figures += step_figures(model, rounds=1 if quick else 5, steps=8 if quick else 20, target=target)
    if only in (None, "leases"):
        figures += lease_figures(kills=1 if quick else 6)
    if only in (None, "kills"):
        figures += kill_figures(rounds=1 if quick else 3, kills=2 if quick else 5)
    report("elastic", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The closing table, and a page with grids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from arms import Result
from clips import read_clips, speed_along

from cosmos_rl_wfm import brightness

CHANCE = 1 / 12
"""Chance level of the judge: one of 3 shapes and one of 4 directions."""
NOT_SHOWN = (
    "Limits: results of one seed and a model of 0.2 M parameters do not apply to large ones; DDRL's score by the judge "
    "has to be compared with the control, which trains on the same clips without a reward; and whether DDRL beats a KL "
    "term at the same reward is not tested here."
)


def write_report(directory: Path, base: dict[str, float], results: list[Result]) -> str:
    """Write report.md into `directory` and return it."""
    videos, captions = read_clips(directory / "data")
    best = {
        "brightness": max(brightness(video) for video in videos),
        "speed": max(speed_along(*clip) for clip in zip(videos, captions)),
    }
    real = {
        "brightness": float(np.mean([brightness(video) for video in videos])),
        "speed": float(np.mean([speed_along(*clip) for clip in zip(videos, captions)])),
    }
    columns = {
        "run": [r.arm.name for r in results],
        "reward": [r.arm.reward for r in results],
        "base": [f"{r.reward[0]:.3f}" for r in results],
        "after": [f"{r.reward[1]:.3f}" for r in results],
        "real clips": [f"{real[r.arm.reward]:.3f}" for r in results],
        "best of them": [f"{best[r.arm.reward]:.3f}" for r in results],
        "judge, base": [f"{r.judge[0]:.2f}" for r in results],
        "judge, after": [f"{r.judge[1]:.2f}" for r in results],
        "loss on real clips, base": [f"{r.held_out_loss[0]:.2f}" for r in results],
        "that, after": [f"{r.held_out_loss[1]:.2f}" for r in results],
        "minutes": [f"{r.minutes:.1f}" for r in results],
    }
    lines = [list(columns), ["---"] * len(columns), *zip(*columns.values())]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    grids = [
        f"- {r.arm.name}: " + ", ".join(str(path.relative_to(directory)) for path in _grids(directory / r.arm.name))
        for r in results
    ]
    notes = f"The judge is right by chance in {CHANCE:.2f}. {NOT_SHOWN}"
    text = "\n".join([table, "", notes, "", "Grids:", *grids, ""])
    (directory / "report.md").write_text(f"# Quickstart of world models\n\n{text}", encoding="utf-8")
    return text


def _grids(run: Path) -> list[Path]:
    """Contact grids of the first and the last evaluation."""
    found = sorted((run / "media" / "eval").glob("step_*/grid*.png"))
    return [found[0], found[-1]] if found else []

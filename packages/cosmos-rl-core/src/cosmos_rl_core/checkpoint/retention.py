"""Chooses the checkpoints to keep: the newest, and the best by a metric. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any


def surplus(
    steps: Collection[int],
    *,
    newest: int,
    keep: int,
    keep_best: int = 0,
    scores: Mapping[int, float] | None = None,
    healthy: int | None = None,
) -> list[int]:
    """Return the steps to remove once the checkpoint `newest` is written.

    Kept are the last `keep` up to it, the `keep_best` with the highest scores, and the last one up to step `healthy`,
    which the run may be rolled back to. Steps after `newest` are removed: they are of an abandoned attempt, as no run
    resumes before a checkpoint that is whole.
    """
    assert newest in steps and keep >= 1
    ours = sorted(step for step in steps if step <= newest)
    scored = {step: score for step, score in (scores or {}).items() if step in ours and not math.isnan(score)}
    best = sorted(scored, key=lambda step: (scored[step], step))[len(scored) - min(keep_best, len(scored)) :]
    refuge = [step for step in ours if healthy is not None and step <= healthy][-1:]
    return sorted(set(steps) - set(ours[-keep:]) - set(best) - set(refuge))


def read_scores(run_dir: Path, metric: str) -> dict[int, float]:
    """Return policy version -> metric, higher better, of the run's metrics.jsonl and eval.jsonl.

    A minus before the metric's name means that lower is better. Versions without the metric are absent.
    """
    name, sign = metric.removeprefix("-"), -1.0 if metric.startswith("-") else 1.0
    scores: dict[int, float] = {}
    for file in (run_dir / "metrics.jsonl", run_dir / "eval.jsonl"):
        for line in file.read_bytes().splitlines() if file.is_file() else ():
            match _row(line):
                case {"policy_version": int(version), **row} if isinstance(score := row.get(name), int | float):
                    scores[version] = sign * score
    return scores


def _row(line: bytes) -> Any:
    """A line of metrics; None for one that is being written, or is damaged."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None

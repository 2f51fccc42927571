"""How long the phases of a run's steady steps took, by its timeline.json.

rollouts     a span per group: generation, then the reward
training     collate, forward_backward, optim_step of each step
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

TRAINING = ("collate", "forward_backward", "optim_step")
Span = Mapping[str, Any]


def read_spans(run_dir: Path) -> list[Span]:
    events = json.loads((run_dir / "timeline.json").read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def training_s(spans: Iterable[Span], steps: range) -> float:
    """Median over steps."""
    named = [span for span in spans if span["name"] in TRAINING]
    return median(sum(span["dur"] for span in named if span["args"]["step"] == step) / 1e6 for step in steps)


def rollout_s(spans: Iterable[Span], steps: range, *, groups: int, reward_s: float = 0.0) -> float:
    """Seconds a step in which at least one of its `groups` was generated, without `reward_s` at the end of each."""
    wanted = range(steps.start * groups, steps.stop * groups)
    generated = sorted(
        (span["ts"] / 1e6, (span["ts"] + span["dur"]) / 1e6 - reward_s)
        for span in spans
        if span["name"] == "rollout" and span["args"]["sample"] in wanted
    )
    busy, end = 0.0, 0.0
    for first, last in generated:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return busy / len(steps)

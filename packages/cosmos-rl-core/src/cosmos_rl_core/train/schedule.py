"""Learning-rate schedules as functions of the step: value = base * factor(step)."""

from __future__ import annotations

import math


def factor(name: str, step: int, *, warmup_steps: int, total_steps: int | None, min_ratio: float) -> float:
    """Multiplier of the base rate at optimizer step `step` (0-based).

    Linear warm-up from 1/warmup_steps to 1, then `constant`, `linear` or `cosine` down to `min_ratio` at
    `total_steps`.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if name == "constant":
        return 1.0
    assert total_steps is not None, "the config asks for max_steps with a decaying schedule"
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    shape = 1.0 - progress if name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_ratio + (1.0 - min_ratio) * shape

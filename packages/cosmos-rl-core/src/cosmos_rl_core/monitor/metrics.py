"""What the monitor is fed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """One look at a run. What was not measured this time is None, or absent."""

    step: int
    """Optimizer steps done."""
    reward: float
    """Mean of the reward that is trained on: the proxy."""
    judges: Mapping[str, float] = field(default_factory=dict)
    """Means of judges that are never trained on, by name; higher is better."""
    held_out_loss: float | None = None
    """Flow-matching loss on real clips that no step trained on."""
    diversity: float | None = None
    """Mean distance between samples of a group, as a reward labelled `diversity` measures it in training."""
    beyond: float | None = None
    """`beyond` of the rewards: the share above the best of the data."""

    def named(self) -> dict[str, float]:
        """Return what was measured by the names that rules watch; a judge is "judge/NAME"."""
        optional = {"held_out_loss": self.held_out_loss, "diversity": self.diversity, "beyond": self.beyond}
        measured = {name: value for name, value in optional.items() if value is not None}
        return {"reward": self.reward, **measured, **{f"judge/{name}": value for name, value in self.judges.items()}}


def beyond(rewards: Sequence[float] | np.ndarray, best: float) -> float:
    """Return the share of rewards above `best`, the highest that real data earns, in [0, 1].

    Raises:
        ValueError: there are no rewards.
    """
    values = np.asarray(rewards, np.float64)
    if values.size == 0:
        raise ValueError("the share of no rewards is not defined")
    return float((values > best).mean())

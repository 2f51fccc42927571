"""The monitor's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Metrics of one check. A metric that was not measured is None or absent."""

    step: int
    """Number of optimizer steps so far."""
    reward: float
    """Mean of the reward that is trained on, the proxy."""
    judges: Mapping[str, float] = field(default_factory=dict)
    """Means of the judges (rewards that are never trained on), by name; higher is better."""
    held_out_loss: float | None = None
    """Flow-matching loss on real clips that no step trained on."""
    diversity: float | None = None
    """Mean distance between samples of a group in training: the reward labelled `diversity`."""
    beyond: float | None = None
    """`beyond` of the rewards: the fraction above the highest reward of real data."""

    def named(self) -> dict[str, float]:
        """Return the measured metrics by the names used in rules; a judge is "judge/NAME"."""
        optional = {"held_out_loss": self.held_out_loss, "diversity": self.diversity, "beyond": self.beyond}
        measured = {name: value for name, value in optional.items() if value is not None}
        return {"reward": self.reward, **measured, **{f"judge/{name}": value for name, value in self.judges.items()}}


def beyond(rewards: Sequence[float] | np.ndarray, best: float) -> float:
    """Return the fraction of rewards above `best`, the highest reward of real data.

    Raises:
        ValueError: there are no rewards.
    """
    values = np.asarray(rewards, np.float64)
    if values.size == 0:
        raise ValueError("a fraction of no rewards is not defined")
    return float((values > best).mean())

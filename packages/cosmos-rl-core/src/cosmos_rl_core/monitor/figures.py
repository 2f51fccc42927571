"""What the monitor is fed, and how two of its figures are worked out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
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
    """Mean of `diversity` over groups."""
    beyond: float | None = None
    """`beyond` of the rewards: the share above the best of the data."""

    def named(self) -> dict[str, float]:
        """Return what was measured by the names that rules watch; a judge is "judge/NAME"."""
        optional = {"held_out_loss": self.held_out_loss, "diversity": self.diversity, "beyond": self.beyond}
        measured = {name: value for name, value in optional.items() if value is not None}
        return {"reward": self.reward, **measured, **{f"judge/{name}": value for name, value in self.judges.items()}}


def diversity(samples: np.ndarray, *, chunk: int = 1 << 20) -> float:
    """Return the mean distance between two samples of a group: the root of the mean squared difference of elements.

    Clips are uint8 [G, F, H, W, 3] and count in [0, 1]; latents, float [G, ...], in their own unit. `chunk`
    elements of each sample are compared at once, which bounds the memory beside the samples themselves.

    Raises:
        ValueError: fewer than 2 samples.
    """
    num = len(samples)
    if num < 2 or samples.size == 0:
        raise ValueError(f"diversity needs a group of 2 samples or more, not {list(samples.shape)}")
    flat = samples.reshape(num, -1)
    products = np.zeros((num, num))
    for start in range(0, flat.shape[1], chunk):
        part = flat[:, start : start + chunk].astype(np.float64)
        part -= part.mean(axis=0)  # |a - b|^2 = aa - 2 ab + bb loses digits where all samples share a large part
        products += part @ part.T
    squares = np.diag(products)
    distances = np.sqrt(np.maximum(squares[:, None] + squares - 2 * products, 0.0) / flat.shape[1])
    unit = 255.0 if samples.dtype == np.uint8 else 1.0
    return float(distances[np.triu_indices(num, k=1)].mean() / unit)


def beyond(rewards: Sequence[float] | np.ndarray, best: float) -> float:
    """Return the share of rewards above `best`, the highest that real data earns, in [0, 1].

    Raises:
        ValueError: there are no rewards.
    """
    values = np.asarray(rewards, np.float64)
    if values.size == 0:
        raise ValueError("the share of no rewards is not defined")
    return float((values > best).mean())

"""Difficulty curriculum: the rows that the policy sometimes solves and sometimes fails are selected most often.

The controller keeps the success rates of each row's last visits. When the stream comes to a row again, it is selected
with the chance max(min_chance, 4 p (1 - p)), p being the mean of these rates, and skipped otherwise. p (1 - p) is the
variance of a reward that is 0 or 1, and so the strength of a group's signal. Sampling for learnability (arXiv
2502.12272) weights rows by it; GRESO (arXiv 2506.02177) skips rows by chance before their rollouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

UNSEEN = 255
"""In the place of a success rate: the row has had fewer visits."""
STREAM = 0x63757272
"""Sets the random numbers of the selection apart from those of the rows' order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Whether a sample of the prompt stream is selected. Pure: the memory is the caller's.

    The memory is one byte a visit, [rows * visits]: a success rate in percent or `UNSEEN`, the newest visit of a row
    last.
    """

    num_rows: int
    row_of: Callable[[int], int]
    """Sample id -> index of its row, 0 .. num_rows - 1."""
    visits: int
    """Visits of a row that are remembered."""
    min_chance: float
    """Least chance of a row to be selected, above 0."""
    failed_reward: float
    solved_reward: float
    seed: int

    def memory(self, saved: bytes = b"") -> bytearray:
        """Return a memory, with the rates of a checkpoint where it has some of the same shape."""
        size = self.num_rows * self.visits
        return bytearray(saved) if len(saved) == size else bytearray([UNSEEN]) * size

    def remember(self, memory: bytearray, sample: int, mean_reward: float) -> None:
        """Add the success rate of a group by its mean reward; the row's oldest rate is forgotten."""
        success = (mean_reward - self.failed_reward) / (self.solved_reward - self.failed_reward)
        start = self.row_of(sample) * self.visits
        end = start + self.visits
        memory[start:end] = memory[start + 1 : end] + bytes([round(100 * min(max(success, 0.0), 1.0))])

    def chance(self, memory: bytearray, sample: int) -> float:
        """Return the chance that a sample is selected; 1 for a row without visits."""
        start = self.row_of(sample) * self.visits
        rates = [rate / 100 for rate in memory[start : start + self.visits] if rate != UNSEEN]
        if not rates:
            return 1.0
        mean = sum(rates) / len(rates)
        return max(self.min_chance, 4 * mean * (1 - mean))

    def selects(self, memory: bytearray, sample: int) -> bool:
        """Return whether a sample is selected. The random number is a function of seed and sample alone."""
        return bool(np.random.default_rng([self.seed, STREAM, sample]).random() < self.chance(memory, sample))

"""Supervised rows trained beside the rollouts; the step's number alone determines them.

In language models this is the pretraining mix of InstructGPT (arXiv 2203.02155, equation 2); in world models the data
term of DDRL, whose loss is a forward KL divergence from the data to the policy up to a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cosmos_rl_core.data.source import PromptSource
from cosmos_rl_core.types import Prompt, TrainBatch


class DataTerm:
    """A second stream of rows with a position of its own."""

    def __init__(
        self, source: PromptSource, *, rows_per_step: int, collate: Callable[[Sequence[Prompt]], TrainBatch]
    ) -> None:
        self._source = source
        self._rows_per_step = rows_per_step
        self._collate = collate

    def __call__(self, step: int) -> TrainBatch:
        """Return this rank's share of the rows of a step."""
        first = step * self._rows_per_step
        return self._collate([self._source[first + i] for i in range(self._rows_per_step)])

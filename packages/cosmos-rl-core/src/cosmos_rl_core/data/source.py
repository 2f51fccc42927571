"""The prompt stream: a pure function from sample id to row, so that the position to resume from is one number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import Prompt


class PromptSource:
    """Rows of a dataset, shuffled anew each epoch by (seed, epoch).

    source[17]     the 18th prompt of the stream, the same in every process and after every restart
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        origin: str,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
    ) -> None:
        if not len(rows):
            raise UserError(f"{origin} has no rows: there are no prompts. Check [data] path, split and limit.")
        self._rows = rows
        self._origin = origin
        self._shuffle = shuffle
        self._seed = seed
        self._epochs = epochs
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def total(self) -> int | None:
        """Prompts in the stream; None when it is endless."""
        return None if self._epochs is None else self._epochs * len(self._rows)

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self._rows)

    def __getitem__(self, sample_id: int) -> Prompt:
        epoch, place = divmod(sample_id, len(self._rows))
        if self._epochs is not None and epoch >= self._epochs:
            raise IndexError(f"sample {sample_id} is after the last epoch ({self._epochs})")
        index = int(self._epoch_order(epoch)[place])
        return Prompt(sample_id=sample_id, row=self._rows[index], origin=f"{self._origin}:{index + 1}")

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            epoch = 0
        if self._order is None or self._order[0] != epoch:
            rows = len(self._rows)
            order = np.random.default_rng([self._seed, epoch]).permutation(rows) if self._shuffle else np.arange(rows)
            self._order = (epoch, order)
        return self._order[1]

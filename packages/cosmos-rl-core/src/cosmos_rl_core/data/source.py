"""Rows of a dataset: their order, and those that cannot be read.

The prompt stream is a pure function from sample id to row, so that the position to resume from is one number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
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
        skip: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        is_slow: Callable[[Mapping[str, Any]], bool] = lambda row: False,
    ) -> None:
        """skip: first rows that are left out. is_slow: whether a row takes long to read, for `upcoming`."""
        if not len(rows):
            raise UserError(f"{origin} has no rows: there are no prompts. Check [data] path, split and limit.")
        self._rows = rows[skip:] if skip else rows
        self._skip = skip
        self._origin = origin
        self._shuffle = shuffle
        self._seed = seed
        self._epochs = epochs
        self._is_slow = is_slow
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
        return Prompt(sample_id=sample_id, row=self._rows[index], origin=f"{self._origin}:{self._skip + index + 1}")

    def upcoming(self, after: int, count: int) -> list[Prompt]:
        """Return the prompts that take long to read among the `count` ones after a sample, or fewer at the end."""
        end = after + 1 + count if self.total is None else min(after + 1 + count, self.total)
        return [prompt for prompt in map(self.__getitem__, range(after + 1, end)) if self._is_slow(prompt.row)]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            epoch = 0
        if self._order is None or self._order[0] != epoch:
            rows = len(self._rows)
            order = np.random.default_rng([self._seed, epoch]).permutation(rows) if self._shuffle else np.arange(rows)
            self._order = (epoch, order)
        return self._order[1]


log = logging.getLogger(__name__)

TOLERATED = 8
"""Unreadable rows that a run may have, however few it has read."""
SHOWN = 3
"""Reasons in a message."""


class Faults:
    """Why rows of a [data] section could not be read. Any thread may ask for reasons; one adds them."""

    def __init__(self, symptom: str) -> None:
        """symptom: completes the error "9 of 12 rows so far", such as "have no images"."""
        self._symptom = symptom
        self._reasons: dict[Hashable, str] = {}
        self._new: list[str] = []
        self._wanted = self._missing = 0

    def reason(self, row: Hashable) -> str | None:
        """Return why a row could not be read before; None where it could, or was not tried."""
        return self._reasons.get(row)

    def want(self, count: int) -> None:
        """Count rows that are read."""
        self._wanted += count

    def take_new(self) -> tuple[str, ...]:
        """Return the reasons that were added since the last call."""
        new, self._new = tuple(self._new), []
        return new

    def add(self, row: Hashable, reason: str) -> None:
        """Count a row that could not be read, and name it the first time.

        Raises:
            UserError: more than `TOLERATED`, and more than half of all rows so far, could not be read.
        """
        self._missing += 1
        if row not in self._reasons:
            self._reasons[row] = reason
            self._new.append(reason)
            log.warning("left out, no. %d of %d rows so far: %s", self._missing, self._wanted, reason)
        if self._missing > max(TOLERATED, self._wanted / 2):
            shown = "; ".join(list(self._reasons.values())[:SHOWN]) + ("; ..." if len(self._reasons) > SHOWN else "")
            raise UserError(f"{self._missing} of {self._wanted} rows so far {self._symptom}: {shown}")

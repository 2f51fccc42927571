"""Rows of a dataset: their order, and those that cannot be read.

The prompt stream is a pure function from sample id to row, so that the position to resume from is one number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

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
        index = self.row_of(sample_id)
        number = self._rows.numbers[index] if isinstance(self._rows, UsableRows) else self._skip + index + 1
        return Prompt(sample_id=sample_id, row=self._rows[index], origin=f"{self._origin}:{number}")

    def row_of(self, sample_id: int) -> int:
        """Return the index of a sample's row, from 0 to the number of rows less 1."""
        epoch, place = divmod(sample_id, len(self._rows))
        if self._epochs is not None and epoch >= self._epochs:
            raise IndexError(f"sample {sample_id} is after the last epoch ({self._epochs})")
        return int(self._epoch_order(epoch)[place])

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


@dataclass(frozen=True, slots=True)
class UsableRows(Sequence[Mapping[str, Any]]):
    """The rows of a dataset without those that cannot be used."""

    rows: Sequence[Mapping[str, Any]]
    numbers: Sequence[int]
    """Of each row in the dataset, from 1."""
    note: str
    """Number of rows that were dropped, and the reason of the first."""

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> UsableRows: ...
    def __getitem__(self, place: int | slice) -> Mapping[str, Any] | UsableRows:
        if isinstance(place, slice):
            return UsableRows(self.rows[place], self.numbers[place], self.note)
        return self.rows[place]


def usable_rows(
    located: Iterable[tuple[str, Any]], read: Callable[[str, Any], Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return what `read` makes of each (location, row), without the rows of which it raises UserError.

    A dataset without such rows is a list.

    Raises:
        UserError: no row can be used, or more than `TOLERATED` and more than half of them cannot. Errors of `located`
            are those of a damaged file, of which it is not known how much is lost.
    """
    rows: list[Mapping[str, Any]] = []
    numbers: list[int] = []
    count, first = 0, ""
    for count, (where, row) in enumerate(located, 1):
        try:
            rows.append(read(where, row))
            numbers.append(count)
        except UserError as error:
            first = first or str(error)
            if not rows and count > TOLERATED:  # a key is wrong: the rest need not be read
                break
    dropped = count - len(rows)
    if not dropped:
        return rows
    if not rows:
        raise UserError(first if count == 1 else f"{first}; none of {count} rows so far can be used")
    note = f"{dropped} of {count} rows cannot be used; the first: {first}"
    if dropped > max(TOLERATED, count / 2):
        raise UserError(note)
    return UsableRows(rows, numbers, f"{note}; they are dropped")


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
        self._num_rows = self._missing = 0

    def reason(self, row: Hashable) -> str | None:
        """Return why a row could not be read before; None where it could, or was not tried."""
        return self._reasons.get(row)

    def want(self, count: int) -> None:
        """Count rows that are read."""
        self._num_rows += count

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
            log.warning("left out, no. %d of %d rows so far: %s", self._missing, self._num_rows, reason)
        if self._missing > max(TOLERATED, self._num_rows / 2):
            shown = "; ".join(list(self._reasons.values())[:SHOWN]) + ("; ..." if len(self._reasons) > SHOWN else "")
            raise UserError(f"{self._missing} of {self._num_rows} rows so far {self._symptom}: {shown}")

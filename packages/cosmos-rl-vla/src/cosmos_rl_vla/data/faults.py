"""Rows whose pictures cannot be read: each is named once, and a run ends when they are most of its rows."""

from __future__ import annotations

import logging
from collections.abc import Hashable

from cosmos_rl_core.errors import UserError

log = logging.getLogger(__name__)

TOLERATED = 8
"""Rows without pictures that a run may have, however few it has read."""


class Faults:
    """What was wrong with which rows of a dataset."""

    def __init__(self) -> None:
        self._reasons: dict[Hashable, str] = {}
        self._new: list[str] = []
        self._wanted = self._missing = 0

    def want(self, count: int) -> None:
        """Count rows that were read."""
        self._wanted += count

    def take_new(self) -> tuple[str, ...]:
        """Return the reasons that were added since the last call."""
        new, self._new = tuple(self._new), []
        return new

    def add(self, row: Hashable, reason: str) -> None:
        """Count one of them that gave no pictures, and name it the first time.

        Raises:
            UserError: more than `TOLERATED`, and more than half of all so far, gave none.
        """
        self._missing += 1
        if row not in self._reasons:
            self._reasons[row] = reason
            self._new.append(reason)
            log.warning("left out, no. %d of %d rows so far: %s", self._missing, self._wanted, reason)
        if self._missing > max(TOLERATED, self._wanted / 2):
            first = next(iter(self._reasons.values()))
            raise UserError(f"{self._missing} of {self._wanted} rows so far have no pictures; the first: {first}")

"""Rows whose pictures or clips cannot be read: each is named once, and a run ends when they are most of its rows."""

from __future__ import annotations

import logging
from collections.abc import Hashable

from cosmos_rl_core.errors import UserError

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

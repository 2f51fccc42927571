"""Rows that give no clip: each is named once and not tried again, and a run ends when they are most of its rows."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from typing import Any

from cosmos_rl_core.errors import UserError

log = logging.getLogger(__name__)

TOLERATED = 8
"""Rows without a clip that a run may have, however few it has read."""
SHOWN = 3
"""Reasons in a message."""

Row = Mapping[str, Any]


class Faults:
    """What was wrong with which rows of a [data] section. Any thread may ask for reasons; one adds them."""

    def __init__(self) -> None:
        self._reasons: dict[Hashable, str] = {}
        self._new: list[str] = []
        self._wanted = self._missing = 0

    def reason(self, row: Row) -> str | None:
        """Return why a row gave no clip before; None where it did, or was not tried."""
        return self._reasons.get(_name(row))

    def want(self, count: int) -> None:
        """Count rows that are about to be read."""
        self._wanted += count

    def take_new(self) -> tuple[str, ...]:
        """Return the reasons that were added since the last call."""
        new, self._new = tuple(self._new), []
        return new

    def add(self, row: Row, reason: str) -> None:
        """Count one of them that gave no clip, and name it the first time.

        Raises:
            UserError: more than `TOLERATED`, and more than half of all so far, gave none.
        """
        self._missing += 1
        if _name(row) not in self._reasons:
            self._reasons[_name(row)] = reason
            self._new.append(reason)
            log.warning("left out, no. %d of %d rows so far: %s", self._missing, self._wanted, reason)
        if self._missing > max(TOLERATED, self._wanted / 2):
            shown = "; ".join(list(self._reasons.values())[:SHOWN])
            more = "; ..." if len(self._reasons) > SHOWN else ""
            raise UserError(
                f"{self._missing} of {self._wanted} rows so far give no clip that can be trained on: {shown}{more}"
            )


def _name(row: Row) -> Hashable:
    return row["key"], row["video"], tuple(row.get("video_at") or ())

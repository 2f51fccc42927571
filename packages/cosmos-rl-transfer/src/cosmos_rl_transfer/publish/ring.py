"""The few slots that buckets are packed into, shared by all who need one."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass


@dataclass(slots=True)
class _Holder:
    owner: object | None = None
    since: float = math.inf
    """When it was handed over to a reader; before that it is being filled."""


class Ring:
    """Hands out slot numbers. A reader that keeps one too long loses it to the next; its hash will tell.

    slot = take(owner)         nobody else may touch it while it is filled and hashed
    hand_over(slot, owner)     a reader has it from here on, and may keep it for the patience
    free(slot, owner)
    """

    def __init__(self, num_slots: int, *, patience_s: float) -> None:
        self._slots = [_Holder() for _ in range(num_slots)]
        self._patience_s = patience_s
        self._changed = threading.Condition()

    def take(self, owner: object, *, wait: bool) -> int | None:
        """Return a slot for `owner`; None if none is free and `wait` is false."""
        with self._changed:
            while (slot := self._free()) is None:
                if not wait:
                    return None
                oldest = min(holder.since for holder in self._slots)
                late_in = max(0.0, oldest + self._patience_s - time.monotonic())
                self._changed.wait(late_in if late_in < math.inf else None)
            self._slots[slot] = _Holder(owner)
            return slot

    def hand_over(self, slot: int, owner: object) -> None:
        """Start the time that a reader may keep `owner`'s slot."""
        with self._changed:
            assert self._slots[slot].owner is owner, "nobody takes a slot that is being filled"
            self._slots[slot].since = time.monotonic()
            self._changed.notify_all()

    def _free(self) -> int | None:
        """A free slot, or one that was held too long. The lock is held."""
        for slot, holder in enumerate(self._slots):
            if holder.owner is None:
                return slot
        late = time.monotonic() - self._patience_s
        return next((slot for slot, holder in enumerate(self._slots) if holder.since <= late), None)

    def free(self, slot: int, owner: object) -> None:
        """Give a slot back; nothing happens if it is not the owner's any more."""
        with self._changed:
            if 0 <= slot < len(self._slots) and self._slots[slot].owner is owner:
                self._slots[slot].owner = None
                self._changed.notify()

    def holds(self, owner: object) -> int:
        """How many slots `owner` holds."""
        with self._changed:
            return sum(holder.owner is owner for holder in self._slots)

    def leave(self, owner: object) -> None:
        """Give back all that `owner` holds."""
        with self._changed:
            for holder in self._slots:
                if holder.owner is owner:
                    holder.owner = None
            self._changed.notify_all()

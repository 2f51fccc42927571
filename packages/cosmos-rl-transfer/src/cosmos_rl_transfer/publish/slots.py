"""Memory that buckets are packed into: slots, which readers share, and spare blocks for copies."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass

import numpy as np

from cosmos_rl_transfer.content.raw import Raw


@dataclass(slots=True, eq=False)
class Hold:
    """One use of a slot, from `take` to `free`."""

    slot: int
    owner: object
    since: float = math.inf
    """When the reader got it; infinite while it is being filled."""


class Slots:
    """Lends slots. A reader that keeps one for longer than `patience_s` may lose it to the next.

    hold = take(owner)   nobody else may touch hold.slot while it is filled and hashed
    start_reading(hold)  the reader may keep it for `patience_s` from here on
    free(hold)           false if the slot was lost
    """

    def __init__(self, num_slots: int, *, patience_s: float) -> None:
        self._held: list[Hold | None] = [None] * num_slots
        self._patience_s = patience_s
        self._changed = threading.Condition()

    def take(self, owner: object, *, wait: bool) -> Hold | None:
        """Return a slot for `owner`; None if `wait` is false and none is free or held too long by another owner."""
        with self._changed:
            while (slot := self._free(None if wait else owner)) is None:
                if not wait:
                    return None
                oldest = min((hold.since for hold in self._held if hold is not None), default=math.inf)
                late_in = max(0.0, oldest + self._patience_s - time.monotonic())
                self._changed.wait(late_in if late_in < math.inf else None)
            self._held[slot] = hold = Hold(slot, owner)
            return hold

    def start_reading(self, hold: Hold) -> None:
        """Start the time that a reader may keep a slot."""
        with self._changed:
            assert self._held[hold.slot] is hold, "a slot that is being filled cannot be lost"
            hold.since = time.monotonic()
            self._changed.notify_all()

    def free(self, hold: Hold) -> bool:
        """Return a slot; false, without effect, if it was lost to another owner."""
        with self._changed:
            kept = self._held[hold.slot] is hold
            if kept:
                self._held[hold.slot] = None
                self._changed.notify()
            return kept

    def holds(self, owner: object) -> int:
        """Return the number of slots `owner` holds."""
        with self._changed:
            return sum(hold is not None and hold.owner is owner for hold in self._held)

    def leave(self, owner: object) -> None:
        """Free all slots of `owner`."""
        with self._changed:
            self._held = [None if hold is None or hold.owner is owner else hold for hold in self._held]
            self._changed.notify_all()

    def _free(self, but: object | None) -> int | None:
        """Return a free slot, or one held too long by another owner than `but`. The lock is held."""
        late = time.monotonic() - self._patience_s
        for slot, hold in enumerate(self._held):
            if hold is None:
                return slot
        return next((h.slot for h in self._held if h is not None and h.since <= late and h.owner is not but), None)


class Spare:
    """Blocks of one size. Any thread may call."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[Raw] = []
        self._guard = threading.Lock()

    def take(self, num_bytes: int) -> Raw:
        """Return uint8 [num_bytes] with any content; at most a block."""
        with self._guard:
            block = self._blocks.pop() if self._blocks else None
        return (np.empty(self._block_bytes, np.uint8) if block is None else block)[:num_bytes]

    def give(self, taken: Raw) -> None:
        """Return what `take` returned, for the next `take`."""
        assert isinstance(taken.base, np.ndarray), "a part of a block"
        with self._guard:
            self._blocks.append(taken.base)

    def shrink(self) -> None:
        """Free half of the blocks: the last fence needed none."""
        with self._guard:
            del self._blocks[len(self._blocks) // 2 :]

"""The ledger behind its journal.

event -> ledger.on -> records -> journal -> one flush for everything queued -> outputs, for the controller to send
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from cosmos_rl_core.control.journal import Journal
from cosmos_rl_core.control.ledger.events import Event, Output, Tick
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.records import Record
from cosmos_rl_core.errors import TakenOver

FLUSHES_PER_S, FLUSH_BURST = 200.0, 100
"""Flushes of a ledger that share the events of thousands of workers: at most so many a second, after so many at once. A
flush takes 0.1 to 0.2 ms of processor time, as much as ten messages."""
CHECK_S = 1.0
SNAPSHOT_RECORDS = 250_000
"""Records after which the ledger's state is saved: a controller that takes over replays no more, about a second."""


class Pace:
    """Limits how often something is done: `burst` times at once, then at most `per_s` times a second."""

    def __init__(self, per_s: float, *, burst: int) -> None:
        self._per_s, self._burst = per_s, burst
        self._left, self._at = float(burst), -math.inf

    async def wait(self) -> bool:
        """Wait until it may be done once more; return whether that took time."""
        now = asyncio.get_running_loop().time()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s) - 1.0
        self._at = now
        if self._left >= 0.0:
            return False
        await asyncio.sleep(-self._left / self._per_s)
        return True

    def refill(self) -> None:
        self._left = float(self._burst)


class DurableLedger:
    """Feeds events to the ledger in order; returns its outputs in the same order, after their records are on disk.

    durable.feed(event)                         # returns at once
    for output in await durable.outputs(): ...  # one task, again and again
    """

    def __init__(self, ledger: Ledger, *, journal: Journal, clock: Callable[[], float]) -> None:
        self.ledger = ledger
        self.clock = clock
        self._error: Exception | None = None
        """After an error events are ignored: the ledger may be ahead of its journal."""
        self._checked_at = -math.inf
        self._journal = journal
        self._outputs: list[Output] = []
        self._work = asyncio.Event()
        """Set when there are outputs or records, and after an error."""
        self._pace = Pace(FLUSHES_PER_S, burst=FLUSH_BURST)

    def feed(self, event: Event) -> list[Record]:
        """Pass an event to the ledger and return the resulting records. Raises any error, as `outputs` does then."""
        if self._error is not None:
            return []
        try:
            records, outputs = self.ledger.on(self.clock(), event)
            for record in records:
                self._journal.append(record)
        except Exception as error:
            self.end(error)
            raise
        self._outputs += outputs
        if records or outputs:
            self._work.set()
        return records

    def check_owner(self) -> None:
        """Raise TakenOver, also in `outputs`, if another controller has taken over. It looks once a second.

        A controller that was stopped finds messages of workers when it goes on, whose results are the other one's.
        """
        if isinstance(self._error, TakenOver):
            raise self._error
        now = self.clock()
        if now - self._checked_at < CHECK_S:
            return
        self._checked_at = now
        try:
            self._journal.check_owner()
        except TakenOver as error:
            self.end(error)
            raise

    def end(self, error: Exception) -> None:
        """Ignore events from now on, because of this error."""
        self._error = error
        self._work.set()

    async def outputs(self) -> list[Output]:
        """Return the next outputs of the ledger once their records are on disk. Raises any error."""
        if self._journal.num_since_snapshot >= SNAPSHOT_RECORDS:
            self._journal.take_snapshot(self.ledger.snapshot())
        await self._work.wait()
        if self._error is not None:
            raise self._error
        before = self._journal.num_records
        if await self._pace.wait() and self._journal.num_records == before:
            self._pace.refill()  # few workers, each of which waits for its answer: nothing to share a flush with
        self._work.clear()
        outputs, self._outputs = self._outputs, []
        await self._journal.flush()
        return outputs

    async def tick(self, every_s: float) -> None:
        """Feed a `Tick` to the ledger at this interval, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            self.feed(Tick())

"""The ledger behind its journal: what it decides is written down before anyone hears of it.

event -> ledger.on -> records -> journal -> (one flush for all that is waiting) -> effects -> dispatch
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cosmos_rl_core.control.journal.journal import Journal
from cosmos_rl_core.control.ledger.events import Event
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.outputs import Effect
from cosmos_rl_core.control.ledger.records import Record


class DurableLedger:
    """Feeds events in order; effects leave in the same order, each after its records are on disk.

    accounts.feed(event)            # returns at once
    await accounts.run()            # flushes and dispatches until cancelled
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        journal: Journal,
        clock: Callable[[], float],
        dispatch: Callable[[Effect], None],
    ) -> None:
        self.ledger = ledger
        self._journal = journal
        self._clock = clock
        self._dispatch = dispatch
        self._effects: list[Effect] = []
        self._work = asyncio.Event()

    def feed(self, event: Event) -> list[Record]:
        """Let the ledger decide about an event, and return what it decided."""
        records, effects = self.ledger.on(self._clock(), event)
        for record in records:
            self._journal.append(record)
        self._effects += effects
        if records or effects:
            self._work.set()
        return records

    async def run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            effects, self._effects = self._effects, []
            await self._journal.flush()
            for effect in effects:
                self._dispatch(effect)

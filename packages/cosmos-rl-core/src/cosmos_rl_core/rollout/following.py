"""Follows the weights of the publishing policy, which may be replaced by another one during the run.

publication (address, lineage) -> subscriber -> version staged -> engine switched, again and again
    |                                |
    |                                +-- the publisher is gone: the engine goes on with its weights, the
    |                                    subscriber tries again until the next publication
    +-- another address: the subscriber is closed and one of the new address opened; generation goes on, and
        pauses at a token boundary for the switch
    +-- another lineage: the weights so far are void; the first version of the new lineage may be lower
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cosmos_rl_core.interfaces import RolloutEngine
from cosmos_rl_core.observe.trace import WAITS, Timeline
from cosmos_rl_core.weight_sync import WeightSubscriber

RETRY_S = 1.0
"""Seconds between two attempts to reach a publisher that is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The publisher of the run's weights."""

    address: str
    """Empty while no policy publishes weights of the lineage."""
    lineage: int = 0
    version: int = 0
    """Version that is needed between those of the interval."""


class WeightFollower:
    """Keeps an engine at the newest version of the publisher in charge, or at those divisible by an interval."""

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        publications: Callable[[], Awaitable[Publication | None]],
        subscribe: Callable[[str], Awaitable[WeightSubscriber]],
        lineage: int = 0,
        interval: int = 1,
        timeline: Timeline | None = None,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        """publications: returns the next publication, or None when the run is over. lineage: the run's at the start.

        interval: versions divisible by it are loaded, a later one if they are missed, and those that are needed. log:
        receives a line for each version.
        """
        self._interval = interval
        self.lineage = lineage
        """Lineage of the engine's weights."""
        self._engine = engine
        self._publications = publications
        self._subscribe = subscribe
        self._timeline = timeline or Timeline("rollout")
        self._log = log
        self._newest = lineage

    async def run(self, *, switched: Callable[[], None], rolled_back: Callable[[], None]) -> None:
        """Follow until the run is over.

        switched: called after each switch. rolled_back: called when a new lineage begins, before its first switch.
        """
        news = asyncio.ensure_future(self._publications())
        try:
            while (publication := await news) is not None:
                news = asyncio.ensure_future(self._publications())
                if publication.lineage != self._newest:
                    self._newest = publication.lineage
                    rolled_back()
                while publication.address and not news.done():
                    with contextlib.suppress(ConnectionError):  # it is gone: another one will be named, or it returns
                        await self._follow(publication, news, switched)
                    await asyncio.wait([news], timeout=RETRY_S)
        finally:
            news.cancel()

    async def _follow(
        self, publication: Publication, news: asyncio.Future[Publication | None], switched: Callable[[], None]
    ) -> None:
        """Follow one publisher until there is news. Raises ConnectionError if it is gone."""
        after = self._engine.version if publication.lineage == self.lineage else -1
        subscriber = await self._subscribe(publication.address)
        try:
            while not news.done():
                staging = asyncio.ensure_future(subscriber.stage(after=self._next(after, publication) - 1))
                try:
                    with self._timeline.span("wait for weights", track=WAITS, source=publication.address) as wait:
                        await asyncio.wait([staging, news], return_when=asyncio.FIRST_COMPLETED)
                        if news.done():
                            return
                        after = staging.result()
                        wait.add(version=after, **subscriber.counts())
                finally:
                    staging.cancel()
                    await asyncio.gather(staging, return_exceptions=True)
                with self._timeline.span("switch weights", track="weights", version=after):
                    await self._engine.switch(after, subscriber.apply)  # never interrupted: it changes the weights
                self._log(f"weights of version {after} from {publication.address}")
                self.lineage = publication.lineage
                switched()
        finally:
            await subscriber.close()

    def _next(self, version: int, publication: Publication) -> int:
        """Return the lowest version to load after `version`."""
        due = (version // self._interval + 1) * self._interval
        return min(due, publication.version) if version < publication.version else due

"""A subscriber's connections to the ranks that publish.

Lost ranks are left out as long as one answers: other ranks that hold copies of their parts send these instead.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_core.wire.tls import Tls
from cosmos_rl_transfer.errors import LayoutError, PeerLost, TransferError
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.planning.plan import TransferPlan, plan
from cosmos_rl_transfer.publish.publisher import SEPARATOR
from cosmos_rl_transfer.pull.feed import Feed

T = TypeVar("T")


class Sources:
    """Connects when it is asked to, and again after a loss. One thread uses it; any may interrupt it."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        token: bytes,
        timeout_s: float,
        joined: Callable[[Sequence[Feed]], None] | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Store the addresses, one string or several. `joined` gets new connections and may refuse them by raising."""
        self.addresses = addresses.split(SEPARATOR) if isinstance(addresses, str) else list(addresses)
        self.lost: list[str] = []
        """Reasons for which publishers were left out when the connections were made."""
        self._timeout_s, self._joined = timeout_s, joined
        self._open = partial(Feed.open, token=token, tls=tls)
        self._feeds: list[Feed] = []
        self._others: list[Feed] = []
        self._stopped = self._closed = False
        self._guard = threading.Lock()
        """Over the four above."""

    @property
    def stopped(self) -> bool:
        """Whether the work was cancelled or the connections were closed."""
        return self._stopped or self._closed

    @property
    def connected(self) -> list[Feed]:
        """Return the open connections."""
        with self._guard:
            return list(self._feeds)

    def feeds(self) -> list[Feed]:
        """Return the connections; opens them if there are none. Raises PeerLost where no publisher answers."""
        with self._guard:
            if self._feeds:
                return self._feeds
        feeds: list[Feed] = []
        try:
            self._open_all(feeds)
            if self._joined is not None:
                self._joined(feeds)
            with self._guard:
                if self.stopped:
                    raise TransferError("the subscriber is closed" if self._closed else "stopped")
                self._feeds = feeds
        except BaseException:
            for feed in feeds:
                feed.close()
            raise
        return feeds

    def open(self, address: str, *, timeout_s: float) -> Feed:
        """Connect to another subscriber, until `drop` or `disconnect`."""
        feed = self._open(address, timeout_s=timeout_s)
        with self._guard:
            self._others.append(feed)
            if not self.stopped:
                return feed
        feed.close()
        raise TransferError("stopped")

    def drop(self, feed: Feed) -> None:
        """Close a connection of `open`."""
        with self._guard:
            self._others = [other for other in self._others if other is not feed]
        feed.close()

    def attempt(self, work: Callable[[], T]) -> T:
        """Return what `work` returns. Where it loses a publisher it is done again with those that are left.

        After an error the connections are closed.
        """
        left = len(self.addresses)
        while True:
            try:
                return work()
            except PeerLost:
                self.disconnect()
                left -= 1
                if left <= 0 or self.stopped:
                    raise
            except BaseException:
                self.disconnect()
                raise

    def disconnect(self) -> None:
        """Close the connections; a thread that waits in one gets PeerLost. Any thread may call."""
        with self._guard:
            feeds, self._feeds, self._others = [*self._feeds, *self._others], [], []
        for feed in feeds:
            feed.close()

    async def run(self, executor: Executor, work: Callable[[], T]) -> T:
        """Return the result of blocking `work` in a thread. Cancelling stops the work and waits for its end."""
        self._stopped = False
        future = asyncio.get_running_loop().run_in_executor(executor, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._stopped = True
            self.disconnect()
            await asyncio.wait([future])
            future.exception()  # retrieved, so that asyncio does not log it
            raise

    def close(self) -> None:
        """Disconnect for good. Any thread may call, twice."""
        self._closed = True
        self.disconnect()

    def _open_all(self, feeds: list[Feed]) -> None:
        self.lost = []
        for address in self.addresses:
            try:
                feeds.append(self._open(address, timeout_s=self._timeout_s))
            except PeerLost as error:
                self.lost.append(str(error))
        if not feeds:
            raise PeerLost("; ".join(self.lost))

    def plan(
        self, feeds: Sequence[Feed], target: Manifest, *, rank: int, position: int
    ) -> tuple[TransferPlan, tuple[int, ...]]:
        """Plan what `rank` of `target` gets from the publishers that are there.

        Returns the plan and the source ranks it was made over, () for all. Raises LayoutError where the publishers do
        not fit each other or the target, and PeerLost where those that are left do not hold everything.
        """
        first = feeds[0]
        if any(feed.welcome.source != first.welcome.source for feed in feeds):
            raise LayoutError(f"the publishers at {self.addresses} do not publish the same tensors")
        transfer = planned(feeds[0], target, sources=(), position=position)
        here = tuple(sorted(feed.welcome.rank for feed in feeds))
        missing = sorted({rank_ for rank_ in first.source.ranks if transfer.stream(rank_, rank)} - {*here})
        if not missing:
            return transfer, ()
        if not self.lost:
            raise LayoutError(f"source ranks {missing} hold needed weights; pass their addresses too")
        try:
            return planned(feeds[0], target, sources=here, position=position), here
        except LayoutError as error:
            raise PeerLost(f"source ranks {missing} are gone, the others do not hold everything: {error}") from error


def planned(feed: Feed, target: Manifest, *, sources: tuple[int, ...], position: int) -> TransferPlan:
    """Plan what `target` gets of what the other end of `feed` describes: of these ranks, () for all."""
    welcome = feed.welcome
    return plan(
        feed.source.only(sources) if sources else feed.source,
        target,
        relay="off",
        bucket_bytes=welcome.bucket_bytes,
        wire_dtype=welcome.wire_dtype,
        position=position,
    )


def agree(feeds: Sequence[Feed], after: int) -> int:
    """Return the newest version that all publishers have; they all publish the same versions."""
    versions = [feed.newer(after) for feed in feeds]
    while min(versions) < (newest := max(versions)):
        versions = [v if v == newest else feed.newer(newest - 1) for feed, v in zip(feeds, versions)]
    return newest


def published_specs(address: str, *, token: bytes, timeout_s: float, tls: Tls | None = None) -> list[WeightSpec]:
    """Return the tensors that the publishers at `address`, of one rank or of several, hold together.

    Raises PeerLost or AuthenticationError.
    """
    feed = Feed.open(address.split(SEPARATOR)[0], token=token, timeout_s=timeout_s, tls=tls)
    try:
        return list(feed.source.specs.values())
    finally:
        feed.close()

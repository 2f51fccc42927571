"""The engine's side.

stage(after)
    wait for a version newer than `after`                    all publishers must agree on it
    lease its slot, read every bucket into staging           a bucket whose hash differs is read once more
    compare each tensor's additive hash                      over the parts of all publishers
    overtaken meanwhile? begin again with the newest
apply()                                                      staging -> live tensors, casting
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from cosmos_rl_transfer.arena import Arena
from cosmos_rl_transfer.errors import LayoutError, Superseded, TransferError, WeightMismatch
from cosmos_rl_transfer.feed import Feed
from cosmos_rl_transfer.layout import Manifest
from cosmos_rl_transfer.messages import Lent
from cosmos_rl_transfer.pack import unpack
from cosmos_rl_transfer.plan import plan
from cosmos_rl_transfer.publisher import num_threads
from cosmos_rl_transfer.pull import Puller
from cosmos_rl_transfer.transports.base import Transport

if TYPE_CHECKING:
    from torch import Tensor


class Subscriber:
    """Keeps live tensors up to date with one or several publishers. Implements WeightSubscriber."""

    def __init__(
        self,
        address: str | Sequence[str],
        weights: Mapping[str, Tensor],
        *,
        token: bytes,
        transport: str | Transport = "auto",
        timeout_s: float = 30.0,
        manifest: Manifest | None = None,
        rank: int = 0,
    ) -> None:
        """Remember the live tensors; the first `stage` connects.

        address: of the publisher, or of every rank that publishes. timeout_s: how long a publisher may be
        silent. manifest, rank: what all ranks of this replica hold, and which of them this is; `weights` are then
        this rank's parts. None: read off the tensors, whole ones or DTensors.
        """
        self._addresses = [address] if isinstance(address, str) else list(address)
        self._weights = weights
        self._token, self._transport, self._timeout_s, self._rank = token, transport, timeout_s, rank
        self._target = manifest or Manifest.from_tensors(weights, rank=rank)
        self._puller = Puller(Arena({}, 0), rank=rank)
        self._staged: int | None = None
        self._feeds: list[Feed] = []
        self._closed = False
        self._guard = threading.Lock()
        """Over `_feeds` and `_closed`: close and cancel come from another thread than stage."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-stage")
        self._pool = ThreadPoolExecutor(max_workers=num_threads(), thread_name_prefix="weights-read")

    async def stage(self, *, after: int) -> int:
        """Wait for a version newer than `after`, pull and verify it beside the live tensors, return it.

        Raises PeerLost, WeightMismatch, LayoutError or AuthenticationError; the live tensors are untouched
        and the next call connects anew.
        """
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._stage, after)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            self._disconnect()  # wakes the thread
            await asyncio.wait([work])
            work.exception()  # the cancelled work's error is nobody's news
            raise

    def apply(self) -> None:
        """Copy the staged version into the live tensors, casting where dtypes differ."""
        if self._staged is None:
            raise TransferError("nothing is staged: await stage() first")
        unpack(self._puller.memory, self._puller.arena, self._weights, pool=self._pool)

    async def close(self) -> None:
        """Disconnect and stop the threads. May be called twice."""
        with self._guard:
            self._closed = True
        self._disconnect()
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._pool.shutdown)

    def _disconnect(self) -> None:
        with self._guard:
            feeds, self._feeds = self._feeds, []
        for feed in feeds:
            feed.close()

    def _stage(self, after: int) -> int:
        deadline = None
        try:
            feeds = self._connected()
            while True:
                version = _agree(feeds, after)
                deadline = deadline or time.monotonic() + self._timeout_s
                try:
                    self._pull(feeds, version)
                except Superseded as error:
                    if time.monotonic() > deadline:
                        raise TransferError(
                            f"every version was overtaken while it was read, for {self._timeout_s} s; "
                            "publish less often or raise the publisher's patience_s"
                        ) from error
                    continue
                return version
        except BaseException:
            self._disconnect()
            raise

    def _connected(self) -> list[Feed]:
        with self._guard:
            if self._feeds:
                return self._feeds
        feeds: list[Feed] = []
        try:
            for address in self._addresses:
                feeds.append(Feed.open(address, token=self._token, timeout_s=self._timeout_s))
            self._join(feeds)
        except BaseException:
            for feed in feeds:
                feed.close()
            raise
        with self._guard:
            self._feeds = feeds
        return feeds

    def _join(self, feeds: Sequence[Feed]) -> None:
        """Plan with the publishers and make room."""
        first = feeds[0].welcome
        made = plan(first.source, self._target, bucket_bytes=first.bucket_bytes, wire_dtype=first.wire_dtype)
        for feed in feeds:
            if feed.welcome.source.digest != first.source.digest:
                raise LayoutError(f"the publishers at {self._addresses} do not publish the same tensors")
        needed = {source for source, target in made.streams if target == self._rank}
        if missing := needed - {feed.welcome.rank for feed in feeds}:
            raise LayoutError(f"source ranks {sorted(missing)} hold needed weights; pass their addresses too")
        for feed in feeds:
            feed.join(made, target=self._target, rank=self._rank, transport=self._transport)
        arena = Arena.of(self._target, rank=self._rank, wire_dtypes=made.wire_dtypes)
        if arena != self._puller.arena:
            self._puller = Puller(arena, rank=self._rank)

    def _pull(self, feeds: Sequence[Feed], version: int) -> None:
        """Read and verify one version. Raises Superseded if it was overtaken, or as `Puller.pull`."""
        self._staged = None
        borrowed: list[tuple[Feed, Lent]] = []
        failure: WeightMismatch | Superseded | None = None
        try:
            for feed in feeds:
                borrowed.append((feed, feed.borrow(version)))
            self._puller.pull(borrowed, version=version, pool=self._pool)
        except (WeightMismatch, Superseded) as error:
            failure = error
        valid = all([feed.give_back(lent) for feed, lent in borrowed])
        if failure is not None:
            raise failure if valid else Superseded("the slot was rewritten while it was read") from failure
        self._staged = version


def _agree(feeds: Sequence[Feed], after: int) -> int:
    """Return the newest version that all publishers have; they all publish the same versions."""
    versions = [feed.newer(after) for feed in feeds]
    while min(versions) < (newest := max(versions)):
        versions = [v if v == newest else feed.newer(newest - 1) for feed, v in zip(feeds, versions)]
    return newest

"""The engine's side of one rank.

stage(after)
    wait for a version newer than `after`                    all publishers must agree on it
    borrow it, fetch and verify every bucket                 beside the live tensors (`staging="shadow"`)
    overtaken meanwhile? begin again with the newest         and keep that one to the end
apply()                                                      write the live tensors, casting

With `staging="in_place"` the order is another: `stage` borrows the version, `apply` fetches it into the live tensors.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

from cosmos_rl_transfer.errors import LayoutError, Superseded, TransferError
from cosmos_rl_transfer.feed import Feed
from cosmos_rl_transfer.in_thread import in_thread
from cosmos_rl_transfer.landing import InPlace, Shadow
from cosmos_rl_transfer.layout import ITEM_BYTES, Manifest
from cosmos_rl_transfer.plan import Plan, plan
from cosmos_rl_transfer.proof import Form
from cosmos_rl_transfer.pull import Pulled, Puller
from cosmos_rl_transfer.transports.base import Transport

if TYPE_CHECKING:
    from torch import Tensor

Staging = Literal["shadow", "in_place"]


def num_threads() -> int:
    """Threads worth using for copies: they soon saturate memory."""
    return min(4, len(os.sched_getaffinity(0)))


class Subscriber:
    """Keeps one rank's live tensors up to date with one or several publishers. Implements WeightSubscriber."""

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
        position: int = 0,
        staging: Staging = "shadow",
    ) -> None:
        """Remember the live tensors; the first `stage` connects.

        address: of the publisher, or of every rank that publishes. timeout_s: how long a publisher may be
        silent. manifest, rank: what all ranks of this replica hold, and which of them this is; `weights` are then
        this rank's parts. None: read off the tensors, whole ones or DTensors. position: this replica's place among
        the rollout replicas, so that they do not all ask the same owners. staging: "shadow" keeps a second copy in
        host memory and switches at the speed of memory; "in_place" needs two buckets and `apply` takes as long as
        the transfer, and after an error in it the live tensors are of no version.
        """
        self._addresses = [address] if isinstance(address, str) else list(address)
        self._weights = weights
        self._token, self._transport, self._timeout_s = token, transport, timeout_s
        self._rank, self._position, self._staging = rank, position, staging
        self._target = manifest or Manifest.from_tensors(weights, rank=rank)
        self._puller: Puller | None = None
        self._staged: int | None = None
        self.pulled = Pulled()
        """What the last pull did."""
        self._leased: list[tuple[Feed, int]] = []
        """Borrowed for `apply`, with staging "in_place"."""
        self._feeds: list[Feed] = []
        self._closed = False
        self._guard = threading.Lock()
        """Over `_feeds` and `_closed`: close and cancel come from another thread than stage."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-stage")
        self._pool = ThreadPoolExecutor(max_workers=num_threads(), thread_name_prefix="weights-land")

    @property
    def staged(self) -> int | None:
        """The version that `apply` would write."""
        return self._staged

    async def stage(self, *, after: int) -> int:
        """Wait for a version newer than `after`, pull and verify it beside the live tensors, return it.

        Raises PeerLost, WeightMismatch, LayoutError or AuthenticationError; the live tensors are untouched
        and the next call connects anew.
        """
        return await in_thread(self._thread, lambda: self.stage_now(after), wake=self._disconnect)

    def stage_now(self, after: int) -> int:
        """Do what `stage` does, in this thread. One thread at a time."""
        deadline, keep = time.monotonic() + self._timeout_s, self._staging == "in_place"
        try:
            version = agree(self._connected(), after)
            while True:
                try:
                    self._take(version, keep=keep)
                    break
                except Superseded as error:
                    if time.monotonic() > deadline:
                        raise TransferError(f"every version was overtaken before it could be had: {error}") from error
                    keep = True  # this one to its end
                    version = agree(self._connected(), version)
        except BaseException:
            self._disconnect()
            raise
        self._staged = version
        return version

    def apply(self) -> None:
        """Write the staged version into the live tensors, casting where dtypes differ.

        With staging "in_place" this pulls, and raises as `stage` does.
        """
        if self._staged is None or self._puller is None:
            raise TransferError("nothing is staged: await stage() first")
        landing = self._puller.landing
        if isinstance(landing, Shadow):
            landing.apply(self._weights, pool=self._pool)
            return
        try:
            leased, self._leased = self._leased, []
            self._pull(leased, self._staged)
        except BaseException:
            self._disconnect()
            raise

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

    def _take(self, version: int, *, keep: bool) -> None:
        """Borrow a version and, with a shadow, fetch it. Raises Superseded if it was overtaken, or as `Puller.pull`."""
        leased: list[tuple[Feed, int]] = []
        try:
            for feed in self._connected():
                leased.append((feed, feed.borrow(version, keep=keep)))
        except Superseded:
            for feed, lease in leased:
                feed.give_back(lease)
            raise
        if self._staging == "shadow":
            self._pull(leased, version)
        else:
            self._leased = leased

    def _pull(self, leased: Sequence[tuple[Feed, int]], version: int) -> None:
        """Fetch, verify and land a borrowed version, and end the leases."""
        assert self._puller is not None, "made when it was connected"
        self._staged = None  # what was staged before is written over
        overtaken: Superseded | None = None
        try:
            self.pulled = self._puller.pull(leased, version=version, pool=self._pool)
        except Superseded as error:
            overtaken = error
        valid = all([feed.give_back(lease) for feed, lease in leased])
        if overtaken is not None or not valid:
            raise Superseded(f"version {version} was written over while it was read") from overtaken

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
            if self._closed:
                raise TransferError("the subscriber is closed")
        return feeds

    def _join(self, feeds: Sequence[Feed]) -> None:
        """Plan with the publishers and make room."""
        first = feeds[0].welcome
        for feed in feeds:
            if feed.welcome.source.digest != first.source.digest:
                raise LayoutError(f"the publishers at {self._addresses} do not publish the same tensors")
        made = plan(
            first.source,
            self._target,
            bucket_bytes=first.bucket_bytes,
            wire_dtype=first.wire_dtype,
        )
        needed = {source for source in first.source.ranks if made.stream(source, self._rank)}
        if missing := needed - {feed.welcome.rank for feed in feeds}:
            raise LayoutError(f"source ranks {sorted(missing)} hold needed weights; pass their addresses too")
        puller = self._puller = self._puller or self._make_puller(made, first.bucket_bytes)
        for feed in feeds:
            feed.join(
                made,
                target=self._target,
                rank=self._rank,
                position=self._position,
                transport=self._transport,
                memory=puller.memory,
            )

    def _make_puller(self, made: Plan, bucket_bytes: int) -> Puller:
        rank, wire = self._rank, made.wire_dtypes
        forms = {name: Form(spec.shape, ITEM_BYTES[wire[name]]) for name, spec in self._target.specs.items()}
        if self._staging == "shadow":
            landing = Shadow(self._target, rank=rank, wire_dtypes=wire)
        else:
            landing = InPlace(self._target, self._weights, rank=rank, wire_dtypes=wire)
        return Puller(landing, rank=rank, bucket_bytes=bucket_bytes, forms=forms)


def agree(feeds: Sequence[Feed], after: int) -> int:
    """Return the newest version that all publishers have; they all publish the same versions."""
    versions = [feed.newer(after) for feed in feeds]
    while min(versions) < (newest := max(versions)):
        versions = [v if v == newest else feed.newer(newest - 1) for feed, v in zip(feeds, versions)]
    return newest

"""The subscriber of one rank.

stage(after)
    wait for a version newer than `after`                    all publishers must agree on it
    borrow it, fetch and verify every bucket                 beside the live tensors (`staging="shadow"`)
    overtaken meanwhile: begin again with the newest         and keep its lease to the end
apply()                                                      write the live tensors, casting

With staging "shadow" the version is received in a second copy in host memory, which other subscribers may read too
(peers.py). With "in_place", which needs two buckets, `stage` borrows the version and fetches deltas, and `apply`
fetches the rest into the live tensors.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from itertools import islice
from typing import TYPE_CHECKING

from cosmos_rl_core.weight_sync import SyncSection, WeightSubscriber
from cosmos_rl_core.wire.tls import Tls
from cosmos_rl_transfer.errors import LayoutError, Superseded, TransferError, WeightMismatch
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.planning.plan import TransferPlan
from cosmos_rl_transfer.pull.landing import InPlace, Shadow
from cosmos_rl_transfer.pull.peers import MOST_TRIES, Offer, RingPlace, choices, open_peers
from cosmos_rl_transfer.pull.puller import Pulled, Puller
from cosmos_rl_transfer.pull.sources import Feed, Sources, agree
from cosmos_rl_transfer.transports.base import Transport, TransportUnavailable

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


MOST_THREADS = 4
"""For copies, which soon saturate the memory bandwidth."""


class Subscriber(WeightSubscriber):
    """Keeps one rank's live tensors up to date with one or several publishers."""

    def __init__(
        self,
        address: str | Sequence[str],
        weights: Mapping[str, Tensor],
        *,
        token: bytes,
        settings: SyncSection | None = None,
        tls: Tls | None = None,
        transport: Transport | None = None,
        manifest: Manifest | None = None,
        rank: int = 0,
    ) -> None:
        """Store the live tensors; the first `stage` connects.

        address: of the publisher, or of every rank that publishes. settings: the section [sync]; None for its defaults.
        After an error in `apply` with staging "in_place" the live tensors are of no version. tls: with it both sides
        prove a certificate of the run. transport: in place of the one that the settings name. manifest, rank: what all
        ranks of this replica hold, and which of them this is; `weights` are then this rank's parts. None: read off the
        tensors, whole ones or DTensors.
        """
        self._settings = settings = settings or SyncSection()
        self._sources = Sources(address, token=token, timeout_s=settings.timeout_s, tls=tls)
        self._weights, self._rank = weights, rank
        self._target = manifest or Manifest.from_tensors(weights, rank=rank)
        self._transport = transport or settings.transport
        self._offer: Offer | None = None
        if settings.staging == "shadow":
            self._offer = Offer(self._target, rank=rank, settings=settings, token=token, tls=tls, transport=transport)
        self._puller: Puller | None = None
        self._staged: int | None = None
        self.pulled = Pulled()
        """Counts of the last pull."""
        self._joined: Sequence[Feed] = ()
        """The connections over which the plan was agreed on."""
        self._leased: list[Feed] = []
        """Those with leases for `apply`, with staging "in_place"."""
        self._plan: TransferPlan | None = None
        num_threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-stage")
        self._pool = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="weights-land")

    @property
    def staged(self) -> int | None:
        """The version that `apply` writes."""
        return self._staged

    async def stage(self, *, after: int) -> int:
        """Wait for a version newer than `after`, pull and verify it beside the live tensors, return it.

        With nothing staged yet it reads from other subscribers if any has such a version. Lost publishers are skipped
        as long as the others hold everything. Raises PeerLost, WeightMismatch, LayoutError or AuthenticationError; the
        live tensors are unchanged and the next call reconnects.
        """
        return await self._sources.run(self._thread, lambda: self.stage_now(after))

    def stage_now(self, after: int) -> int:
        """Synchronous `stage`. One thread at a time."""
        self._staged = self._sources.attempt(lambda: self._stage(after))
        if self._offer is not None and isinstance(self._connected.landing, Shadow):
            self._offer.open(self._staged, self._connected.landing, self._sources.connected)
        return self._staged

    def counts(self) -> dict[str, float]:
        return self.pulled.counts()

    @property
    def _connected(self) -> Puller:
        assert self._puller is not None, "made with the first connection"
        return self._puller

    def _feeds(self) -> list[Feed]:
        """Return the connections to the publishers, which have agreed on the plan."""
        feeds = self._sources.feeds()
        if feeds is not self._joined:
            self._join(feeds)
            self._joined = feeds
        return feeds

    def _stage(self, after: int) -> int:
        version = self._from_peers(after)
        return self._from_publishers(after) if version is None else version

    def _from_publishers(self, after: int) -> int:
        deadline, keep = time.monotonic() + self._settings.timeout_s, self._settings.staging == "in_place"
        version = agree(self._feeds(), after)
        while True:
            try:
                self._take(self._feeds(), version, keep=keep)
                return version
            except Superseded as error:
                if time.monotonic() > deadline:
                    raise TransferError(f"every version was overtaken before it was read: {error}") from error
                keep = True  # keep this lease to its end
                version = agree(self._feeds(), version)

    def _from_peers(self, after: int) -> int | None:
        """Stage a version from other subscribers; None if there is none."""
        if self._staged is not None or self._settings.staging != "shadow":
            return None
        holders = self._feeds()[0].find_holders(after)
        for addresses in islice(choices(holders, layout=self._target.digest, rank=self._rank), MOST_TRIES):
            try:
                with ExitStack() as opened:
                    self._take(self._join_peers(addresses, opened), holders.version, keep=False)
            except (TransferError, LayoutError, TransportUnavailable) as error:
                if self._sources.stopped:
                    raise
                log.info("version %d cannot be read from %s: %s", holders.version, sorted(addresses.values()), error)
                continue
            return holders.version
        return None

    def apply(self) -> None:
        """Write the staged version into the live tensors, casting where dtypes differ.

        With staging "in_place" this pulls the buckets without deltas, and raises as `stage` does.
        """
        if self._staged is None or self._puller is None:
            raise TransferError("nothing is staged: await stage() first")
        version, side = self._staged, self._puller.landing.side
        with nullcontext() if side is None else side.switching():
            if self._leased:
                try:
                    leased, self._leased = self._leased, []
                    self._pull(leased, self.pulled)
                except BaseException:
                    self._sources.disconnect()
                    raise
            self._puller.landing.apply(pool=self._pool)
        self._staged = version

    async def close(self) -> None:
        """Disconnect and stop the threads. Idempotent."""
        self._sources.close()
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._pool.shutdown)
        if self._offer is not None:
            await asyncio.to_thread(self._offer.close)

    def _take(self, feeds: Sequence[Feed], version: int, *, keep: bool) -> None:
        """Borrow a version and, with a shadow, fetch it. Raises Superseded if it was overtaken, or as `Puller.pull`."""
        unapplied, self._leased = self._leased, []
        for feed in unapplied:
            feed.give_back()
        ring = None if self._offer is None else RingPlace.find(feeds[0].ring, self._offer.address)
        leased: list[Feed] = []
        try:
            for feed in feeds:
                feed.borrow(version, keep=keep, base=self._connected.base, share=(0, 1) if ring is None else ring.share)
                leased.append(feed)
        except Superseded:
            for feed in leased:
                feed.give_back()
            raise
        if self._settings.staging == "shadow":
            self._pull(leased, Pulled(version), ring)
        elif not self._stage_deltas(leased, version):
            self._leased = leased

    def _stage_deltas(self, leased: Sequence[Feed], version: int) -> bool:
        """Fetch a borrowed version's deltas, to be written with `apply`; if these are all, end the leases."""
        puller, self.pulled = self._connected, Pulled(version)
        if puller.base < 0:
            puller.landing.begin(-1)
            return False
        try:
            puller.stage_deltas(leased, self.pulled)
        except Superseded:
            for feed in leased:
                feed.give_back()
            raise
        if not all(puller.landing.has(bucket) for feed in leased for bucket in feed.buckets):
            return False
        self._end(leased, version, None)
        return True

    def _pull(self, leased: Sequence[Feed], done: Pulled, ring: RingPlace | None = None) -> None:
        """Fetch, verify and land a borrowed version, and end the leases. done: what was counted of it so far."""
        self._staged = None  # the previous staged version is overwritten
        if self._offer is not None:
            self._offer.fence()
        overtaken: Superseded | None = None
        self.pulled = done
        try:
            with ExitStack() as opened:
                passed: list[Feed] = []
                if ring is not None and self._offer is not None:
                    self._offer.begin(done.version)
                    passed = ring.join(
                        leased,
                        done.version,
                        sources=self._sources,
                        plan_digest=self._offer.partial.plan_digest,
                        transport=self._transport,
                        memory=self._connected.memory,
                        opened=opened,
                    )
                self._connected.pull(leased, done, passed=passed)
        except Superseded as error:
            overtaken = error
        self._end(leased, done.version, overtaken)

    def _end(self, leased: Sequence[Feed], version: int, overtaken: Superseded | None) -> None:
        """End the leases; if all were valid throughout, the landing has the version."""
        valid = all([feed.give_back() for feed in leased])
        if overtaken is not None or not valid:
            raise Superseded(f"version {version} was overwritten while it was read") from overtaken
        self._connected.version = version

    def _join(self, feeds: Sequence[Feed]) -> None:
        """Agree on the plan with the publishers and allocate memory."""
        plan, sources = self._sources.plan(feeds, self._target, rank=self._rank)
        self._plan = plan
        if self._puller is None:
            kind = Shadow if self._settings.staging == "shadow" else InPlace
            landing = kind(self._target, self._weights, rank=self._rank, wire_dtypes=plan.wire_dtypes)
            self._puller = Puller(landing, bucket_bytes=feeds[0].welcome.bucket_bytes, pool=self._pool)
        self._puller.version = -1  # another publisher may restart its version numbers
        if self._leased:  # of lost publishers
            self._leased, self._staged = [], None
        for feed in feeds:
            self._join_one(feed, plan, sources)
        if self._offer is not None:
            self._puller.when_landed = self._offer.partial.landed
            self._offer.partial.set_plan(plan, self._rank)
            self._offer.announce(feeds)

    def _join_peers(self, addresses: Mapping[int, str], opened: ExitStack) -> list[Feed]:
        """Connect to the ranks of another replica that hold this rank's parts."""
        feeds, plan = open_peers(self._sources, addresses, self._target, rank=self._rank, opened=opened)
        assert self._plan is not None, "made with the first connection"
        if any(plan.wire_dtypes[name] != self._plan.wire_dtypes[name] for name in self._target.specs):
            raise LayoutError("its dtypes of the weights differ from the published ones")
        for feed in feeds:
            self._join_one(feed, plan, tuple(sorted(addresses)))
        return feeds

    def _join_one(self, feed: Feed, plan: TransferPlan, sources: tuple[int, ...]) -> None:
        feed.join(
            plan,
            target=self._target,
            rank=self._rank,
            transport=self._transport,
            memory=self._connected.memory,
            sources=sources,
            selftest=self._connected.selftest,
        )


def prove(subscriber: Subscriber) -> None:
    """Hash a subscriber's live tensors, after `apply`. Raises WeightMismatch if they are not the published ones."""
    if wrong := subscriber._connected.landing.differing():
        raise WeightMismatch(f"{len(wrong)} live tensors are not those of version {subscriber.staged}: {wrong[0]}")

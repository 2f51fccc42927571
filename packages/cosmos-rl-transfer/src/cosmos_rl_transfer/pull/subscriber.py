"""The subscriber of one rank.

stage(after)
    wait for a version newer than `after`                    all publishers must agree on it
    borrow it, fetch and verify every bucket                 beside the live tensors (`staging="shadow"`)
    overtaken meanwhile: begin again with the newest         and keep its lease to the end
apply()                                                      write the live tensors, casting

With `staging="in_place"`, `stage` borrows the version and fetches deltas, and `apply` fetches the rest into the live
tensors.
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

from cosmos_rl_core.wire.tls import Tls
from cosmos_rl_transfer.errors import LayoutError, Superseded, TransferError
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.planning.plan import TransferPlan
from cosmos_rl_transfer.pull.feed import Feed
from cosmos_rl_transfer.pull.landing import Shadow
from cosmos_rl_transfer.pull.peers import MOST_TRIES, Offer, RingPlace, choices, open_peers
from cosmos_rl_transfer.pull.puller import Pulled, Puller, Staging, make_puller
from cosmos_rl_transfer.pull.sources import Sources, agree
from cosmos_rl_transfer.transports.base import Transport, TransportUnavailable

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


def num_threads() -> int:
    """Return the number of threads for copies, which soon saturate the memory bandwidth."""
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
        serve: bool = True,
        bind: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Store the live tensors; the first `stage` connects.

        address: of the publisher, or of every rank that publishes. timeout_s: how long a publisher may be
        silent. manifest, rank: what all ranks of this replica hold, and which of them this is; `weights` are then
        this rank's parts. None: read off the tensors, whole ones or DTensors. position: this replica's place among
        the rollout replicas, so that they do not all ask the same owners. staging: "shadow" keeps a second copy in
        host memory and switches at the speed of memory; "in_place" needs two buckets and `apply` takes as long as
        the transfer of what did not come as deltas, and after an error in it the live tensors are of no version.
        serve: whether others may read what is staged in the shadow (peers.py). bind: address to listen on for them;
        None: the one that publishers are reached from. tls: with it both sides prove a certificate of the run.
        """
        self._sources = Sources(address, token=token, timeout_s=timeout_s, joined=self._join, tls=tls)
        self._weights = weights
        self._transport, self._timeout_s = transport, timeout_s
        self._rank, self._position = rank, position
        self._staging: Staging = staging
        self._target = manifest or Manifest.from_tensors(weights, rank=rank)
        self._offer: Offer | None = None
        if serve and staging == "shadow":
            self._offer = Offer(
                self._target, rank=rank, token=token, transport=transport, bind=bind, timeout_s=timeout_s, tls=tls
            )
        self._puller: Puller | None = None
        self._staged: int | None = None
        self.pulled = Pulled()
        """Counts of the last pull."""
        self._leased: list[tuple[Feed, int]] = []
        """Leases for `apply`, with staging "in_place"."""
        self._plan: TransferPlan | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-stage")
        self._pool = ThreadPoolExecutor(max_workers=num_threads(), thread_name_prefix="weights-land")

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
        assert self._puller is not None, "created on connection"
        if self._offer is not None and isinstance(self._puller.landing, Shadow):
            self._offer.open(self._staged, self._puller.landing, self._sources.connected)
        return self._staged

    def _stage(self, after: int) -> int:
        version = self._from_peers(after)
        return self._from_publishers(after) if version is None else version

    def _from_publishers(self, after: int) -> int:
        deadline, keep = time.monotonic() + self._timeout_s, self._staging == "in_place"
        version = agree(self._sources.feeds(), after)
        while True:
            try:
                self._take(self._sources.feeds(), version, keep=keep)
                return version
            except Superseded as error:
                if time.monotonic() > deadline:
                    raise TransferError(f"every version was overtaken before it was read: {error}") from error
                keep = True  # keep this lease to its end
                version = agree(self._sources.feeds(), version)

    def _from_peers(self, after: int) -> int | None:
        """Stage a version from other subscribers; None if there is none."""
        if self._staged is not None or self._staging != "shadow":
            return None
        holders = self._sources.feeds()[0].find_holders(after)
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
                    self._pull(leased, version)
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
        leased, self._leased = self._leased, []
        for feed, lease in leased:  # staged but not applied
            feed.give_back(lease)
        leased.clear()
        place = None if self._offer is None else RingPlace.find(feeds[0].ring, self._offer.address)
        try:
            for feed in feeds:
                base = self._puller.base if self._puller is not None else -1
                share = (0, 1) if place is None else place.share
                leased.append((feed, feed.borrow(version, keep=keep, base=base, share=share)))
        except Superseded:
            for feed, lease in leased:
                feed.give_back(lease)
            raise
        if self._staging == "shadow":
            self._pull(leased, version, place)
        elif not self._stage_deltas(leased, version):
            self._leased = leased

    def _stage_deltas(self, leased: Sequence[tuple[Feed, int]], version: int) -> bool:
        """Fetch a borrowed version's deltas, to be written with `apply`; if these are all, end the leases."""
        assert self._puller is not None, "created on connection"
        self.pulled = Pulled()
        if self._puller.base < 0:
            self._puller.landing.begin(-1)
            return False
        try:
            self.pulled = self._puller.stage_deltas(leased, pool=self._pool)
        except Superseded:
            for feed, lease in leased:
                feed.give_back(lease)
            raise
        if not all(self._puller.landing.has(bucket) for feed, _ in leased for bucket in feed.buckets):
            return False
        self._end(leased, version, None)
        return True

    def _pull(self, leased: Sequence[tuple[Feed, int]], version: int, place: RingPlace | None = None) -> None:
        """Fetch, verify and land a borrowed version, and end the leases."""
        assert self._puller is not None, "created on connection"
        self._staged = None  # the previous staged version is overwritten
        if self._offer is not None:
            self._offer.fence()
        overtaken: Superseded | None = None
        try:
            so_far = self.pulled if self._staging == "in_place" else Pulled()
            with ExitStack() as opened:
                passed: list[tuple[Feed, int]] = []
                if place is not None and self._offer is not None:
                    self._offer.begin(version)
                    passed = place.join(
                        [feed for feed, _ in leased],
                        version,
                        sources=self._sources,
                        plan_digest=self._offer.partial.plan_digest,
                        transport=self._transport,
                        memory=self._puller.memory,
                        opened=opened,
                    )
                self.pulled = self._puller.pull(leased, version=version, pool=self._pool, done=so_far, passed=passed)
        except Superseded as error:
            overtaken = error
        self._end(leased, version, overtaken)

    def _end(self, leased: Sequence[tuple[Feed, int]], version: int, overtaken: Superseded | None) -> None:
        """End the leases; if all were valid throughout, the landing has the version."""
        assert self._puller is not None, "created on connection"
        valid = all([feed.give_back(lease) for feed, lease in leased])
        if overtaken is not None or not valid:
            raise Superseded(f"version {version} was overwritten while it was read") from overtaken
        self._puller.version = version

    def _join(self, feeds: Sequence[Feed]) -> None:
        """Agree on the plan with the publishers and allocate memory."""
        plan, sources = self._sources.plan(feeds, self._target, rank=self._rank, position=self._position)
        self._plan, bucket_bytes = plan, feeds[0].welcome.bucket_bytes
        puller = self._puller = self._puller or make_puller(
            self._target, self._weights, plan, rank=self._rank, staging=self._staging, bucket_bytes=bucket_bytes
        )
        puller.version = -1  # another publisher may restart its version numbers
        if self._leased:  # of lost publishers
            self._leased, self._staged = [], None
        for feed in feeds:
            self._join_one(feed, plan, sources)
        if self._offer is not None:
            puller.when_landed = self._offer.partial.landed
            self._offer.partial.set_plan(plan, self._rank)
            self._offer.announce(feeds)

    def _join_peers(self, addresses: Mapping[int, str], opened: ExitStack) -> list[Feed]:
        """Connect to the ranks of another replica that hold this rank's parts."""
        feeds, plan = open_peers(
            self._sources, addresses, self._target, rank=self._rank, position=self._position, opened=opened
        )
        assert self._plan is not None, "created on connection"
        if any(plan.wire_dtypes[name] != self._plan.wire_dtypes[name] for name in self._target.specs):
            raise LayoutError("its dtypes of the weights differ from the published ones")
        for feed in feeds:
            self._join_one(feed, plan, tuple(sorted(addresses)))
        return feeds

    def _join_one(self, feed: Feed, plan: TransferPlan, sources: tuple[int, ...]) -> None:
        assert self._puller is not None, "made before"
        feed.join(
            plan,
            target=self._target,
            rank=self._rank,
            position=self._position,
            transport=self._transport,
            memory=self._puller.memory,
            sources=sources,
        )

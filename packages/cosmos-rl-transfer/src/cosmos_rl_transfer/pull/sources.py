"""A subscriber's connections: a `Feed` to each rank that publishes, and `Sources`, all of them.

Lost ranks are left out as long as one answers: other ranks that hold copies of their parts send these instead.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_core.wire.tls import Tls
from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.errors import LayoutError, PeerLost, TransferError
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.planning.plan import Bucket, TransferPlan, plan
from cosmos_rl_transfer.publish.publisher import SEPARATOR
from cosmos_rl_transfer.transports.base import Inlet, Transport
from cosmos_rl_transfer.transports.select import attach
from cosmos_rl_transfer.transports.selftest import SelfTest
from cosmos_rl_transfer.transports.tcp import Tcp
from cosmos_rl_transfer.wire import messages as m
from cosmos_rl_transfer.wire.link import Link

T = TypeVar("T")


@dataclass(slots=True)
class Feed:
    """One publisher, from the first handshake on."""

    link: Link
    welcome: m.TransferWelcome
    inlet: Inlet | None = None
    buckets: tuple[Bucket, ...] = ()
    """Buckets that this publisher sends to this rank."""
    ring: tuple[str, ...] = ()
    """Addresses of the ring that relays the announced version (peers.py)."""
    lease: int = -1
    """Of the borrowed version."""
    _source: Manifest | None = None

    @classmethod
    def open(cls, address: str, *, token: bytes, timeout_s: float, tls: Tls | None = None) -> Feed:
        """Connect and receive the publisher's manifest."""
        link = Link.connect(address, token=token, timeout_s=timeout_s, tls=tls)
        try:
            link.send(m.TransferHello(m.PROTOCOL))
            return cls(link, m.expected(link.receive(), m.TransferWelcome))
        except BaseException:
            link.close()
            raise

    @property
    def source(self) -> Manifest:
        """Manifest of all ranks of the publishing side."""
        if self._source is None:
            self._source = Manifest.decode(self.welcome.source)
        return self._source

    def join(
        self,
        plan: TransferPlan,
        *,
        target: Manifest,
        rank: int,
        transport: str | Transport,
        memory: Sequence[Raw],
        sources: tuple[int, ...] = (),
        selftest: SelfTest | None = None,
    ) -> None:
        """Choose the transport and agree on the plan. Raises LayoutError if the publisher refuses.

        sources: the source ranks of the plan, () for all. selftest: of paths to this process's GPU.
        """
        chosen, self.inlet = attach(transport, self.link, source=self.welcome, memory=memory, selftest=selftest)
        self.link.send(m.SubscriberJoin(target.encode(), rank, plan.digest, chosen, sources))
        m.expected(self.link.receive(), m.SubscriberJoined)
        self.buckets = plan.stream(self.welcome.rank, rank)

    def join_ring(
        self,
        plan_digest: str,
        *,
        source: int,
        buckets: tuple[Bucket, ...],
        transport: str | Transport,
        memory: Sequence[Raw],
    ) -> None:
        """Choose the transport to a subscriber that relays these buckets of the publisher of rank `source`."""
        chosen, self.inlet = attach(transport, self.link, source=self.welcome, memory=memory)
        self.link.send(m.JoinRing(plan_digest, source, chosen))
        m.expected(self.link.receive(), m.SubscriberJoined)
        self.buckets = buckets

    def newer(self, after: int) -> int:
        """Wait for a version newer than `after`. The publisher's heartbeat extends the link's deadline."""
        self.link.send(m.Await(after))
        while isinstance(reply := self.link.receive(), m.SubscriberWaiting):
            pass
        announced = m.expected(reply, m.Announce)
        self.ring = announced.ring
        return announced.version

    def holds(self, version: int, address: str) -> None:
        """Register this subscriber as a holder of a version at `address`; later requests for holders include it."""
        self.link.send(m.Holds(version, address))
        m.expected(self.link.receive(), m.Registered)

    def find_holders(self, after: int) -> m.Holders:
        """Request the subscribers that serve a version newer than `after`."""
        self.link.send(m.FindHolders(after))
        return m.expected(self.link.receive(), m.Holders)

    def borrow(self, version: int, *, keep: bool, base: int, share: tuple[int, int] = (0, 1)) -> None:
        """Lease a version. Raises Superseded when there is a newer one.

        `base`: the version that deltas may start from, -1 for none. `share`: position in a ring and its size.
        """
        self.link.send(m.Borrow(version, keep, base, share))
        self.lease = m.expected(self.link.receive(), m.Lent).lease

    def ask(self, buckets: Sequence[Bucket], *, want: m.Want) -> None:
        """Request buckets of the borrowed version, which come in this order."""
        self.link.send(m.ReadBuckets(self.lease, tuple(bucket.index for bucket in buckets), want))

    def done_with(self, bucket: Bucket) -> None:
        """Release a bucket's slot, if the publisher keeps one for it. Thread-safe."""
        if self.inlet is not None and not self.inlet.over_link:
            self.link.send(m.Taken(bucket.index))

    def head(self, bucket: Bucket) -> m.Data:
        """Receive the head of the oldest requested bucket. Raises Superseded."""
        data = m.expected(self.link.receive(), m.Data)
        fits = 0 <= data.num_bytes <= bucket.num_bytes if data.delta else data.num_bytes == bucket.num_bytes
        if not fits or (data.bucket, len(data.sums)) != (bucket.index, len(bucket.pieces)):
            raise TransferError(f"bucket {bucket.index} of {bucket.num_bytes} bytes was requested, {data} was received")
        return data

    def inlet_for(self, want: m.Want) -> Inlet:
        """Return the inlet of buckets requested in this way."""
        if want == "link":
            return Tcp().attach(self.link, offer={}, memory=())
        assert self.inlet is not None, "a feed is joined before it is read"
        return self.inlet

    def was_revoked(self, bucket: Bucket) -> bool:
        """Ask whether the publisher reused a bucket's memory before it was read. No other request may be pending."""
        self.link.send(m.WasRevoked(bucket.index))
        return m.expected(self.link.receive(), m.Revoked).revoked

    def give_back(self) -> bool:
        """End the lease; returns whether it was valid throughout."""
        self.link.send(m.ReturnLease(self.lease))
        return m.expected(self.link.receive(), m.LeaseReturned).valid

    def close(self) -> None:
        """Disconnect; a waiting thread gets PeerLost. Idempotent."""
        self.link.close()
        if self.inlet is not None:
            self.inlet.close()


class Sources:
    """Connects when it is asked to, and again after a loss. One thread uses it; any may interrupt it."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        token: bytes,
        timeout_s: float,
        tls: Tls | None = None,
    ) -> None:
        """Store the addresses, one string or several."""
        self.addresses = addresses.split(SEPARATOR) if isinstance(addresses, str) else list(addresses)
        self.lost: list[str] = []
        """Reasons for which publishers were left out when the connections were made."""
        self._timeout_s = timeout_s
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

    def plan(self, feeds: Sequence[Feed], target: Manifest, *, rank: int) -> tuple[TransferPlan, tuple[int, ...]]:
        """Plan what `rank` of `target` gets from the publishers that are there.

        Returns the plan and the source ranks it was made over, () for all. Raises LayoutError where the publishers do
        not fit each other or the target, and PeerLost where those that are left do not hold everything.
        """
        first = feeds[0]
        if any(feed.welcome.source != first.welcome.source for feed in feeds):
            raise LayoutError(f"the publishers at {self.addresses} do not publish the same tensors")
        transfer = planned(feeds[0], target, sources=())
        here = tuple(sorted(feed.welcome.rank for feed in feeds))
        missing = sorted({rank_ for rank_ in first.source.ranks if transfer.stream(rank_, rank)} - {*here})
        if not missing:
            return transfer, ()
        if not self.lost:
            raise LayoutError(f"source ranks {missing} hold needed weights; pass their addresses too")
        try:
            return planned(feeds[0], target, sources=here), here
        except LayoutError as error:
            raise PeerLost(f"source ranks {missing} are gone, the others do not hold everything: {error}") from error


def planned(feed: Feed, target: Manifest, *, sources: tuple[int, ...]) -> TransferPlan:
    """Plan what `target` gets of what the other end of `feed` describes: of these ranks, () for all."""
    welcome = feed.welcome
    return plan(
        feed.source.only(sources) if sources else feed.source,
        target,
        relay="off",
        bucket_bytes=welcome.bucket_bytes,
        wire_dtype=welcome.wire_dtype,
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

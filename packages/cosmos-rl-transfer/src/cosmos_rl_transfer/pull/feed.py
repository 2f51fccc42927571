"""A subscriber's connection to one publisher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cosmos_rl_core.wire.tls import Tls
from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.errors import LayoutError, Superseded, TransferError
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.planning.plan import Bucket, TransferPlan
from cosmos_rl_transfer.transports.base import Inlet, Transport
from cosmos_rl_transfer.transports.select import attach
from cosmos_rl_transfer.transports.tcp import Tcp
from cosmos_rl_transfer.wire import messages as m
from cosmos_rl_transfer.wire.link import Link

R = TypeVar("R", bound=m.Reply)


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
    _source: Manifest | None = None

    @classmethod
    def open(cls, address: str, *, token: bytes, timeout_s: float, tls: Tls | None = None) -> Feed:
        """Connect and receive the publisher's manifest."""
        link = Link.connect(address, token=token, timeout_s=timeout_s, tls=tls)
        try:
            link.send(m.TransferHello(m.PROTOCOL))
            return cls(link, _expect(link.receive(), m.TransferWelcome))
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
        position: int,
        transport: str | Transport,
        memory: Sequence[Raw],
        sources: tuple[int, ...] = (),
    ) -> None:
        """Choose the transport and agree on the plan. Raises LayoutError if the publisher refuses.

        sources: the source ranks of the plan, () for all.
        """
        source = self.welcome
        chosen, self.inlet = attach(transport, self.link, offered=source.transport, offer=source.offer, memory=memory)
        self.link.send(m.SubscriberJoin(target.encode(), rank, plan.digest, position, chosen, sources))
        _expect(self.link.receive(), m.SubscriberJoined)
        self.buckets = plan.stream(source.rank, rank)

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
        offered, offer = self.welcome.transport, self.welcome.offer
        chosen, self.inlet = attach(transport, self.link, offered=offered, offer=offer, memory=memory)
        self.link.send(m.JoinRing(plan_digest, source, chosen))
        _expect(self.link.receive(), m.SubscriberJoined)
        self.buckets = buckets

    def newer(self, after: int) -> int:
        """Wait for a version newer than `after`. The publisher's heartbeat extends the link's deadline."""
        self.link.send(m.Await(after))
        while isinstance(reply := self.link.receive(), m.SubscriberWaiting):
            pass
        announced = _expect(reply, m.Announce)
        self.ring = announced.ring
        return announced.version

    def holds(self, version: int, address: str) -> None:
        """Register this subscriber as a holder of a version at `address`; later requests for holders include it."""
        self.link.send(m.Holds(version, address))
        _expect(self.link.receive(), m.Registered)

    def find_holders(self, after: int) -> m.Holders:
        """Request the subscribers that serve a version newer than `after`."""
        self.link.send(m.FindHolders(after))
        return _expect(self.link.receive(), m.Holders)

    def borrow(self, version: int, *, keep: bool, base: int, share: tuple[int, int] = (0, 1)) -> int:
        """Lease a version and return the lease. Raises Superseded when there is a newer one.

        `base`: the version that deltas may start from, -1 for none. `share`: position in a ring and its size.
        """
        self.link.send(m.Borrow(version, keep, base, share))
        return _expect(self.link.receive(), m.Lent).lease

    def ask(self, lease: int, buckets: Sequence[Bucket], *, want: m.Want) -> None:
        """Request buckets, which come in this order."""
        self.link.send(m.ReadBuckets(lease, tuple(bucket.index for bucket in buckets), want))

    def done_with(self, bucket: Bucket) -> None:
        """Release a bucket's slot, if the publisher keeps one for it. Thread-safe."""
        if self.inlet is not None and not self.inlet.over_link:
            self.link.send(m.Taken(bucket.index))

    def head(self, bucket: Bucket) -> m.Data:
        """Receive the head of the oldest requested bucket. Raises Superseded."""
        data = _expect(self.link.receive(), m.Data)
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
        return _expect(self.link.receive(), m.Revoked).revoked

    def give_back(self, lease: int) -> bool:
        """End the lease; returns whether it was valid throughout."""
        self.link.send(m.ReturnLease(lease))
        return _expect(self.link.receive(), m.LeaseReturned).valid

    def close(self) -> None:
        """Disconnect; a waiting thread gets PeerLost. Idempotent."""
        self.link.close()
        if self.inlet is not None:
            self.inlet.close()


def _expect(reply: Any, kind: type[R]) -> R:
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, m.TransferRefused):
        raise LayoutError(reply.reason)
    if isinstance(reply, m.Overtaken):
        raise Superseded(f"version {reply.newest} is out")
    raise TransferError(f"the publisher replied {reply}; {kind.__name__} was expected")

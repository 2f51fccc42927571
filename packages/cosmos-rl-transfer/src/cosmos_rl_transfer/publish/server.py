"""The threads that serve subscribers: one accepts connections, two for each subscriber answer its requests.

They block in sockets and conditions only, so that they serve while the trainer computes.
"""

from __future__ import annotations

from typing import Any

from cosmos_rl_core.wire.tls import Tls
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.planning.plan import Bucket
from cosmos_rl_transfer.planning.relay import predecessor
from cosmos_rl_transfer.publish.delivery import Delivery
from cosmos_rl_transfer.publish.holders import PASS_ON_S
from cosmos_rl_transfer.publish.supply import Supply
from cosmos_rl_transfer.wire import messages as m
from cosmos_rl_transfer.wire.link import Link, Listener

HEARTBEAT_S = 0.5


class PublisherServer:
    """Owns a supply and serves it until closed."""

    def __init__(self, supply: Supply, *, token: bytes, bind: str, timeout_s: float, tls: Tls | None = None) -> None:
        """Listen on a free port of `bind`. Raises OSError where that is no address of this host; closes the supply."""
        self._supply, self._timeout_s = supply, timeout_s
        try:
            self._listener = Listener(bind, token=token, name="weights", talk=self._serve, tls=tls)
        except OSError:
            supply.close()
            raise
        self.address = self._listener.address
        """Where subscribers connect: "host:port"."""

    def close(self) -> None:
        """Close every connection, wait for the threads, free the slots. May be called twice."""
        self._listener.close()
        self._supply.versions.close()
        self._listener.join()
        self._supply.close()

    def _serve(self, link: Link) -> None:
        # a subscriber may be silent for long; its death closes the socket
        link.set_deadlines(timeout_s=self._timeout_s, idle_s=None)
        SubscriberSession(self._supply, link).run()


class SubscriberSession:
    """Answers one subscriber's requests in order until it leaves; its leases end with it."""

    def __init__(self, supply: Supply, link: Link) -> None:
        self._supply, self._link = supply, link
        self._delivery = Delivery(supply, link)
        self._joined: m.SubscriberJoin | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._passes_on = False
        """Whether this is the next member of a relay ring, which reads buckets as they land here."""

    def run(self) -> None:
        """Answer until the connection ends. Raises TransferError with the reason."""
        try:
            while True:
                self._answer(self._link.receive())
                self._delivery.serve()
        finally:
            self._delivery.close()
            self._supply.holders.leave(self)

    def _answer(self, request: Any) -> None:
        match request:
            case m.TransferHello(protocol):
                self._link.send(self._welcome(protocol))
            case m.SubscriberJoin():
                self._link.send(self._join(request))
            case m.JoinRing():
                self._link.send(self._join_ring(request))
            case m.Await(after):
                self._announce(after)
            case m.Holds(version, address) if self._joined is not None:
                self._supply.holders.enter(self, version, m.Holder.of(self._joined, address))
                self._link.send(m.Registered())
            case m.FindHolders(after):
                self._link.send(self._supply.holders.find(after))
            case m.Borrow():
                self._link.send(self._lend(request))
            case m.ReadBuckets(lease, buckets, want):
                self._delivery.ask(lease, buckets, want)
            case m.Taken(bucket):
                self._delivery.take_back(bucket)
            case m.WasRevoked(bucket):
                self._link.send(m.Revoked(self._delivery.was_revoked(bucket)))
            case m.ReturnLease(lease):
                self._link.send(m.LeaseReturned(self._delivery.end_lease(lease)))

    def _welcome(self, protocol: int) -> m.TransferWelcome | m.TransferRefused:
        if protocol != m.PROTOCOL:
            return m.TransferRefused(f"the publisher speaks protocol {m.PROTOCOL}, the subscriber {protocol}")
        s = self._supply
        return m.TransferWelcome(
            s.manifest.encode(), s.rank, s.wire_dtype, s.bucket_bytes, s.transport, dict(s.outlet.offer)
        )

    def _join(self, request: m.SubscriberJoin) -> m.SubscriberJoined | m.TransferRefused:
        supply = self._supply
        try:
            plan = supply.plan_for(request.target, position=request.position, sources=request.sources)
        except LayoutError as error:
            return m.TransferRefused(str(error))
        if plan.digest != request.plan_digest:
            return m.TransferRefused(
                f"the plans differ: {plan.digest[:12]} at the publisher, {request.plan_digest[:12]} at "
                "the subscriber; install the same cosmos-rl-transfer on both sides"
            )
        self._joined = request
        self._buckets = plan.stream(supply.rank, request.rank)
        self._delivery.begin_over(request.transport, self._buckets)
        return m.SubscriberJoined()

    def _join_ring(self, request: m.JoinRing) -> m.SubscriberJoined | m.TransferRefused:
        partial = self._supply.partial
        buckets = None if partial is None else partial.stream(request.plan_digest, request.source)
        if buckets is None:
            return m.TransferRefused("nothing is passed on here by this plan")
        self._buckets, self._passes_on = buckets, True
        self._delivery.begin_over(request.transport, buckets, passes_on=partial)
        return m.SubscriberJoined()

    def _announce(self, after: int) -> None:
        versions = self._supply.versions
        while (version := versions.wait_newer(after, timeout_s=HEARTBEAT_S)) is None:
            self._link.send(m.SubscriberWaiting())
        self._link.send(m.Announce(version, self._supply.holders.ring(self, version)))

    def _lend(self, request: m.Borrow) -> m.Lent | m.Overtaken:
        versions, buckets, partial = self._supply.versions, self._buckets, self._supply.partial
        if self._passes_on:
            versions.wait_newer(request.version - 1, timeout_s=PASS_ON_S)
        elif partial is not None and not partial.is_whole:
            return m.Overtaken(versions.newest)
        position, size = request.share
        lease = versions.lend(
            request.version,
            buckets=(i for i in range(len(buckets)) if predecessor(i, position, size) is None),
            keep=request.keep,
            base=request.held,
            copy=lambda index: self._supply.copy(buckets[index]),
        )
        if lease is None:
            return m.Overtaken(versions.newest)
        self._delivery.add_lease(lease)
        return m.Lent(lease.number)

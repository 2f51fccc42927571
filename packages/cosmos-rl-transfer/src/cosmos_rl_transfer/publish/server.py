"""Serves one rank's parts of the weights to subscribers.

WeightServer         a supply with a socket: a thread accepts connections, two for each serve its subscriber
SubscriberSession    one subscriber's requests and leases
Delivery             its buckets, in the order of its requests

    session's thread     packs and hashes a bucket
    a second thread      sends it, so that the next ones are packed and hashed meanwhile

The threads block in sockets and conditions only, so that they serve while the trainer computes. A bucket is sent as a
delta, from live memory, from a slot, or from a copy: one that a fence made, or one for a reader that was too slow, over
the link. With a transport whose subscribers read a slot by themselves (`keeps_slot`), a request that finds no slot free
is queued and the session's thread goes on: the message that frees a slot comes over the same link.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
from torch import Tensor

from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_core.wire.tls import Tls
from cosmos_rl_transfer.content.delta import Delta
from cosmos_rl_transfer.content.digest import bucket_hash
from cosmos_rl_transfer.content.proof import NOT_HASHED, Proof, packed_pieces, run_pieces
from cosmos_rl_transfer.content.raw import Block, Raw
from cosmos_rl_transfer.errors import LayoutError, Superseded
from cosmos_rl_transfer.planning.plan import Bucket, BucketPiece
from cosmos_rl_transfer.publish.holders import PASS_ON_S, Partial
from cosmos_rl_transfer.publish.memory import PublishedMemory
from cosmos_rl_transfer.publish.pattern import PatternSession
from cosmos_rl_transfer.publish.supply import Hold, Supply
from cosmos_rl_transfer.publish.versions import VersionLease
from cosmos_rl_transfer.transports.base import ByteRun, Outlet, Transport
from cosmos_rl_transfer.transports.select import OVER_LINK
from cosmos_rl_transfer.transports.selftest import ipc_domain
from cosmos_rl_transfer.wire import messages as m
from cosmos_rl_transfer.wire.link import Link, Listener

HEARTBEAT_S = 0.5


class SubscriberSession:
    """Answers one subscriber's requests in order until it leaves; its leases end with it."""

    def __init__(self, supply: Supply, link: Link) -> None:
        self._supply, self._link = supply, link
        self._delivery, self._patterns = Delivery(supply, link), PatternSession(supply, link)
        self._joined: m.SubscriberJoin | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._passes_on = False
        """Whether this is the next member of a relay ring, which reads buckets as they land here."""

    def run(self) -> None:
        """Answer until the connection ends. Raises TransferError with the reason."""
        try:
            while True:
                request = self._link.receive()
                if not self._patterns.answered(request):
                    self._answer(request)
                self._delivery.serve()
        finally:
            self._delivery.close()
            self._patterns.end()
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
        supply, memory = self._supply, self._supply.memory
        return m.TransferWelcome(
            source=memory.manifest.encode(),
            rank=memory.rank,
            wire_dtype=supply.settings.dtype,
            bucket_bytes=supply.bucket_bytes,
            transport=supply.transport,
            offer=dict(supply.outlet.offer),
            between_gpus=supply.between_gpus,
            ipc_domain=ipc_domain() if supply.between_gpus else "",
        )

    def _join(self, request: m.SubscriberJoin) -> m.SubscriberJoined | m.TransferRefused:
        try:
            plan = self._supply.plan_for(request.target, sources=request.sources)
        except LayoutError as error:
            return m.TransferRefused(str(error))
        if plan.digest != request.plan_digest:
            return m.TransferRefused(
                f"the plans differ: {plan.digest[:12]} at the publisher, {request.plan_digest[:12]} at "
                "the subscriber; install the same cosmos-rl-transfer on both sides"
            )
        self._joined = request
        self._buckets = plan.stream(self._supply.memory.rank, request.rank)
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
            buckets=range(position, len(buckets), size),  # the others come from the ring, as in `relay.predecessor`
            keep=request.keep,
            base=request.held,
            copy=lambda index: self._supply.memory.copy(buckets[index], None, spare=self._supply.spare),
        )
        if lease is None:
            return m.Overtaken(versions.newest)
        self._delivery.add_lease(lease)
        return m.Lent(lease.number)


NUM_UNSENT = 2
"""Buckets that are hashed and not sent at most: they are still in a cache when they are sent."""


class Sender:
    """Sends in a thread of its own, in order. An error closes the link, which wakes the session's thread."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-send")
        self._last: Future[None] | None = None
        self._room = threading.Semaphore(NUM_UNSENT)

    def put(self, work: Callable[[], None], *, waits: bool) -> None:
        """Queue work, with `waits` once fewer than NUM_UNSENT others are queued. Raises the error of earlier work."""
        if waits:
            self._room.acquire()
        if self._last is not None and self._last.done():
            self._last.result()
        self._last = self._thread.submit(self._closing_on_error, work)
        if waits:
            self._last.add_done_callback(lambda _: self._room.release())

    def settle(self) -> None:
        """Wait until everything is sent. Raises the error of earlier work."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Wait for the thread, after the link was closed."""
        self._thread.shutdown()

    def _closing_on_error(self, work: Callable[[], None]) -> None:
        with ExitStack() as on_error:
            on_error.callback(self._link.close)
            work()
            on_error.pop_all()


class Delivery:
    """Owned by a session, whose thread calls all methods."""

    def __init__(self, supply: Supply, link: Link) -> None:
        self._supply, self._link = supply, link
        self._end, self._outlet = supply.route(OVER_LINK)
        self._buckets: tuple[Bucket, ...] = ()
        self._passes_on: Partial | None = None
        self._leases: dict[int, VersionLease] = {}
        self._waiting: deque[tuple[int, int, m.Want]] = deque()
        """Requests that are not served yet: lease, bucket, form."""
        self._deltas: dict[int, Delta] = {}
        """Of requests for which no slot was free, by bucket."""
        self._being_read: dict[int, tuple[VersionLease, Hold | None]] = {}
        """Buckets that the subscriber reads by itself now: lease, and slot or None for live memory."""
        self._revoked: set[int] = set()
        """Buckets whose memory may have been written before the subscriber had read it."""
        self._sender = Sender(link)

    def begin_over(self, transport: str, buckets: tuple[Bucket, ...], *, passes_on: Partial | None = None) -> None:
        """Set the subscriber's buckets and its transport: the supply's own, or the link.

        passes_on: where these buckets land here, if they are relayed as they come.
        """
        self._buckets, self._passes_on = buckets, passes_on
        self._end, self._outlet = self._supply.route(transport)

    def add_lease(self, lease: VersionLease) -> None:
        """Accept requests under this lease."""
        self._leases[lease.number] = lease

    def ask(self, lease: int, buckets: Iterable[int], want: m.Want) -> None:
        """Queue requests; `serve` answers them."""
        self._waiting.extend((lease, bucket, want) for bucket in buckets)

    def serve(self) -> None:
        """Answer requests in order until one needs a slot and none is free.

        Where one cannot be answered, a newer version has replaced its own, and so do all that wait with it.
        """
        try:
            while self._waiting and self._serve(*self._waiting[0]):
                self._waiting.popleft()
        except Superseded:
            for _ in range(len(self._waiting)):
                self._send_later(lambda: self._link.send(m.Overtaken(self._supply.versions.newest)))
            self._waiting.clear()

    def take_back(self, bucket: int) -> None:
        """Free the memory of a bucket that the subscriber has received."""
        if bucket in self._being_read:
            lease, hold = self._being_read.pop(bucket)
            self._supply.versions.read(lease, bucket)
            if not (self._supply.versions.is_live(lease) if hold is None else self._end.slots.free(hold)):
                self._revoked.add(bucket)

    def was_revoked(self, bucket: int) -> bool:
        """Whether a received bucket's memory may have been written while it was read."""
        self._sender.settle()
        return bucket in self._revoked

    def end_lease(self, number: int) -> bool:
        """End a lease once all is sent; return whether it was valid until now."""
        self._sender.settle()
        for bucket in list(self._being_read):
            self.take_back(bucket)
        self._deltas.clear()
        self._revoked.clear()
        lease = self._leases.pop(number, None)
        return lease is not None and self._supply.versions.give_back(lease)

    def close(self) -> None:
        """End all leases and free all slots. The link is closed, which wakes the sender."""
        for lease in self._leases.values():
            self._supply.versions.give_back(lease)
        self._link.close()
        self._sender.close()
        self._end.slots.leave(self)

    def _serve(self, number: int, index: int, want: m.Want) -> bool:
        """Answer a read of a bucket; false if it has to wait for a slot. Raises Superseded."""
        lease = self._leases.get(number)
        if lease is None or not 0 <= index < len(self._buckets):
            raise Superseded("not a lease, or not a bucket, of this session")
        if self._passes_on is not None:
            self._passes_on.wait(lease.version, self._buckets[index], timeout_s=PASS_ON_S)
        self._revoked.discard(index)
        if want == "link" or (self._supply.on_gpu and self._outlet is self._supply.link_outlet):
            return self._serve_own(lease, index)
        delta = None if want == "dense" else self._delta(lease, index)
        if delta is None and want == "delta":
            none = m.Data(index, 0, 0, (0,) * len(self._buckets[index].pieces), delta=True)
            self._send_later(lambda: self._link.send(none))
            return True
        return (delta is None and self._serve_direct(lease, index)) or self._serve_packed(lease, index, delta)

    def _serve_direct(self, lease: VersionLease, index: int) -> bool:
        """Send a bucket out of live memory, if its bytes are those that travel."""
        if not self._outlet.direct:
            return False
        with self._supply.versions.reading(lease, index) as copied:
            runs = self._supply.memory.runs(self._buckets[index]) if copied is None else None
            if runs is None:
                return False
            if self._outlet.over_link:  # hash it here, while the sender sends another one
                self._supply.prove(
                    lease.version, self._buckets[index], run_pieces(self._buckets[index], [run.data for run in runs])
                )
        self._send_later(lambda: self._send_runs(lease, index, runs))
        return True

    def _delta(self, lease: VersionLease, index: int) -> Delta | None:
        """Return a bucket as a delta on the version the subscriber has, if there is one and it is shorter."""
        if not self._supply.settings.delta or lease.base < 0:
            return None
        if index not in self._deltas:
            with self._supply.versions.reading(lease, index) as copied:
                bucket, base, version = self._buckets[index], lease.base, lease.version
                delta = self._supply.memory.delta(bucket, base=base, version=version) if copied is None else None
            if delta is None:
                return None
            self._deltas[index] = delta
        return self._deltas[index]

    def _serve_own(self, lease: VersionLease, index: int) -> bool:
        """Send a private copy over the link, for a reader that was too slow. Never waits."""
        bucket, supply = self._buckets[index], self._supply
        with supply.versions.reading(lease, index) as copied:
            own = supply.memory.copy(bucket, copied, spare=supply.spare)
        supply.versions.read(lease, index)
        data = self._head(lease, index, packed_pieces(bucket, own), [])

        def send() -> None:
            self._transmit(data, [ByteRun(own, 0)], supply.link_outlet)
            supply.spare.give(own)

        self._send_later(send)
        return True

    def _serve_packed(self, lease: VersionLease, index: int, delta: Delta | None) -> bool:
        """Pack a bucket into a slot and send that; false if none is free."""
        slots, keeps = self._end.slots, self._outlet.keeps_slot
        hold = slots.take(self, wait=not keeps or not slots.holds(self))
        if hold is None:
            return False
        data, out = self._packed(lease, index, delta, hold)
        self._send_later(lambda: self._send_slot(data, out, hold))
        return True

    def _packed(self, lease: VersionLease, index: int, delta: Delta | None, hold: Hold) -> tuple[m.Data, Block]:
        """Pack a bucket into a slot; return its head and its bytes. Raises Superseded, with the slot freed."""
        num_bytes = self._buckets[index].num_bytes if delta is None else delta.data.nbytes
        out = self._end.outlet.slots[hold.slot][:num_bytes]
        try:
            known = self._fill(out, lease, index, delta)
        except Superseded:
            self._end.slots.free(hold)
            raise
        self._supply.versions.read(lease, index)
        if self._outlet.keeps_slot:
            self._being_read[index] = lease, hold
        if isinstance(out, Tensor):
            proof = known or Proof(NOT_HASHED, ())
        elif delta is None:
            bucket = self._buckets[index]
            proof = self._supply.prove(lease.version, bucket, packed_pieces(bucket, out), known=known)
        else:
            proof = Proof(bucket_hash(out), delta.sums)
        self._end.slots.start_reading(hold)
        located = self._outlet.locate([ByteRun(out, 0)])
        return m.Data(index, num_bytes, proof.hash, proof.sums, hold.slot, located, delta is not None), out

    def _fill(self, out: Block, lease: VersionLease, index: int, delta: Delta | None) -> Proof | None:
        """Return the bucket's hashes, if it was packed just now."""
        if delta is not None:
            np.copyto(out, delta.data)
            del self._deltas[index]
            return None
        with self._supply.versions.reading(lease, index) as copied:
            return self._supply.fill(lease.version, self._buckets[index], out, copied)

    def _send_slot(self, data: m.Data, out: Block, hold: Hold) -> None:
        """In the sender."""
        self._transmit(data, [ByteRun(out, 0)])
        if not self._outlet.keeps_slot and not self._end.slots.free(hold):
            self._revoked.add(data.bucket)

    def _send_runs(self, lease: VersionLease, index: int, runs: list[ByteRun]) -> None:
        """In the sender: out of live memory, or out of a copy if a fence came first."""
        # First under the fence: hash what is in live memory now. Then sent without it, since a slow subscriber would
        # hold the fence up. A fence that comes meanwhile makes `is_live` false, and the bytes are not trusted.
        bucket = self._buckets[index]
        try:
            with self._supply.versions.reading(lease, index) as copied:
                live = copied is None
                if live:
                    head = self._head(lease, index, run_pieces(bucket, [run.data for run in runs]), runs)
            if live:
                with self._supply.versions.reading(lease, index, sending=True) as copied:
                    live = copied is None
                    if live:
                        if self._outlet.keeps_slot:
                            self._being_read[index] = lease, None
                        self._transmit(head, runs)
                        if not (self._outlet.keeps_slot or self._supply.versions.is_live(lease)):
                            self._revoked.add(index)
            if not live:
                self._send_copy(lease, index)
            elif not self._outlet.keeps_slot:
                self._supply.versions.read(lease, index)
        except Superseded:
            self._link.send(m.Overtaken(self._supply.versions.newest))

    def _send_copy(self, lease: VersionLease, index: int) -> None:
        """In the sender: a copy that a fence made. Raises Superseded."""
        if self._outlet.keeps_slot:  # a subscriber can read slots and live memory alone
            hold = self._end.slots.take(self, wait=True)
            assert hold is not None, "it was waited for"
            self._send_slot(*self._packed(lease, index, None, hold), hold)
            return
        with self._supply.versions.reading(lease, index) as copied:
            assert copied is not None, "a fence has come"
            runs = [ByteRun(copied, 0)]
            pieces = packed_pieces(self._buckets[index], copied)
            self._transmit(self._head(lease, index, pieces, runs), runs)
        self._supply.versions.read(lease, index)

    def _head(
        self, lease: VersionLease, index: int, pieces: Iterable[tuple[BucketPiece, Raw]], runs: list[ByteRun]
    ) -> m.Data:
        bucket = self._buckets[index]
        proof = self._supply.prove(lease.version, bucket, pieces)
        return m.Data(index, bucket.num_bytes, proof.hash, proof.sums, -1, self._outlet.locate(runs))

    def _transmit(self, data: m.Data, runs: list[ByteRun], outlet: Outlet | None = None) -> None:
        outlet = outlet or self._outlet
        self._link.send(data, with_next=outlet.over_link)
        outlet.send(self._link, runs, num_bytes=data.num_bytes)
        self._supply.count_sent(data.num_bytes)

    def _send_later(self, work: Callable[[], None]) -> None:
        """Queue work for the sender. Where only heads are sent, without bytes behind them, this thread sends them."""
        if self._outlet.keeps_slot and not self._outlet.direct:
            work()
        else:
            self._sender.put(work, waits=self._outlet.over_link)


class WeightServer(Supply):
    """A supply that subscribers connect to."""

    def __init__(
        self,
        memory: PublishedMemory,
        *,
        settings: SyncSection,
        token: bytes,
        tls: Tls | None = None,
        bind: str,
        transport: Transport | None = None,
        partial: Partial | None = None,
    ) -> None:
        """Allocate two slots of a bucket each and listen on a free port of `bind`.

        transport: in place of the one that the settings name. partial: the buckets that a subscriber relays.
        Raises TransportUnavailable where the transport cannot serve, OSError where `bind` is no address of this host.
        """
        super().__init__(memory, settings=settings, encrypted=tls is not None, transport=transport, partial=partial)
        try:
            self._listener = Listener(bind, token=token, name="weights", talk=self._serve, tls=tls)
        except OSError:
            self.close_outlets()
            raise
        self.address = self._listener.address
        """Where subscribers connect: "host:port"."""

    def close(self) -> None:
        """Close every connection, wait for the threads, free the slots. May be called twice."""
        self._listener.close()
        self.versions.close()
        self._listener.join()
        self.close_outlets()

    def _serve(self, link: Link) -> None:
        # a subscriber may be silent for long; its death closes the socket
        link.set_deadlines(timeout_s=self.settings.timeout_s, idle_s=None)
        SubscriberSession(self, link).run()

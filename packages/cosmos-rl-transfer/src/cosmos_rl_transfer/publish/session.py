"""One subscriber's requests, one after the other.

    session's thread     receives requests, packs and hashes buckets
    a second thread      sends them, so that one bucket is packed while the one before travels

With a transport whose subscribers read a slot by themselves (`keeps_slot`), a request that finds no slot free waits
beside the session, not in it: the message that frees one comes over the same link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np

from cosmos_rl_transfer.content.digest import Raw, bucket_hash
from cosmos_rl_transfer.content.proof import Proof, packed_pieces, prove, run_pieces
from cosmos_rl_transfer.errors import LayoutError, Superseded
from cosmos_rl_transfer.planning.plan import Bucket, Piece
from cosmos_rl_transfer.planning.relay import predecessor
from cosmos_rl_transfer.publish.outgoing import Delta
from cosmos_rl_transfer.publish.partial import PASS_ON_S, Partial
from cosmos_rl_transfer.publish.supply import Supply
from cosmos_rl_transfer.publish.versions import Lease
from cosmos_rl_transfer.transports.base import Outlet, Run
from cosmos_rl_transfer.wire import messages as m
from cosmos_rl_transfer.wire.link import Link

HEARTBEAT_S = 0.5


class Session:
    """Answers one subscriber until it leaves."""

    def __init__(self, supply: Supply, link: Link) -> None:
        self._supply, self._link = supply, link
        self._outlet: Outlet = supply.link_outlet
        self._joined: m.Join | None = None
        self._passes_on: Partial | None = None
        """Where buckets land that the next in a ring asks for here."""
        self._buckets: tuple[Bucket, ...] = ()
        self._leases: dict[int, Lease] = {}
        self._waiting: deque[m.ReadBucket] = deque()
        """Requests for which no slot was free."""
        self._held: dict[int, int] = {}
        """By lease: the version the subscriber has."""
        self._deltas: dict[int, Delta] = {}
        """Of requests for which no slot was free, by bucket."""
        self._in_hand: dict[int, tuple[Lease, int]] = {}
        """Buckets the subscriber reads by itself at this moment: lease, and slot or -1 for live memory."""
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-send")
        self._sending: Future[None] | None = None

    def run(self) -> None:
        """Answer until the connection ends. Raises TransferError with the reason."""
        try:
            while True:
                self._answer(self._link.receive())
                self._serve_waiting()
        finally:
            for lease in self._leases.values():
                self._supply.versions.give_back(lease)
            self._link.close()  # wakes the sender
            self._sender.shutdown()
            self._supply.ring.leave(self)
            self._supply.holders.leave(self)

    def _answer(self, request: Any) -> None:
        match request:
            case m.Hello(protocol):
                self._link.send(self._welcome(protocol))
            case m.Join():
                self._link.send(self._join(request))
            case m.JoinRing():
                self._link.send(self._join_ring(request))
            case m.Await(after):
                self._announce(after)
            case m.Holds(version, address) if self._joined is not None:
                self._supply.holders.enter(self, version, m.Holder.of(self._joined, address))
            case m.WhoHolds(after):
                self._link.send(self._supply.holders.find(after))
            case m.Borrow():
                self._link.send(self._lend(request))
            case m.ReadBucket():
                self._waiting.append(request)
            case m.Taken(bucket):
                self._take_back(bucket)
            case m.Return(lease):
                self._flush()
                for bucket in list(self._in_hand):
                    self._take_back(bucket)
                self._deltas.clear()
                self._held.pop(lease, None)
                ended = self._leases.pop(lease, None)
                self._link.send(m.Returned(ended is not None and self._supply.versions.give_back(ended)))

    def _welcome(self, protocol: int) -> m.Welcome | m.Refused:
        if protocol != m.PROTOCOL:
            return m.Refused(f"the publisher speaks protocol {m.PROTOCOL}, the subscriber {protocol}")
        s = self._supply
        return m.Welcome(s.manifest.encode(), s.rank, s.wire_dtype, s.bucket_bytes, s.transport, dict(s.outlet.offer))

    def _join(self, request: m.Join) -> m.Joined | m.Refused:
        supply = self._supply
        try:
            made = supply.plans.get(supply, request.target, position=request.position, sources=request.sources)
        except LayoutError as error:
            return m.Refused(str(error))
        if made.digest != request.plan_digest:
            return m.Refused(
                f"the plans differ: {made.digest[:12]} at the publisher, {request.plan_digest[:12]} at "
                "the subscriber; install the same cosmos-rl-transfer on both sides"
            )
        self._joined = request
        self._buckets = made.stream(supply.rank, request.rank)
        self._outlet = supply.outlet if request.transport == supply.transport else supply.link_outlet
        return m.Joined()

    def _join_ring(self, request: m.JoinRing) -> m.Joined | m.Refused:
        partial = self._supply.partial
        buckets = None if partial is None else partial.stream(request.plan_digest, request.source)
        if buckets is None:
            return m.Refused("nothing is passed on here by this plan")
        self._buckets, self._passes_on = buckets, partial
        self._outlet = self._supply.outlet if request.transport == self._supply.transport else self._supply.link_outlet
        return m.Joined()

    def _announce(self, after: int) -> None:
        versions = self._supply.versions
        while (version := versions.wait_newer(after, timeout_s=HEARTBEAT_S)) is None:
            self._link.send(m.Waiting())
        self._link.send(m.Announce(version, self._supply.holders.ring(self, version)))

    def _lend(self, request: m.Borrow) -> m.Lent | m.Overtaken:
        versions, buckets, partial = self._supply.versions, self._buckets, self._supply.partial
        if self._passes_on is not None:
            versions.wait_newer(request.version - 1, timeout_s=PASS_ON_S)
        elif partial is not None and not partial.is_whole:
            return m.Overtaken(versions.newest)
        position, size = request.share
        lease = versions.lend(
            request.version,
            buckets=(i for i in range(len(buckets)) if predecessor(i, position, size) is None),
            keep=request.keep,
            copy=lambda index: self._supply.copy(buckets[index]),
        )
        if lease is None:
            return m.Overtaken(versions.newest)
        self._leases[lease.number], self._held[lease.number] = lease, request.held
        return m.Lent(lease.number)

    def _take_back(self, bucket: int) -> None:
        """The subscriber has a bucket: what it was read from may be used again."""
        if bucket in self._in_hand:
            lease, slot = self._in_hand.pop(bucket)
            self._supply.versions.read(lease, bucket)
            self._supply.ring.free(slot, self)

    def _serve_waiting(self) -> None:
        while self._waiting and self._serve(self._waiting[0]):
            self._waiting.popleft()

    def _serve(self, request: m.ReadBucket) -> bool:
        """Answer a read; false if it has to wait for a slot."""
        lease, index = self._leases.get(request.lease), request.bucket
        try:
            if lease is None or not 0 <= index < len(self._buckets):
                raise Superseded("not a lease, or not a bucket, of this session")
            if self._passes_on is not None:
                self._passes_on.wait(lease.version, self._buckets[index], timeout_s=PASS_ON_S)
            delta = None if request.want == "dense" else self._delta(lease, index)
            if delta is None and request.want == "delta":
                none = m.Data(index, 0, 0, (0,) * len(self._buckets[index].pieces), delta=True)
                self._send_later(lambda: self._link.send(none))
                return True
            return (delta is None and self._serve_direct(lease, index)) or self._serve_packed(lease, index, delta)
        except Superseded:
            self._send_later(lambda: self._link.send(m.Overtaken(self._supply.versions.newest)))
            return True

    def _serve_direct(self, lease: Lease, index: int) -> bool:
        """Hand a bucket over out of live memory, if it lies there as it travels."""
        if not self._outlet.direct:
            return False
        with ExitStack() as guard:
            copied = guard.enter_context(self._supply.versions.reading(lease, index))
            runs = self._supply.memory.runs(self._buckets[index]) if copied is None else None
            if runs is None:
                return False
            held = guard.pop_all()  # until it is sent: no fence comes in between
            self._send_later(lambda: self._send_runs(lease, index, runs, held), held=held)
        return True

    def _delta(self, lease: Lease, index: int) -> Delta | None:
        """Return a bucket as a delta on what the subscriber has, if there is one and it pays."""
        outgoing = self._supply.outgoing
        if outgoing is None or self._held[lease.number] < 0:
            return None
        if index not in self._deltas:
            with self._supply.versions.reading(lease, index) as copied:
                base, version = self._held[lease.number], lease.version
                made = outgoing.delta(self._buckets[index], base=base, version=version) if copied is None else None
            if made is None:
                return None
            self._deltas[index] = made
        return self._deltas[index]

    def _serve_packed(self, lease: Lease, index: int, delta: Delta | None) -> bool:
        """Put a bucket into a slot and hand that over; false if none is free."""
        ring, keeps = self._supply.ring, self._outlet.keeps_slot
        slot = ring.take(self, wait=not keeps or not ring.holds(self))
        if slot is None:
            return False
        num_bytes = self._buckets[index].num_bytes if delta is None else delta.data.nbytes
        out = self._supply.outlet.slots[slot][:num_bytes]
        try:
            self._fill(out, lease, index, delta)
        except Superseded:
            ring.free(slot, self)
            raise
        self._supply.versions.read(lease, index)
        if keeps:
            self._in_hand[index] = lease, slot
        if delta is None:
            proof = self._proof(lease, index, packed_pieces(self._buckets[index], out, self._supply.forms))
        else:
            proof = Proof(bucket_hash(out), delta.sums)
        self._send_later(lambda: self._send_slot(index, proof, slot, out, delta=delta is not None))
        return True

    def _fill(self, out: Raw, lease: Lease, index: int, delta: Delta | None) -> None:
        if delta is not None:
            np.copyto(out, delta.data)
            del self._deltas[index]
            return
        with self._supply.versions.reading(lease, index) as copied:
            if copied is None:
                self._supply.memory.pack(self._buckets[index], out)
            else:
                np.copyto(out, copied)

    def _proof(self, lease: Lease, index: int, pieces: Iterable[tuple[Piece, Raw]]) -> Proof:
        supply, bucket = self._supply, self._buckets[index]
        proof = supply.proofs.get(lease.version, bucket)
        if proof is None:
            proof = prove(pieces, supply.forms)
            supply.proofs.keep(lease.version, bucket, proof)
            if supply.outgoing is not None:
                supply.outgoing.keep_sums(lease.version, bucket, proof.sums)
        return proof

    def _send_slot(self, index: int, proof: Proof, slot: int, out: Raw, *, delta: bool) -> None:
        """In the sender."""
        runs = [Run(out, 0)]
        self._hand_over(m.Data(index, out.nbytes, proof.hash, proof.sums, slot, self._outlet.locate(runs), delta), runs)
        if not self._outlet.keeps_slot:
            self._supply.ring.free(slot, self)

    def _send_runs(self, lease: Lease, index: int, runs: list[Run], held: ExitStack) -> None:
        """In the sender."""
        with held:
            pieces = run_pieces(self._buckets[index], [run.data for run in runs], self._supply.forms)
            proof = self._proof(lease, index, pieces)
            if self._outlet.keeps_slot:
                self._in_hand[index] = lease, -1
            num_bytes = self._buckets[index].num_bytes
            self._hand_over(m.Data(index, num_bytes, proof.hash, proof.sums, -1, self._outlet.locate(runs)), runs)
        if not self._outlet.keeps_slot:
            self._supply.versions.read(lease, index)

    def _hand_over(self, data: m.Data, runs: list[Run]) -> None:
        self._link.send(data)
        self._outlet.send(self._link, runs, num_bytes=data.num_bytes)
        self._supply.sent.add(data.num_bytes)

    def _send_later(self, work: Callable[[], None], *, held: ExitStack | None = None) -> None:
        """Queue something for the sender, which closes `held`; what it raised before is raised here."""
        with ExitStack() as on_error:
            if held is not None:
                on_error.push(held)
            if self._sending is not None and self._sending.done():
                self._sending.result()
            self._sending = self._sender.submit(self._closing_on_error, work)
            on_error.pop_all()

    def _closing_on_error(self, work: Callable[[], None]) -> None:
        """Run `work`; the session's thread, which waits in the link, hears of an error by the link's end."""
        with ExitStack() as on_error:
            on_error.callback(self._link.close)
            work()
            on_error.pop_all()

    def _flush(self) -> None:
        """Wait until all is sent."""
        if self._sending is not None:
            self._sending.result()

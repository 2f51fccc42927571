"""The buckets of one subscriber, packed and sent in the order of its requests.

    session's thread     packs and hashes a bucket
    a second thread      sends it, so that the next ones are packed and hashed meanwhile

A bucket is sent as a delta, from live memory, from a slot, or from a copy: one that a fence made, or one for a reader
that was too slow, over the link. With a transport whose subscribers read a slot by themselves (`keeps_slot`), a
request that finds no slot free is queued and the session's thread goes on: the message that frees a slot comes over
the same link.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
from torch import Tensor

from cosmos_rl_transfer.content.digest import bucket_hash
from cosmos_rl_transfer.content.proof import NOT_HASHED, Proof, packed_pieces, run_pieces
from cosmos_rl_transfer.content.raw import Block, Raw
from cosmos_rl_transfer.errors import Superseded
from cosmos_rl_transfer.planning.plan import Bucket, BucketPiece
from cosmos_rl_transfer.publish.holders import PASS_ON_S, Partial
from cosmos_rl_transfer.publish.outgoing import Delta
from cosmos_rl_transfer.publish.supply import Hold, Supply
from cosmos_rl_transfer.publish.versions import VersionLease
from cosmos_rl_transfer.transports.base import ByteRun, Outlet
from cosmos_rl_transfer.wire import messages as m
from cosmos_rl_transfer.wire.link import Link

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
        self._outlet: Outlet = supply.link_outlet
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
        self._outlet = self._supply.outlet if transport == self._supply.transport else self._supply.link_outlet

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
            if not (self._supply.versions.is_live(lease) if hold is None else self._supply.slots.free(hold)):
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
        self._supply.slots.leave(self)

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
        outgoing = self._supply.outgoing
        if outgoing is None or lease.base < 0:
            return None
        if index not in self._deltas:
            with self._supply.versions.reading(lease, index) as copied:
                bucket, base, version = self._buckets[index], lease.base, lease.version
                delta = outgoing.delta(bucket, base=base, version=version) if copied is None else None
            if delta is None:
                return None
            self._deltas[index] = delta
        return self._deltas[index]

    def _serve_own(self, lease: VersionLease, index: int) -> bool:
        """Send a private copy over the link, for a reader that was too slow. Never waits."""
        bucket, supply = self._buckets[index], self._supply
        with supply.versions.reading(lease, index) as copied:
            own = supply.copy(bucket, copied)
        supply.versions.read(lease, index)
        data = self._head(lease, index, packed_pieces(bucket, own), [])

        def send() -> None:
            self._transmit(data, [ByteRun(own, 0)], supply.link_outlet)
            supply.spare.give(own)

        self._send_later(send)
        return True

    def _serve_packed(self, lease: VersionLease, index: int, delta: Delta | None) -> bool:
        """Pack a bucket into a slot and send that; false if none is free."""
        slots, keeps = self._supply.slots, self._outlet.keeps_slot
        hold = slots.take(self, wait=not keeps or not slots.holds(self))
        if hold is None:
            return False
        data, out = self._packed(lease, index, delta, hold)
        self._send_later(lambda: self._send_slot(data, out, hold))
        return True

    def _packed(self, lease: VersionLease, index: int, delta: Delta | None, hold: Hold) -> tuple[m.Data, Block]:
        """Pack a bucket into a slot; return its head and its bytes. Raises Superseded, with the slot freed."""
        num_bytes = self._buckets[index].num_bytes if delta is None else delta.data.nbytes
        out = self._supply.outlet.slots[hold.slot][:num_bytes]
        try:
            known = self._fill(out, lease, index, delta)
        except Superseded:
            self._supply.slots.free(hold)
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
        self._supply.slots.start_reading(hold)
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
        if not self._outlet.keeps_slot and not self._supply.slots.free(hold):
            self._revoked.add(data.bucket)

    def _send_runs(self, lease: VersionLease, index: int, runs: list[ByteRun]) -> None:
        """In the sender: out of live memory, or out of a copy if a fence came first."""
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
            hold = self._supply.slots.take(self, wait=True)
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

"""Reads one version from borrowed leases, verifies it, and lands it.

one feed      request a few buckets; receive one, request another, while the previous one is verified and landed
several       two feeds at a time, each with one buffer
each bucket   wrong hashes: read it once more, alone; wrong again is an error
              slot reused while it was read: slow, not wrong; read it once more, over the link
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from cosmos_rl_transfer.content.delta import Extent, decode
from cosmos_rl_transfer.content.digest import bucket_hash
from cosmos_rl_transfer.content.raw import Block, Raw
from cosmos_rl_transfer.content.staging import host_memory
from cosmos_rl_transfer.errors import Superseded, TransferError, WeightMismatch
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES
from cosmos_rl_transfer.planning.plan import Bucket
from cosmos_rl_transfer.pull.landing import Landing
from cosmos_rl_transfer.pull.sources import Feed
from cosmos_rl_transfer.transports.base import Inlet
from cosmos_rl_transfer.transports.selftest import SelfTest
from cosmos_rl_transfer.wire import messages as m

log = logging.getLogger(__name__)

NUM_BUFFERS = 2
"""Receive buffers of a rank."""
NUM_AHEAD = 2
"""Buckets requested beyond the number of buffers: the publisher continues as soon as it has a slot."""
MOST_OVER_LINK = 16
"""Buckets requested over the link, where TCP holds the publisher back. A message requests half of them or more."""


@dataclass(slots=True)
class Pulled:
    """Counts of one pull."""

    version: int = -1
    num_bytes: int = 0
    """Received bytes, deltas in their encoded size."""
    num_deltas: int = 0
    """Buckets received as deltas."""
    repaired: list[tuple[int, int]] = field(default_factory=list)
    """(source rank, bucket) of buckets fetched again."""
    seconds: float = 0.0
    """From the begin of the pull to its last bucket."""
    _begun: float = field(default_factory=time.perf_counter)

    def count(self, data: m.Data) -> None:
        """Add a received bucket."""
        self.seconds = time.perf_counter() - self._begun
        self.num_bytes += data.num_bytes
        self.num_deltas += data.delta and data.num_bytes > 0

    def counts(self) -> dict[str, float]:
        """As `WeightSubscriber.counts`."""
        return {
            "bytes": self.num_bytes,
            "deltas": self.num_deltas,
            "repaired": len(self.repaired),
            "pull_s": round(self.seconds, 6),
        }


class Puller:
    """Fills one rank's landing."""

    def __init__(self, landing: Landing, *, bucket_bytes: int, pool: Executor) -> None:
        """pool: threads that verify and land buckets."""
        self.landing = landing
        self.selftest = None if landing.side is None else SelfTest(landing.side)
        self.version = -1
        """The version in the landing, -1 for none. The caller of `pull` sets it."""
        self.buffers = [host_memory(bucket_bytes, lazy=True) for _ in range(NUM_BUFFERS)]
        self._pool = pool
        self._landed: set[tuple[int, int]] = set()
        self.when_landed: Callable[[Bucket], None] = _ignore
        """Called with every verified and landed bucket."""

    @property
    def base(self) -> int:
        """The version that deltas may start from, -1 for none."""
        return self.version if self.landing.takes_deltas else -1

    @property
    def memory(self) -> list[Raw]:
        """All memory that buckets are received into."""
        return [*self.buffers, self.landing.memory]

    def stage_deltas(self, leased: Sequence[Feed], done: Pulled) -> None:
        """Fetch the deltas for a landing that keeps them until `apply`; `pull` fetches the rest.

        Raises the feeds' errors.
        """

        def fetch(feed: Feed, buffers: Sequence[Raw]) -> None:
            for _, data, _ in self._stream(feed, feed.buckets, buffers, want="delta"):
                done.count(data)

        self.landing.begin(self.base)
        self._each(leased, fetch)

    def pull(self, leased: Sequence[Feed], done: Pulled, *, passed: Sequence[Feed] = ()) -> None:
        """Fetch every bucket of every feed and add to `done`. Returns or raises after the last thread has stopped.

        passed: feeds of a subscriber that relays buckets of `leased` (peers.py); missing ones are read from `leased`.
        Raises WeightMismatch with tensor, version and ranks if a bucket is wrong twice, and the errors of `leased`.
        """
        if not self.landing.keeps_deltas:
            self.landing.begin(self.base)
        self.version = -1
        self._landed.clear()
        by_peers = {(b.source, b.index) for feed in passed for b in feed.buckets}
        peers = {id(feed) for feed in passed}

        def fetch(feed: Feed, buffers: Sequence[Raw]) -> None:
            try:
                self._pull_feed(feed, buffers, done)
            except TransferError as error:
                if id(feed) not in peers:
                    raise
                log.info("not all of version %d was relayed: %s", done.version, error)

        self._each([*_without(leased, by_peers), *passed], fetch)
        if by_peers - self._landed:
            self._each(_without(leased, self._landed), fetch)

    def _each(self, leased: Sequence[Feed], fetch: Callable[[Feed, Sequence[Raw]], None]) -> None:
        """Call `fetch` for every feed, concurrently in as many threads as there are buffers."""
        if len(leased) == 1:
            fetch(leased[0], self.buffers)
            return
        work = deque(leased)

        def lane(buffer: Raw) -> None:
            while work:
                try:
                    feed = work.popleft()
                except IndexError:
                    return
                fetch(feed, [buffer])

        with ThreadPoolExecutor(NUM_BUFFERS, thread_name_prefix="weights-pull") as lanes:
            running = [lanes.submit(lane, buffer) for buffer in self.buffers]
            for future in running:
                if future.exception() is not None:
                    work.clear()
        for future in running:
            future.result()

    def _pull_feed(self, feed: Feed, buffers: Sequence[Raw], done: Pulled) -> None:
        wrong: list[Bucket] = []
        missing = [bucket for bucket in feed.buckets if not self.landing.has(bucket)]
        for bucket, data, good in self._stream(feed, missing, buffers, want="any"):
            done.count(data)
            if not good:
                wrong.append(bucket)
        for bucket in wrong:
            self._repair(feed, bucket, buffers, done)

    def _repair(self, feed: Feed, bucket: Bucket, buffers: Sequence[Raw], done: Pulled) -> None:
        """Fetch a bucket with wrong hashes again. Raises WeightMismatch if it was wrong twice.

        A bucket whose memory the publisher reused while it was read does not count: it is fetched over the link, where
        that cannot happen.
        """
        num_wrong, good = 0, False
        while not good:
            want: m.Want = "link" if feed.was_revoked(bucket) else "dense"
            if want == "link":
                log.info("bucket %d of version %d was read too slowly", bucket.index, done.version)
            else:
                num_wrong += 1
                if num_wrong == 2:
                    raise _mismatch(bucket, done.version)
                log.warning(
                    "bucket %d of version %d arrived wrong from rank %d", bucket.index, done.version, bucket.source
                )
            [(_, data, good)] = self._stream(feed, [bucket], buffers[:1], want=want)
            done.count(data)
            done.repaired.append((bucket.source, bucket.index))

    def _stream(
        self, feed: Feed, buckets: Sequence[Bucket], buffers: Sequence[Raw], *, want: m.Want
    ) -> list[tuple[Bucket, m.Data, bool]]:
        """Fetch buckets in order; returns each with its head and whether its hashes matched."""
        # `requested` heads are on their way, `landing` buckets are verified and written by other threads, each in a
        # buffer of its own: a buffer is received into again once its bucket has landed (`settle`).
        window, inlet = len(buffers), feed.inlet_for(want)
        landing: deque[tuple[Bucket, m.Data, Future[bool]]] = deque()
        finished: list[tuple[Bucket, m.Data, bool]] = []
        requested, rest = deque[Bucket](), deque(buckets)

        def ask(most: int) -> None:
            further = [rest.popleft() for _ in range(min(most - len(requested), len(rest)))]
            requested.extend(further)
            if further:
                feed.ask(further, want=want)

        def settle() -> None:
            """Wait for the oldest landing bucket and free its buffer."""
            before, head, future = landing.popleft()
            finished.append((before, head, future.result()))

        most = window + NUM_AHEAD
        ask(most)
        try:
            for i, bucket in enumerate(buckets):
                if len(landing) == window:
                    settle()
                data = feed.head(requested.popleft())
                packed = self._body(inlet, bucket, data, buffers[i % window])
                if not inlet.over_link:  # before the landing: hashing blocks other Python threads
                    ask(most)
                elif len(requested) <= most // 2:
                    most = min(2 * most, MOST_OVER_LINK)
                    ask(most)
                if inlet.views:  # nothing to receive meanwhile: no thread needed
                    finished.append((bucket, data, self._land(feed, bucket, data, packed)))
                else:
                    landing.append((bucket, data, self._pool.submit(self._land, feed, bucket, data, packed)))
            while landing:
                settle()
        except Superseded:
            for bucket in requested:  # their replies are on the way
                with suppress(Superseded):
                    self._body(inlet, bucket, feed.head(bucket), buffers[0])
            raise
        finally:
            wait([future for _, _, future in landing])
        return finished

    def _body(self, inlet: Inlet, bucket: Bucket, data: m.Data, buffer: Raw) -> Block:
        """Receive the bytes of a head."""
        if not data.num_bytes:
            return np.empty(0, np.uint8)
        if inlet.views:
            return inlet.receive(data, out=None)
        place = None if data.delta else self.landing.place(bucket)
        return inlet.receive(data, out=buffer[: data.num_bytes] if place is None else place)

    def _land(self, feed: Feed, bucket: Bucket, data: m.Data, packed: Block) -> bool:
        """Verify and write a bucket and release its slot; false if its hashes differ."""
        if not data.num_bytes:
            return False  # there is no delta
        if isinstance(packed, Tensor):
            good = self.landing.write_from_gpu(bucket, packed, data.sums)
        elif data.delta:
            if not packed.flags.writeable:  # the publisher's slot, which may be reused between two reads of it
                packed = packed.copy()
            good = bucket_hash(packed) == data.hash and self._land_delta(bucket, data, packed)
        else:
            good = self.landing.write(bucket, packed, data.sums, bucket_hash=data.hash)
        feed.done_with(bucket)
        if good:
            self._landed.add((bucket.source, bucket.index))
            self.when_landed(bucket)
        return good

    def _land_delta(self, bucket: Bucket, data: m.Data, packed: Raw) -> bool:
        extents = [Extent(piece.box.numel, ITEM_BYTES[piece.dtype]) for piece in bucket.pieces]
        return self.landing.write_delta(bucket, decode(packed, extents), data.sums)


def _ignore(_: Bucket) -> None:
    pass


def _without(leased: Sequence[Feed], others: AbstractSet[tuple[int, int]]) -> list[Feed]:
    """Return feeds with fewer buckets, those that have any left."""
    left = (tuple(b for b in feed.buckets if (b.source, b.index) not in others) for feed in leased)
    return [replace(feed, buckets=buckets) for feed, buckets in zip(leased, left) if buckets]


def _mismatch(bucket: Bucket, version: int) -> WeightMismatch:
    first, *others = (piece.name for piece in bucket.pieces)
    more = f" or one of {len(others)} more" if others else ""
    return WeightMismatch(
        f"{first}{more} of version {version} arrived wrong twice from rank {bucket.source} at rank "
        f"{bucket.target} (bucket {bucket.index})"
    )

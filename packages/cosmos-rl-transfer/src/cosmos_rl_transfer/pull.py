"""Read one version out of borrowed leases, prove it, and land it.

one feed      ask for two buckets; receive one, while the one before is verified and landed; ask for the next
several       two at a time, each with one buffer
each bucket   hashes as told? else once more, alone; wrong again is an error
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from cosmos_rl_transfer import messages as m
from cosmos_rl_transfer.digest import Raw
from cosmos_rl_transfer.errors import Superseded, WeightMismatch
from cosmos_rl_transfer.feed import Feed
from cosmos_rl_transfer.landing import Landing
from cosmos_rl_transfer.plan import Bucket
from cosmos_rl_transfer.proof import Form, packed_pieces, prove

log = logging.getLogger(__name__)

NUM_BUFFERS = 2
"""Buckets a rank receives into, whatever it pulls."""


@dataclass(slots=True)
class Pulled:
    """What a pull did."""

    num_bytes: int = 0
    repaired: list[tuple[int, int]] = field(default_factory=list)
    """(source rank, bucket) of buckets that were fetched again."""


class Puller:
    """Fills one rank's landing."""

    def __init__(self, landing: Landing, *, rank: int, bucket_bytes: int, forms: Mapping[str, Form]) -> None:
        self.landing = landing
        self.buffers = [np.zeros(bucket_bytes, np.uint8) for _ in range(NUM_BUFFERS)]
        self._rank = rank
        self._forms = forms

    @property
    def memory(self) -> list[Raw]:
        """Everything buckets are received into."""
        return [*self.buffers, self.landing.memory]

    def pull(self, leased: Sequence[tuple[Feed, int]], *, version: int, pool: Executor) -> Pulled:
        """Fetch every bucket of every feed. Returns or raises after the last thread has stopped.

        Raises WeightMismatch naming tensor, version and ranks where a bucket is wrong twice, and what feeds raise.
        """
        done = Pulled()
        if len(leased) == 1:
            self._pull_feed(*leased[0], self.buffers, version, pool, done)
            return done
        work = deque(leased)

        def lane(buffer: Raw) -> None:
            while work:
                try:
                    feed, lease = work.popleft()
                except IndexError:
                    return
                self._pull_feed(feed, lease, [buffer], version, pool, done)

        with ThreadPoolExecutor(NUM_BUFFERS, thread_name_prefix="weights-pull") as lanes:
            running = [lanes.submit(lane, buffer) for buffer in self.buffers]
            for future in running:
                if future.exception() is not None:
                    work.clear()
        for future in running:
            future.result()
        return done

    def _pull_feed(
        self, feed: Feed, lease: int, buffers: Sequence[Raw], version: int, pool: Executor, done: Pulled
    ) -> None:
        wrong: list[Bucket] = []
        for bucket, good in self._stream(feed, lease, feed.buckets, buffers, pool):
            done.num_bytes += bucket.num_bytes
            if not good:
                log.warning("bucket %d of version %d arrived wrong from rank %d", bucket.index, version, bucket.source)
                wrong.append(bucket)
        for bucket, good in self._stream(feed, lease, wrong, buffers[:1], pool):
            done.num_bytes += bucket.num_bytes
            done.repaired.append((bucket.source, bucket.index))
            if not good:
                raise _mismatch(bucket, version)

    def _stream(
        self, feed: Feed, lease: int, buckets: Sequence[Bucket], buffers: Sequence[Raw], pool: Executor
    ) -> list[tuple[Bucket, bool]]:
        """Fetch buckets in order; returns each with whether its hashes were right."""
        window = len(buffers)
        landing: deque[tuple[Bucket, Future[bool]]] = deque()
        finished: list[tuple[Bucket, bool]] = []
        asked = deque(buckets[:window])
        for bucket in asked:
            feed.ask(lease, bucket)
        try:
            for i, bucket in enumerate(buckets):
                if i >= window:  # the buffer of the bucket `window` places before is free
                    before, future = landing.popleft()
                    finished.append((before, future.result()))
                    feed.ask(lease, bucket)
                    asked.append(bucket)
                out = self._out(feed, bucket, buffers[i % window])
                data, packed = feed.receive(asked.popleft(), out=out)
                landing.append((bucket, pool.submit(self._land, feed, bucket, data, packed)))
            while landing:
                bucket, future = landing.popleft()
                finished.append((bucket, future.result()))
        except Superseded:
            for bucket in asked:  # their answers are on the way
                with suppress(Superseded):
                    feed.receive(bucket, out=self._out(feed, bucket, buffers[0]))
            raise
        finally:
            wait([future for _, future in landing])
        return finished

    def _out(self, feed: Feed, bucket: Bucket, buffer: Raw) -> Raw | None:
        assert feed.inlet is not None, "a feed is joined before it is read"
        if feed.inlet.views:
            return None
        place = self.landing.place(bucket)
        return buffer[: bucket.num_bytes] if place is None else place

    def _land(self, feed: Feed, bucket: Bucket, data: m.Data, packed: Raw) -> bool:
        """Verify and write a bucket and let its slot go; false if it is not what was sent."""
        proof = prove(packed_pieces(bucket, packed, self._forms), self._forms)
        good = (proof.hash, proof.sums) == (data.hash, data.sums)
        if good:
            self.landing.write(bucket, packed)
        feed.done_with(bucket)
        return good


def _mismatch(bucket: Bucket, version: int) -> WeightMismatch:
    more = f" or one of {len(bucket.pieces) - 1} more" if len(bucket.pieces) > 1 else ""
    return WeightMismatch(
        f"{bucket.pieces[0].name}{more} of version {version} arrived wrong twice from rank {bucket.source} at rank "
        f"{bucket.target} (bucket {bucket.index})"
    )

"""What every transport must do, as checks that a transport's tests run one by one.

@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check):
    check(MyTransport())
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.arena import Arena
from cosmos_rl_transfer.digest import Raw, bucket_hash
from cosmos_rl_transfer.errors import PeerLost, Superseded
from cosmos_rl_transfer.feed import Feed
from cosmos_rl_transfer.layout import Manifest, Shard
from cosmos_rl_transfer.link import Link
from cosmos_rl_transfer.messages import Lent
from cosmos_rl_transfer.plan import Bucket, plan
from cosmos_rl_transfer.publisher import Publisher
from cosmos_rl_transfer.subscriber import Subscriber
from cosmos_rl_transfer.transports.base import Reader, Segment, Transport

TOKEN = b"the run's token"
_TIMEOUT_S = 5.0
_BUCKET_BYTES = 2048


def weights_at(version: int, *, rows: int = 64) -> dict[str, Tensor]:
    """Return small tensors of several dtypes that only this version has."""
    draw = torch.Generator().manual_seed(version)
    return {
        "embed": torch.randn(rows, 24, generator=draw),
        "norm": torch.randn(7, generator=draw).bfloat16(),
        "count": torch.tensor(version),
        "proj": torch.randn(24, rows, generator=draw).bfloat16(),
    }


def blank() -> dict[str, Tensor]:
    """Return zeros of the same shapes and dtypes."""
    return {name: torch.zeros_like(tensor) for name, tensor in weights_at(0).items()}


def assert_version(live: Mapping[str, Tensor], version: int) -> None:
    """Assert that the tensors are exactly those of a version."""
    for name, tensor in weights_at(version).items():
        assert torch.equal(live[name], tensor), (name, version)


class Pair:
    """A publisher and a subscriber of these tensors in this process."""

    def __init__(self, transport: str, *, reading: Transport | None = None, patience_s: float = 2.0) -> None:
        self.publisher = Publisher(
            weights_at(0), token=TOKEN, transport=transport, bucket_bytes=_BUCKET_BYTES, patience_s=patience_s
        )
        self.live = blank()
        self.subscriber = Subscriber(
            self.publisher.address, self.live, token=TOKEN, transport=reading or transport, timeout_s=10
        )

    async def publish(self, version: int) -> Mapping[str, float]:
        """Publish the weights of a version."""
        return await self.publisher.publish(version, weights_at(version))

    async def __aenter__(self) -> Pair:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.subscriber.close()
        await self.publisher.close()


class BitFlips:
    """A transport that flips one bit in the first `times` reads of a bucket."""

    def __init__(self, inner: Transport, *, bucket: int, times: int) -> None:
        self.name = f"{inner.name} with bit flips"
        self.num_reads = 0
        """Reads of that bucket so far."""
        self._inner, self._bucket, self._times = inner, bucket, times

    def allocate(self, num_bytes: int) -> Segment:
        """Make a sound slot."""
        return self._inner.allocate(num_bytes)

    def attach(self, link: Link, *, arena: Arena, offers: tuple[dict[str, str], ...]) -> Reader:
        """Reach the slots through this."""
        self._reader = self._inner.attach(link, arena=arena, offers=offers)
        return self

    def read(self, bucket: Bucket, *, lent: Lent, out: Raw) -> None:
        """Read, then damage."""
        self._reader.read(bucket, lent=lent, out=out)
        if bucket.index == self._bucket:
            self.num_reads += 1
            if self.num_reads <= self._times:
                out[out.size // 2] ^= 4

    def close(self) -> None:
        """Close what is inside."""
        self._reader.close()


@contextmanager
def _joined(transport: Transport, target: Manifest, rank: int) -> Iterator[tuple[Publisher, Feed]]:
    """A publisher with version 0 and a feed that agreed on a plan with it."""
    weights = weights_at(0)
    publisher = Publisher(weights, token=TOKEN, transport=transport, bucket_bytes=_BUCKET_BYTES, patience_s=0.05)
    asyncio.run(publisher.publish(0, weights))
    feed = Feed.open(publisher.address, token=TOKEN, timeout_s=_TIMEOUT_S)
    try:
        made = plan(feed.welcome.source, target, bucket_bytes=_BUCKET_BYTES)
        feed.join(made, target=target, rank=rank, transport=transport)
        yield publisher, feed
    finally:
        feed.close()
        asyncio.run(publisher.close())


def _whole() -> Manifest:
    return Manifest.from_tensors(weights_at(0))


def _columns() -> Manifest:
    """Half of each matrix's columns on each of two ranks: every bucket must be gathered from strided rows."""
    specs: list[WeightSpec] = list(_whole().specs.values())
    cut = {name: [Shard(1)] for name in ("embed", "proj")}
    return Manifest.sharded(specs, mesh_shape=(2,), placements=cut)


def _read(feed: Feed, lent: Lent, bucket: Bucket) -> Raw:
    assert feed.reader is not None
    out = np.full(bucket.num_bytes, 0xEE, np.uint8)
    feed.reader.read(bucket, lent=lent, out=out)
    return out


def _assert_exact(feed: Feed, version: int) -> None:
    weights = weights_at(version)
    arena = Arena.of(
        feed.welcome.source, rank=0, wire_dtypes={n: s.dtype for n, s in feed.welcome.source.specs.items()}
    )
    lent = feed.borrow(version)
    for bucket in feed.buckets:
        data = _read(feed, lent, bucket)
        assert bucket_hash(data) == lent.bucket_hashes[bucket.index]
        for piece in bucket.pieces:
            got = arena.packed(data, piece).tobytes()
            wanted = weights[piece.name][(*piece.box.slices(), ...)].contiguous().reshape(-1)
            assert got == wanted.view(torch.uint8).numpy().tobytes(), piece
    assert feed.give_back(lent)


def reads_whole_tensors(transport: Transport) -> None:
    """All bytes of a version arrive."""
    with _joined(transport, _whole(), 0) as (_, feed):
        assert len(feed.buckets) > 1
        _assert_exact(feed, 0)


def reads_strided_boxes(transport: Transport) -> None:
    """A rank that needs some columns gets those, packed."""
    with _joined(transport, _columns(), 1) as (_, feed):
        _assert_exact(feed, 0)


def reads_the_next_version(transport: Transport) -> None:
    """What is read after a publish is the new version, in whichever slot."""
    with _joined(transport, _whole(), 0) as (publisher, feed):
        for version in range(1, 4):
            asyncio.run(publisher.publish(version, weights_at(version)))
            assert feed.newer(version - 1) == version
            _assert_exact(feed, version)


def reads_from_several_threads(transport: Transport) -> None:
    """Readers are called by several threads at once."""
    with _joined(transport, _whole(), 0) as (_, feed), ThreadPoolExecutor(4) as pool:
        lent = feed.borrow(0)
        found = pool.map(lambda bucket: bucket_hash(_read(feed, lent, bucket)), feed.buckets * 8)
        assert list(found) == list(lent.bucket_hashes) * 8


def tells_when_a_lease_was_revoked(transport: Transport) -> None:
    """After the slot was rewritten, either the read or the end of the lease says so."""
    with _joined(transport, _whole(), 0) as (publisher, feed):
        lent = feed.borrow(0)
        for version in (1, 2):
            asyncio.run(publisher.publish(version, weights_at(version)))
        try:
            _read(feed, lent, feed.buckets[0])
        except Superseded:
            return
        assert not feed.give_back(lent)


def survives_the_publisher(transport: Transport) -> None:
    """Without its publisher a reader gives the right bytes or says so at once."""
    with _joined(transport, _whole(), 0) as (publisher, feed):
        lent = feed.borrow(0)
        asyncio.run(publisher.close())
        started = time.monotonic()
        try:
            found = bucket_hash(_read(feed, lent, feed.buckets[0]))
        except PeerLost:
            pass
        else:
            assert found == lent.bucket_hashes[0]
        assert time.monotonic() - started < _TIMEOUT_S / 2


def closes_twice(transport: Transport) -> None:
    """Closing again does nothing."""
    with _joined(transport, _whole(), 0) as (_, feed):
        feed.close()
        feed.close()
    segment = transport.allocate(100)
    assert segment.memory.shape == (100,) and not segment.memory.any()
    segment.close()
    segment.close()


CHECKS = (
    reads_whole_tensors,
    reads_strided_boxes,
    reads_the_next_version,
    reads_from_several_threads,
    tells_when_a_lease_was_revoked,
    survives_the_publisher,
    closes_twice,
)

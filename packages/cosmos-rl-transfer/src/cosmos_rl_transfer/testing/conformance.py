"""The behaviour of every transport, without publisher and subscriber: for each of CHECKS, on two fresh ends,

@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check):
    check(Ends.of(MyTransport))
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.errors import PeerLost
from cosmos_rl_transfer.testing.sample_exchange import (
    WINDOW,
    PublisherProcess,
    SamplePublisher,
    SampleReader,
    Serve,
    content,
    num_bytes,
    places,
)
from cosmos_rl_transfer.transports.base import Transport, TransportUnavailable
from cosmos_rl_transfer.wire.link import Link
from cosmos_rl_transfer.wire.messages import Data

LONGEST_WAIT_S = 2.0
"""Longest time that the death of a peer may stay unnoticed."""
_TIMEOUT_S = 30.0
_SHORT_S = 0.3
_GROWTH_BYTES = 8 << 20
"""An eighth of what a thousand buckets would leave behind."""


def slots_arrive_whole(ends: Ends) -> None:
    """Buckets of all sizes from one byte on, in alternating slots, are read as they were packed."""
    with _pair(ends) as reader:
        _read_many(reader, Serve.SLOT, 40)


def runs_arrive_in_their_places(ends: Ends) -> None:
    """Runs of a slot with gaps between them arrive in their places."""
    with _pair(ends) as reader:
        _read_many(reader, Serve.RUNS, 16)


def live_memory_is_read_in_place(ends: Ends) -> None:
    """Runs out of exposed memory arrive, also when other memory is exposed later; slots still do."""
    with ExitStack() as stack:
        publisher = stack.enter_context(_opened(ends))
        if not publisher.outlet.direct:
            return
        reader = stack.enter_context(_served(ends, publisher))
        _read_many(reader, Serve.LIVE, 16)
        for _ in range(3):
            _read_many(reader, Serve.MOVED, 1)  # nothing may be on its way when memory is exposed
        _read_many(reader, Serve.LIVE, 4)
        _read_many(reader, Serve.SLOT, 4)


def a_bucket_stays_until_it_is_given_back(ends: Ends) -> None:
    """A received bucket does not change while the next is packed and received."""
    with _pair(ends) as reader:
        for bucket in range(WINDOW):
            reader.ask(Serve.SLOT, bucket)
        received = [_receive(reader) for _ in range(WINDOW)]
        for data, packed in received:
            _assert_exact(Serve.SLOT, data, packed)


def readers_do_not_disturb_each_other(ends: Ends) -> None:
    """Several subscribers read from one outlet at once, each over a link of its own."""
    failures: list[BaseException] = []

    def read(reader: SampleReader, first: int) -> None:
        try:
            _read_many(reader, Serve.SLOT, 50, first=first)
        except BaseException as error:  # raised by the thread that started this one
            failures.append(error)

    with ExitStack() as stack:
        publisher = stack.enter_context(_opened(ends))
        readers = [stack.enter_context(_served(ends, publisher, i)) for i in range(ends.max_readers)]
        threads = [threading.Thread(target=read, args=(reader, 1000 * i)) for i, reader in enumerate(readers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_TIMEOUT_S)
    assert not failures, failures


def a_publisher_that_closes_is_noticed(ends: Ends) -> None:
    """After the publisher closed, receiving an announced bucket ends, and the next is PeerLost. At once."""
    with _pair(ends) as reader:
        reader.ask(Serve.VANISH, 0)
        data = reader.announced()
        with _at_most(LONGEST_WAIT_S):
            _received_or_lost(reader, data)  # of a slot that was taken away anything may come
            _assert_lost(reader)


def silence_ends_by_the_deadline(ends: Ends) -> None:
    """A bucket whose bytes do not come is PeerLost after the link's deadline, unless it was there already."""
    with _pair(ends) as reader:
        reader.link.set_deadlines(timeout_s=_SHORT_S, idle_s=_SHORT_S)
        reader.ask(Serve.SILENT, 0)
        data = reader.announced()
        with _at_most(_SHORT_S + LONGEST_WAIT_S):
            _whole_or_lost(reader, data)


def a_killed_publisher_is_noticed(ends: Ends) -> None:
    """SIGKILL of the publisher's process in the middle of a bucket is noticed by who waits for it."""
    publisher, transport = ends.start()
    with closing(publisher):
        link = publisher.connect(timeout_s=_TIMEOUT_S)
        with closing(SampleReader(link, transport, bucket_bytes=BUCKET_BYTES)) as reader:
            _read_many(reader, Serve.SLOT, 8)
            reader.ask(Serve.SILENT, 8)
            data = reader.announced()
            waiting = threading.Thread(target=_whole_or_lost, args=(reader, data))
            waiting.start()
            waiting.join(_SHORT_S)
            publisher.close()
            waiting.join(LONGEST_WAIT_S)
            assert not waiting.is_alive()
            _assert_lost(reader)


def a_reader_that_leaves_is_noticed(ends: Ends) -> None:
    """The publisher's thread of a subscriber that left ends, whatever was on its way."""
    with _opened(ends) as publisher, _served(ends, publisher) as reader:
        for bucket in range(WINDOW):
            reader.ask(Serve.SLOT, bucket)
        reader.announced()


def closing_twice_does_nothing(ends: Ends) -> None:
    """Each end may be closed again."""
    with _opened(ends) as publisher, _served(ends, publisher) as reader:
        _read_many(reader, Serve.SLOT, 2)
        reader.close()
        reader.close()
        publisher.close()
        publisher.close()


def a_foreign_offer_is_refused_with_a_reason(ends: Ends) -> None:
    """A publisher of another kind is TransportUnavailable, with a reason; or no offer is needed."""
    near, far = socket.socketpair()
    with far, closing(Link(near, timeout_s=1, side="subscriber")) as link:
        try:
            ends.subscriber.attach(link, offer={"postcode": "90210"}, memory=[]).close()
        except TransportUnavailable as error:
            assert str(error)


def memory_does_not_grow(ends: Ends) -> None:
    """A thousand buckets leave no memory and no file behind, at either end."""
    with _pair(ends) as reader:
        _read_many(reader, Serve.SLOT, 200)
        resident, files = _resident_bytes(), _open_files()
        _read_many(reader, Serve.SLOT, 1000)
        assert _open_files() <= files
        assert _resident_bytes() - resident < _GROWTH_BYTES


CHECKS: tuple[Callable[[Ends], None], ...] = (
    slots_arrive_whole,
    runs_arrive_in_their_places,
    live_memory_is_read_in_place,
    a_bucket_stays_until_it_is_given_back,
    readers_do_not_disturb_each_other,
    a_publisher_that_closes_is_noticed,
    silence_ends_by_the_deadline,
    a_killed_publisher_is_noticed,
    a_reader_that_leaves_is_noticed,
    closing_twice_does_nothing,
    a_foreign_offer_is_refused_with_a_reason,
    memory_does_not_grow,
)


@contextmanager
def _pair(ends: Ends) -> Iterator[SampleReader]:
    with _opened(ends) as publisher, _served(ends, publisher) as reader:
        yield reader


def _opened(ends: Ends) -> closing[SamplePublisher]:
    return closing(SamplePublisher(ends.publisher, bucket_bytes=BUCKET_BYTES, num_readers=ends.max_readers))


@contextmanager
def _served(ends: Ends, publisher: SamplePublisher, number: int = 0) -> Iterator[SampleReader]:
    """A reader, and the thread that answers it, which has to end when the reader leaves."""
    near, far = socket.socketpair()
    link = Link(far, timeout_s=_TIMEOUT_S, side="publisher")
    thread = threading.Thread(target=publisher.serve, args=(link, number))
    thread.start()
    with closing(link), _ending(thread), closing(Link(near, timeout_s=_TIMEOUT_S, side="subscriber")) as ours:
        reader = SampleReader(ours, ends.subscriber, bucket_bytes=BUCKET_BYTES)
        with closing(reader):
            yield reader


@contextmanager
def _ending(thread: threading.Thread) -> Iterator[None]:
    try:
        yield
    finally:
        thread.join(LONGEST_WAIT_S)
        assert not thread.is_alive(), "who serves a reader that left does not notice"


def _read_many(reader: SampleReader, serve: Serve, how_many: int, *, first: int = 0) -> None:
    """Read buckets, asking for two at a time, and compare each byte that means something."""
    buckets = range(first, first + how_many)
    for bucket in buckets[:WINDOW]:
        reader.ask(serve, bucket)
    for bucket in buckets:
        data, packed = _receive(reader)
        assert data.bucket == bucket
        _assert_exact(serve, data, packed)
        if bucket + WINDOW in buckets:
            reader.ask(serve, bucket + WINDOW)


def _receive(reader: SampleReader) -> tuple[Data, Raw]:
    data = reader.announced()
    return data, reader.receive(data)


def _assert_exact(serve: Serve, data: Data, packed: Raw) -> None:
    size = num_bytes(data.bucket, BUCKET_BYTES)
    assert packed.shape == (data.num_bytes,) == (size,)
    expected = content(data.bucket, size)
    for at, length in places(serve, size):
        assert np.array_equal(packed[at : at + length], expected[at : at + length]), (serve, data.bucket, at)


def _received_or_lost(reader: SampleReader, data: Data) -> Raw | None:
    try:
        return reader.receive(data)
    except PeerLost:
        return None


def _whole_or_lost(reader: SampleReader, data: Data) -> None:
    packed = _received_or_lost(reader, data)
    if packed is not None:
        _assert_exact(Serve.SLOT, data, packed)


def _assert_lost(reader: SampleReader) -> None:
    try:
        reader.ask(Serve.SLOT, WINDOW)
        reader.announced()
    except PeerLost:
        return
    raise AssertionError("a publisher that is gone announced a bucket")


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    taken = time.monotonic() - started
    assert taken < seconds, f"took {taken:.1f} s"


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


BUCKET_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The two ends of a transport that is to be tried, not used before."""

    publisher: Transport
    subscriber: Transport
    start: Callable[[], tuple[PublisherProcess, Transport]]
    """Starts a publisher in another process; returns it and the subscriber's end of its transport."""
    max_readers: int = 3
    """Subscribers one outlet can serve."""

    @classmethod
    def of(cls, kind: type[Transport]) -> Ends:
        """Use a transport whose two ends are made alike, without arguments."""
        spec = f"{kind.__module__}:{kind.__qualname__}"
        return cls(
            publisher=kind(),
            subscriber=kind(),
            start=lambda: (PublisherProcess.of(spec, bucket_bytes=BUCKET_BYTES), kind()),
        )

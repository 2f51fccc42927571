"""Tens of thousands of changed frames against a publisher: nothing but clear errors, and it serves on."""

import asyncio
import logging
import random
import resource
import socket
import threading
from contextlib import suppress

import msgspec
import pytest
from transfer_samples import TOKEN, assert_version, blank, sync, weights_at

from cosmos_rl_core.wire.frames import FrameSealer
from cosmos_rl_core.wire.handshake import Hello, make_preamble
from cosmos_rl_transfer import Publisher, Subscriber, TransferError
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.planning.plan import plan
from cosmos_rl_transfer.publish.server import SubscriberSession
from cosmos_rl_transfer.wire import messages as m
from cosmos_rl_transfer.wire.link import Link

NUM_FRAMES = 60_000
NUM_OPENINGS = 5_000
MOST_GROWTH_KIB = 64 * 1024
OPENING = make_preamble() + bytes(FrameSealer(bytes(32)).seal(Hello(name="subscriber", role="subscriber")))


def changed(draw, data):
    """Return bytes with some flipped, cut, doubled, inserted or all random; a frame's length is among them."""
    data = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(6):
            case 0:
                data[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del data[at : at + draw.randint(1, 8)]
            case 2:
                data[at:at] = data[at : at + draw.randint(1, 16)]
            case 3:
                data[at:at] = draw.randbytes(draw.randint(1, 8))
            case 4:
                data[at:at] = draw.choice([b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff"])
            case 5:
                data = bytearray(draw.randbytes(draw.randint(0, 64))) if draw.random() < 0.1 else data + b"\xff\xfe"
    return bytes(data)


def framed(body):
    return bytes(FrameSealer(None).seal(msgspec.Raw(body)))


def conversations(source, target):
    """Messages that belong together, as functions of the lease that the publisher gives next."""
    made = plan(source, target, relay="off", bucket_bytes=2048)
    join = m.SubscriberJoin(target.encode(), 0, made.digest)
    return [
        lambda lease: [m.TransferHello(m.PROTOCOL)],
        lambda lease: [
            join,
            m.Borrow(1),
            m.ReadBuckets(lease, (0, 1)),
            m.Taken(0),
            m.WasRevoked(0),
            m.ReturnLease(lease),
        ],
        lambda lease: [join, m.Borrow(1, share=(0, 2)), m.ReadBuckets(lease, (1,), "link"), m.ReturnLease(lease)],
        lambda lease: [join, m.Holds(1, "127.0.0.1:1"), m.FindHolders(0)],
        lambda lease: [m.TryTransport("cuda_ipc"), m.ReadPattern("tcp", -1), m.WasRevoked(m.PATTERN), join],
        lambda lease: [m.JoinRing(made.digest, 0, "tcp"), m.Borrow(1), m.ReadBuckets(lease, (0,))],
        lambda lease: [m.Register(0), m.Staged(1), m.VersionCommitted(1), m.TransferFailed(1, "why")],
    ]


def converse(server, frames):
    """Let a session read frames of one who holds the token, to their end."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(b"".join(frames))
        theirs.shutdown(socket.SHUT_WR)
        link = Link(ours, timeout_s=5, side="publisher")
        try:
            with pytest.raises(TransferError):
                SubscriberSession(server, link).run()
        finally:
            link.close()


def open_badly(address, opening, *, wait):
    """Open as a stranger does; return what the publisher said, as far as it came."""
    host, _, port = address.rpartition(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=10) as stranger, suppress(OSError):
        stranger.sendall(opening)
        if wait:
            stranger.shutdown(socket.SHUT_WR)
            while part := stranger.recv(4096):
                received += part
    return received


def num_own_threads():
    """Threads that the event loop's own pool has not started."""
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())


@pytest.mark.slow
def test_changed_frames_cost_a_publisher_nothing(caplog):
    draw = random.Random(13)

    async def main():
        publisher = Publisher(weights_at(1), token=TOKEN, settings=sync(transport="tcp", bucket_bytes=2048))
        await publisher.publish(1, weights_at(1))
        server = publisher._server
        talks = conversations(server.memory.manifest, Manifest.from_tensors(blank(), rank=0))
        num_threads, started_kib = num_own_threads(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(NUM_FRAMES):
            lease = next(server.versions._numbers) + 1
            talk = [msgspec.msgpack.encode(message) for message in draw.choice(talks)(lease)]
            which = draw.randrange(len(talk))
            frames = [framed(body) for body in talk[:which]]
            change_body = draw.random() < 0.8
            frames.append(framed(changed(draw, talk[which])) if change_body else changed(draw, framed(talk[which])))
            converse(server, frames)
        for number in range(NUM_OPENINGS):
            said = open_badly(publisher.address, changed(draw, OPENING), wait=number % 2 == 0)
            assert len(said) <= len(OPENING), "its own opening, and a proof that says nothing"
        live = blank()
        subscriber = Subscriber(publisher.address, live, token=TOKEN, settings=sync(transport="tcp", timeout_s=20))
        assert await subscriber.stage(after=-1) == 1
        subscriber.apply()
        assert_version(live, 1)
        await subscriber.close()
        await publisher.close()
        assert num_own_threads() <= num_threads
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - started_kib < MOST_GROWTH_KIB

    asyncio.run(main())
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []

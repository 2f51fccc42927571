"""Tens of thousands of changed frames against the control channel: nothing passes, and nothing escapes."""

import asyncio
import random
import resource

import msgspec
import pytest

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.wire.connection import Connection
from cosmos_rl_core.wire.frames import FrameSealer
from cosmos_rl_core.wire.handshake import PREAMBLE_BYTES, Hello, make_preamble, session_keys

NUM_FRAMES = 60_000
MOST_GROWTH_KIB = 64 * 1024
TOKEN = bytes(range(32))
HELLO = Hello(name="rollout-0", role="rollout")
CONTROLLER = Hello(name="controller", role="controller")
DECODER = msgspec.msgpack.Decoder(p.ToController)
SENT = [
    p.Heartbeat(progress=7, waited_s=0.5, holding=(3,)),
    p.RequestLeases(version=3, capacity=4),
    p.Ready(address="tcp://127.0.0.1:1"),
    p.StepDone(step=1, version=2, metrics={"loss": 0.5}),
    p.CheckpointDone(step=1, path="/runs/checkpoints/step_1"),
    p.Fatal(message="why", user=True),
]
NONSENSE = [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 3000, b"\xa2\xff\xfe"]
"""An array of 4 billion, 4 GB of bytes, 3,000 levels, and text that is none."""


class FakeTransport:
    """Keeps what is written to it."""

    def __init__(self):
        self.written, self.closed = bytearray(), False

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    abort = close

    def set_write_buffer_limits(self, high):
        assert high > 0

    def get_write_buffer_size(self):
        return 0

    def pause_reading(self):
        pass

    resume_reading = pause_reading


class Served:
    """One connection of a controller, and the client that it hears."""

    def __init__(self):
        self.connection = Connection(
            token=TOKEN, hello=CONTROLLER, decoder=DECODER, max_frame_bytes=2**20, handshake_s=60
        )
        self.transport = FakeTransport()
        self.connection.connection_made(self.transport)
        self.preamble = make_preamble()

    @property
    def is_open(self):
        return self.connection.opened.done()

    def hear(self, data):
        data = memoryview(data)
        while data and not self.transport.closed:
            room = self.connection.get_buffer(-1)
            size = min(len(room), len(data))
            room[:size] = data[:size]
            self.connection.buffer_updated(size)
            data = data[size:]

    def sealer(self):
        """Exchange preambles, and return what seals the client's frames."""
        self.hear(self.preamble)
        theirs = bytes(self.transport.written[:PREAMBLE_BYTES])
        return FrameSealer(session_keys(TOKEN, ours=self.preamble, theirs=theirs, client=True).send)

    def end(self):
        """End it; return the messages that were delivered."""
        self.connection.connection_lost(None)
        self.connection.opened.exception()
        return [message for message, _ in self.connection._inbox]


def changed(draw, data):
    """Return other bytes: some flipped, cut, doubled or inserted."""
    before, data = bytes(data), bytearray(data)
    while bytes(data) == before:
        at = draw.randrange(len(data) + 1)
        match draw.randrange(5):
            case 0:
                data[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del data[at : at + draw.randint(1, 8)]
            case 2:
                data[at:at] = data[at : at + draw.randint(1, 16)]
            case 3:
                data[at:at] = draw.randbytes(draw.randint(1, 8))
            case 4:
                data[at:at] = draw.choice(NONSENSE)
    return bytes(data)


def changed_opening(draw):
    """Somebody on the path changes the handshake: no connection, or the client's very Hello in a longer stream."""
    served = Served()
    if draw.random() < 0.5:
        served.hear(changed(draw, served.preamble))
        assert not served.is_open
    else:
        opening = bytes(served.sealer().seal(HELLO))
        other = changed(draw, opening)
        served.hear(other)
        assert not served.is_open or other.startswith(opening)
    assert served.end() == []


def changed_stream(draw):
    """Somebody on the path changes frames: what is delivered was sent, in its order."""
    served = Served()
    sealer = served.sealer()
    served.hear(sealer.seal(HELLO))
    sent = [draw.choice(SENT) for _ in range(draw.randint(1, 3))]
    served.hear(changed(draw, b"".join(sealer.seal(message) for message in sent)))
    delivered = served.end()
    assert delivered == sent[: len(delivered)]


def changed_body(draw):
    """A worker that holds the token says what makes no sense: it is read as a message, or ends the connection."""
    served = Served()
    sealer = served.sealer()
    first = draw.random() < 0.2
    body = changed(draw, msgspec.msgpack.encode(HELLO if first else draw.choice(SENT)))
    if not first:
        served.hear(sealer.seal(HELLO))
    served.hear(sealer.seal(msgspec.Raw(body)))
    assert served.transport.closed == bool(served.connection.reason)
    served.end()


@pytest.mark.slow
def test_changed_frames_are_never_delivered_and_cost_nothing():
    draw = random.Random(13)

    async def main():
        started_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(NUM_FRAMES):
            (changed_opening, changed_stream, changed_body)[number % 3](draw)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - started_kib < MOST_GROWTH_KIB

    asyncio.run(main())

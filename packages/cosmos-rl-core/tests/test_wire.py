"""The control channel: what authenticated peers may rely on, and what everybody else gets."""

import asyncio
import hmac
import random
import re
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib import metadata

import msgspec
import pytest
import uvloop

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire import frames
from cosmos_rl_core.wire.blocking import BlockingConnection
from cosmos_rl_core.wire.channel import MAX_UNAUTHENTICATED, Connection, ConnectionClosed, Hello, adopt, connect, serve
from cosmos_rl_core.wire.frames import HEADER_BYTES, FrameReader, FrameSealer
from cosmos_rl_core.wire.handshake import (
    PREAMBLE_BYTES,
    PROTOCOL_VERSION,
    Violation,
    WrongTag,
    make_preamble,
    session_keys,
)
from doubles.descriptors import descriptors_left

TOKEN = bytes(range(32))
OTHER_TOKEN = bytes(range(1, 33))
HELLO = Hello(name="rollout-0", role="rollout", incarnation=3)
LOOPBACK = "tcp://127.0.0.1:0"


class Say(msgspec.Struct, frozen=True, tag=True):
    number: int
    body: bytes = b""


class View(msgspec.Struct, frozen=True, tag=True):
    body: memoryview


class Unknown(msgspec.Struct, frozen=True, tag=True):
    number: int


Message = Say | View


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


async def echo(connection):
    while True:
        await connection.send(await connection.receive())


class Collector:
    """A handler that keeps what it received and how each connection ended."""

    def __init__(self):
        self.received = []
        self.connections = []
        self.ended = asyncio.Event()

    async def __call__(self, connection):
        self.connections.append(connection)
        try:
            while True:
                self.received.append(await connection.receive())
        finally:
            self.ended.set()


class RawClient:
    """A peer that can misbehave: it opens as it should, then sends any bytes."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer
        self.preamble = make_preamble()
        self.sealer = None

    @classmethod
    async def connect(cls, server):
        host, port = server.address.removeprefix("tcp://").split(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    @classmethod
    async def opened(cls, server):
        raw = await cls.connect(server)
        raw.writer.write(raw.preamble)
        theirs = await raw.reader.readexactly(PREAMBLE_BYTES)
        keys = session_keys(TOKEN, ours=raw.preamble, theirs=theirs, client=True)
        raw.sealer = FrameSealer(keys.send)
        raw.writer.write(raw.sealer.seal(HELLO))
        return raw

    async def until_closed(self):
        """Read to the end and return what came."""
        try:
            return await asyncio.wait_for(self.reader.read(), 5)
        except ConnectionResetError:
            return b""
        finally:
            self.writer.close()


async def send_raw(*pieces):
    """Open a connection, send bytes, end it; return the numbers received and why the server closed it."""
    collector = Collector()
    server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=collector)
    raw = await RawClient.opened(server)
    for piece in pieces:
        raw.writer.write(piece(raw.sealer) if callable(piece) else piece)
    raw.writer.write_eof()
    await raw.until_closed()
    await asyncio.wait_for(collector.ended.wait(), 5)
    await server.close()
    return [m.number for m in collector.received], collector.connections[0].reason


# -- peers that hold the token


def test_a_message_comes_back():
    async def scenario():
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=echo)
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
        await connection.send(Say(7, b"\x00\xff"))
        assert await connection.receive() == Say(7, b"\x00\xff")
        await server.close()

    run(scenario())


def test_each_side_learns_who_the_other_is():
    async def scenario():
        collector = Collector()
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=collector)
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
        assert connection.peer == Hello(name="controller", role="controller")
        connection.close()
        await collector.ended.wait()
        assert collector.connections[0].peer == HELLO
        await server.close()

    run(scenario())


def test_messages_keep_their_order_and_content_from_empty_to_megabytes():
    sizes = [0, 1, 65_000, 65_535, 65_536, 65_537, 0, 3_000_000, 5, 200_000, 1]

    async def scenario():
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=echo)
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
        sent = [Say(i, random.Random(i).randbytes(size)) for i, size in enumerate(sizes)]
        for message in sent:
            connection.post(message)
        assert [await connection.receive() for _ in sent] == sent
        await server.close()

    run(scenario())


@pytest.mark.parametrize("size", [100, 300_000])
def test_a_memoryview_field_keeps_its_bytes_while_later_messages_arrive(size):
    async def scenario():
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=echo)
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
        bodies = [bytes([i]) * size for i in range(20)]
        for body in bodies:
            connection.post(View(memoryview(body)))
        views = [(await connection.receive()).body for _ in bodies]
        assert [bytes(view) for view in views] == bodies
        await server.close()

    run(scenario())


def test_three_hundred_peers_are_served_at_once():
    async def scenario():
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=echo)

        async def peer(index):
            hello = Hello(name=f"rollout-{index}", role="rollout")
            connection = await connect(server.address, token=TOKEN, hello=hello, decode=Message)
            for number in range(5):
                await connection.send(Say(index * 10 + number))
                assert await connection.receive() == Say(index * 10 + number)
            return connection

        connections = await asyncio.gather(*(peer(i) for i in range(300)))
        await server.close()
        await asyncio.gather(*(connection.closed.wait() for connection in connections))

    run(scenario())


def test_a_full_receiver_makes_the_sender_wait_and_loses_nothing():
    async def scenario():
        reading = asyncio.Event()
        received = []

        async def late_reader(connection):
            await reading.wait()
            while True:
                received.append((await connection.receive()).number)

        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=late_reader)
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
        sent = 0

        async def flood():
            nonlocal sent
            while True:
                sent += 1
                await connection.send(Say(sent, bytes(500_000)))

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(flood(), 0.2)
        assert sent < 200  # 8 MiB inbox, 1 MiB write buffer and the kernel's buffers, not memory without end
        reading.set()
        connection.close()
        await connection.closed.wait()
        await asyncio.sleep(0)
        while len(received) < sent:
            await asyncio.sleep(0.01)
        assert received == list(range(1, sent + 1))
        await server.close()

    run(scenario())


def test_posting_to_a_peer_that_never_reads_ends_the_connection():
    async def scenario():
        async def never_reads(connection):
            await connection.closed.wait()

        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=never_reads)
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message, max_frame_bytes=2**20)
        with pytest.raises(ConnectionClosed, match="reads too slowly"):
            for number in range(1000):
                connection.post(Say(number, bytes(500_000)))
                await asyncio.sleep(0)
        await server.close()

    run(scenario())


# -- the end of a connection


def test_receive_ends_when_the_peer_closes():
    async def scenario():
        async def hang_up(connection):
            await connection.receive()

        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=hang_up)
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
        waiting = asyncio.create_task(connection.receive())
        await connection.send(Say(1))
        with pytest.raises(ConnectionClosed, match="closed by the peer"):
            await waiting
        assert connection.closed.is_set()
        await server.close()

    run(scenario())


def test_consumed_messages_are_handled_in_order_until_the_end():
    async def main():
        handled, reasons = [], []

        async def handler(connection):
            await asyncio.sleep(0.05)  # the first messages wait in the inbox
            try:
                await connection.consume(lambda message: handled.append(message.number))
            except ConnectionClosed as error:
                reasons.append(str(error))
                raise

        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=handler)
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
        for number in range(100):
            await connection.send(Say(number))
            if number >= 50:
                await asyncio.sleep(0.002)
        connection.close()
        while not reasons:
            await asyncio.sleep(0.01)
        assert handled == list(range(100)) and reasons == ["closed by the peer"]
        await server.close()

    run(main())


def test_an_error_of_a_handler_ends_its_consumption():
    async def main():
        handled, errors = [], []

        def handle(message):
            handled.append(message.number)
            if message.number == 3:
                raise ZeroDivisionError

        async def handler(connection):
            try:
                await connection.consume(handle)
            except ZeroDivisionError as error:
                errors.append(error)

        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=handler)
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
        for number in range(6):
            await connection.send(Say(number))
        await asyncio.wait_for(connection.closed.wait(), 5)
        assert handled == [0, 1, 2, 3] and len(errors) == 1
        await server.close()

    run(main())


def test_messages_before_the_end_are_still_received():
    async def scenario():
        async def say_and_leave(connection):
            for number in range(3):
                connection.post(Say(number))

        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=say_and_leave)
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
        await connection.closed.wait()
        assert [(await connection.receive()).number for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ConnectionClosed):
            await connection.receive()
        await server.close()

    run(scenario())


def test_a_send_that_waits_ends_with_the_connection():
    async def scenario():
        accepted: list[Connection] = []

        async def never_reads(connection):
            accepted.append(connection)
            await connection.closed.wait()

        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=never_reads)
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
        sending = asyncio.create_task(connection.send(Say(1, bytes(50_000_000))))
        done, _ = await asyncio.wait({sending}, timeout=0.1)
        assert not done
        await server.close()
        with pytest.raises(ConnectionClosed):
            await sending

    run(scenario())


def test_a_cancelled_receive_loses_no_message():
    async def scenario():
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=echo)
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.receive(), 0.01)
        await connection.send(Say(1))
        assert await connection.receive() == Say(1)
        await server.close()

    run(scenario())


def test_a_closed_connection_takes_no_message():
    async def scenario():
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=echo)
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
        connection.close()
        with pytest.raises(ConnectionClosed, match="closed by this side"):
            connection.post(Say(1))
        await server.close()

    run(scenario())


def test_closing_the_server_ends_handlers_and_connections_and_frees_the_address():
    async def scenario():
        address = LOOPBACK
        for _ in range(2):
            server = await serve(address, token=TOKEN, decode=Message, on_connect=echo)
            connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
            address = server.address
            await server.close()
            await connection.closed.wait()

    run(scenario())


def test_a_client_gives_up_on_a_machine_that_acknowledges_nothing():
    """tests/cluster/test_two_machines.py cuts a cable."""

    def options(connection):
        transport = connection._transport
        found = transport.get_extra_info("socket")
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        return [
            found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            *(found.getsockopt(socket.IPPROTO_TCP, name) for name in names),
        ]

    async def scenario():
        collector = Collector()
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=collector)
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
        await connection.send(Say(1))
        while not collector.connections:
            await asyncio.sleep(0.01)
        assert options(connection) == [1, 60, 15, 4, 15_000]
        assert options(collector.connections[0]) == [1, 60, 15, 4, 0]
        connection.close()
        await server.close()

    run(scenario())


def test_a_connection_that_is_reset_as_it_opens_is_worth_another_attempt():
    """The server dies with thousands of connections in its backlog; the loop of a run is uvloop's."""

    class Late(uvloop.Loop):
        async def create_connection(self, *args, **kwargs):
            transport, protocol = await super().create_connection(*args, **kwargs)
            while not transport.is_closing():  # until the reset is read
                await asyncio.sleep(0.01)
            assert transport.get_extra_info("socket") is None
            return transport, protocol

    async def scenario(listener):
        attempt = asyncio.create_task(
            connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}", token=TOKEN, hello=HELLO, decode=Message)
        )
        accepted, _ = await asyncio.to_thread(listener.accept)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        with pytest.raises(ConnectionClosed, match=r"closed by the peer|connection broke"):
            await asyncio.wait_for(attempt, 10)

    with socket.create_server(("127.0.0.1", 0)) as listener, asyncio.Runner(loop_factory=Late) as runner:
        runner.run(scenario(listener))


def test_a_failing_handler_is_reported_and_ends_its_connection():
    async def scenario():
        reports = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))

        async def fail(connection):
            raise RuntimeError("broken handler")

        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=fail)
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
        await connection.closed.wait()
        await server.close()
        assert [str(report["exception"]) for report in reports] == ["broken handler"]
        assert "rollout-0" in reports[0]["message"]

    run(scenario())


# -- peers that do not hold the token


def test_another_token_is_refused_on_both_sides():
    async def scenario():
        collector = Collector()
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=collector)
        with pytest.raises(UserError, match="does not have this run's token"):
            await connect(server.address, token=OTHER_TOKEN, hello=HELLO, decode=Message)
        await server.close()
        assert collector.connections == []

    run(scenario())


def test_a_client_without_the_token_that_ignores_the_servers_proof_is_not_let_in():
    async def scenario():
        collector = Collector()
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=collector)
        raw = await RawClient.connect(server)
        raw.writer.write(raw.preamble)
        theirs = await raw.reader.readexactly(PREAMBLE_BYTES)
        keys = session_keys(OTHER_TOKEN, ours=raw.preamble, theirs=theirs, client=True)
        raw.writer.write(FrameSealer(keys.send).seal(HELLO))
        await raw.until_closed()
        await server.close()
        assert collector.connections == []

    run(scenario())


def test_a_recorded_conversation_opens_nothing():
    async def scenario():
        collector = Collector()
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=collector)
        first = await RawClient.connect(server)
        first.writer.write(first.preamble)
        theirs = await first.reader.readexactly(PREAMBLE_BYTES)
        keys = session_keys(TOKEN, ours=first.preamble, theirs=theirs, client=True)
        hello = bytes(FrameSealer(keys.send).seal(HELLO))

        second = await RawClient.connect(server)
        second.writer.write(first.preamble + hello)
        await second.until_closed()
        first.writer.close()
        await server.close()
        assert collector.connections == []

    run(scenario())


def test_a_server_that_echoes_the_client_proves_nothing():
    async def scenario():
        async def mirror(reader, writer):
            writer.write(await reader.readexactly(PREAMBLE_BYTES))
            await reader.read()
            writer.close()

        server = await asyncio.start_server(mirror, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionClosed, match="our own opening"):
            await connect(f"tcp://127.0.0.1:{port}", token=TOKEN, hello=HELLO, decode=Message)
        server.close()
        await server.wait_closed()

    run(scenario())


def test_another_protocol_version_is_named_on_the_client():
    async def scenario():
        async def newer(reader, writer):
            writer.write(make_preamble(version=PROTOCOL_VERSION + 1))
            await reader.read()
            writer.close()

        server = await asyncio.start_server(newer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        own = f"\\(cosmos-rl-core {re.escape(metadata.version('cosmos-rl-core')[:16])}\\)"
        versions = (
            f"version {PROTOCOL_VERSION} {own}, the peer has version {PROTOCOL_VERSION + 1} {own}: install the same"
        )
        with pytest.raises(UserError, match=versions):
            await connect(f"tcp://127.0.0.1:{port}", token=TOKEN, hello=HELLO, decode=Message)
        server.close()
        await server.wait_closed()

    run(scenario())


@pytest.mark.parametrize("package", [bytes(range(16)), b"0.2.0\0a\0", b"\xff" * 16, b""])
def test_the_first_version_of_the_protocol_and_a_garbled_one_of_the_package_are_not_shown(package):
    theirs = bytearray(make_preamble(version=3))
    theirs[6:22] = package.ljust(16, b"\0")
    with pytest.raises(UserError, match="the peer has version 3: install"):
        session_keys(TOKEN, ours=make_preamble(), theirs=bytes(theirs), client=True)
    theirs = make_preamble(version=1)  # its nonce was longer
    with pytest.raises(UserError, match="the peer has version 1: install"):
        session_keys(TOKEN, ours=make_preamble(), theirs=theirs, client=True)


def test_a_client_of_another_version_is_told_the_servers_and_gets_nothing_else(caplog):
    async def scenario():
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=echo)
        raw = await RawClient.connect(server)
        newer = PROTOCOL_VERSION + 1
        ours = make_preamble(version=newer)
        raw.writer.write(ours)
        theirs = await raw.until_closed()
        with pytest.raises(UserError, match=f"version {newer} .*, the peer has version {PROTOCOL_VERSION} "):
            session_keys(TOKEN, ours=ours, theirs=theirs, client=True)
        await server.close()
        assert re.search(
            f"protocol version {PROTOCOL_VERSION} .*, the peer has version {newer} .*: install the same cosmos-rl-core",
            caplog.text,
        )

    run(scenario())


@pytest.mark.parametrize("start", [b"", b"CRLW", "preamble"])
def test_a_slow_handshake_is_cut(start):
    async def scenario():
        collector = Collector()
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=collector, handshake_s=0.05)
        raw = await RawClient.connect(server)
        raw.writer.write(raw.preamble if start == "preamble" else start)
        await raw.until_closed()
        await server.close()
        assert collector.connections == []

    run(scenario())


def test_unauthenticated_connections_are_bounded_and_a_client_with_the_token_is_served_beside_them(caplog):
    async def main():
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=echo)
        unauthenticated = [await RawClient.connect(server) for _ in range(MAX_UNAUTHENTICATED + 40)]
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
        await connection.send(Say(7))
        assert await connection.receive() == Say(7)
        assert len(server._connections) <= MAX_UNAUTHENTICATED + 1
        for client in unauthenticated:
            client.writer.close()
        connection.close()
        await server.close()

    run(main())
    assert caplog.messages == ["more than 256 idle connections: the oldest are closed"]


def test_a_server_without_descriptors_says_so_once_and_accepts_again(caplog):
    async def main():
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=echo)
        with descriptors_left(1):
            client = await RawClient.connect(server)
            await asyncio.sleep(0.3)
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
        client.writer.close()
        connection.close()
        await server.close()

    run(main())
    assert caplog.messages == ["a connection cannot be accepted: Too many open files"]


def test_a_server_that_never_answers_is_given_up_on():
    async def scenario():
        async def silent(reader, writer):
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionClosed, match=r"0\.05 s"):
            await connect(f"tcp://127.0.0.1:{port}", token=TOKEN, hello=HELLO, decode=Message, timeout_s=0.05)
        server.close()
        await server.wait_closed()

    run(scenario())


def test_a_handshake_above_four_kibibytes_is_refused_before_its_body_comes():
    async def scenario():
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=echo)
        raw = await RawClient.connect(server)
        raw.writer.write(raw.preamble + (5000).to_bytes(4, "big") + bytes(16))
        await raw.until_closed()
        await server.close()

    run(scenario())


def test_garbage_instead_of_a_handshake_is_closed_and_harms_nobody():
    async def scenario():
        collector = Collector()
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=collector)
        rng = random.Random(11)

        async def attack(garbage):
            raw = await RawClient.connect(server)
            raw.writer.write(garbage)
            raw.writer.write_eof()
            await raw.until_closed()

        for _ in range(20):
            inputs = [rng.randbytes(rng.randrange(200)) for _ in range(50)]
            inputs += [make_preamble() + rng.randbytes(rng.randrange(200)) for _ in range(50)]
            await asyncio.gather(*(attack(garbage) for garbage in inputs))
        assert collector.connections == []
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message)
        connection.close()
        await server.close()

    run(scenario())


# -- frames that were tampered with


def test_a_changed_byte_anywhere_in_a_frame_closes_the_connection():
    async def scenario():
        length = len(FrameSealer(TOKEN).seal(Say(1)))
        for position in range(length):

            def flipped(sealer, position=position):
                frame = sealer.seal(Say(1))
                frame[position] ^= 1 << (position % 8)
                return frame

            received, reason = await send_raw(flipped, lambda sealer: sealer.seal(Say(2)))
            assert received == [], position
            assert reason

    run(scenario())


def test_a_replayed_frame_closes_the_connection():
    def twice(sealer):
        return sealer.seal(Say(1)) * 2

    received, reason = run(send_raw(twice))
    assert received == [1]
    assert "tag is wrong" in reason


def test_frames_in_another_order_close_the_connection():
    def swapped(sealer):
        first, second = sealer.seal(Say(1)), sealer.seal(Say(2))
        return second + first

    received, reason = run(send_raw(swapped))
    assert received == []
    assert "tag is wrong" in reason


def test_a_missing_frame_closes_the_connection():
    def gap(sealer):
        sealer.seal(Say(1))
        return sealer.seal(Say(2))

    received, reason = run(send_raw(gap))
    assert received == []
    assert "tag is wrong" in reason


def test_half_a_frame_is_never_delivered():
    received, reason = run(send_raw(lambda sealer: sealer.seal(Say(1)), lambda sealer: sealer.seal(Say(2))[:-1]))
    assert received == [1]
    assert reason == "closed by the peer"


def test_a_message_of_another_schema_closes_the_connection():
    received, reason = run(send_raw(lambda sealer: sealer.seal(Unknown(1))))
    assert received == []
    assert "does not understand" in reason


def test_text_that_is_no_text_closes_the_connection_and_is_no_fatal_error_of_the_loop(caplog):
    tag = msgspec.Raw(b"\x81\xa4type\xa2\xff\xfe")  # UnicodeDecodeError is none of msgspec's DecodeErrors
    received, reason = run(send_raw(lambda sealer: sealer.seal(tag)))
    assert received == []
    assert reason.startswith("a message this side does not understand: 'utf-8' codec can't decode")
    assert caplog.messages == []


def test_a_frame_above_the_limit_is_refused_before_memory_is_set_aside():
    received, reason = run(send_raw((2**32 - 1).to_bytes(4, "big") + bytes(16)))
    assert received == []
    assert "4294967295 bytes is above the limit" in reason


def test_a_message_above_the_limit_is_the_senders_error_and_the_connection_goes_on():
    async def scenario():
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=echo)
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Message, max_frame_bytes=1000)
        with pytest.raises(ValueError, match="above the frame limit of 1000 bytes"):
            await connection.send(Say(1, bytes(1000)))
        await connection.send(Say(2))
        assert await connection.receive() == Say(2)
        await server.close()

    run(scenario())


def test_any_split_of_the_stream_gives_the_same_messages():
    rng = random.Random(5)
    sealer = FrameSealer(TOKEN)
    sizes = [0, 10, 70_000, 3, 200_000, 65_516, 1]
    stream = b"".join(bytes(sealer.seal(Say(i, bytes(size)))) for i, size in enumerate(sizes))
    for _ in range(20):
        reader = FrameReader(max_frame_bytes=2**20)
        reader.use_key(TOKEN)
        numbers, position = [], 0
        while position < len(stream):
            space = reader.writable()
            chunk = stream[position : position + min(len(space), rng.choice([1, 19, 20, 21, 1000, 65_536]))]
            space[: len(chunk)] = chunk
            reader.received(len(chunk))
            position += len(chunk)
            while (body := reader.next_body()) is not None:
                numbers.append(msgspec.msgpack.decode(body, type=Say))
        assert [(m.number, len(m.body)) for m in numbers] == list(enumerate(sizes))


def test_random_bytes_never_pass_as_a_frame():
    rng = random.Random(7)
    for _ in range(3000):
        reader = FrameReader(max_frame_bytes=1000)
        reader.use_key(TOKEN)
        garbage = bytearray(rng.randbytes(rng.randrange(HEADER_BYTES, 300)))
        if rng.random() < 0.7:  # a length that fits, so that the tag decides
            garbage[:4] = rng.randrange(len(garbage) - HEADER_BYTES + 1).to_bytes(4, "big")
        space = reader.writable()
        space[: len(garbage)] = garbage
        reader.received(len(garbage))
        try:
            assert reader.next_body() is None
        except Violation:
            continue
        assert int.from_bytes(garbage[:4], "big") + HEADER_BYTES > len(garbage)


# -- the blocking face


@pytest.mark.parametrize("token", [TOKEN, OTHER_TOKEN])
def test_a_thread_speaks_with_an_event_loop(token):
    def talk(address):
        host, port = address.removeprefix("tcp://").split(":")
        with closing(BlockingConnection(socket.create_connection((host, int(port))), decode=Message)) as connection:
            peer = connection.open(token, hello=HELLO, client=True, deadline=time.monotonic() + 5)
            connection.send(Say(7, bytes(3_000_000)))
            return peer, connection.receive()

    async def scenario():
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=echo)
        try:
            return await asyncio.to_thread(talk, server.address)
        finally:
            await server.close()

    if token == TOKEN:
        assert run(scenario()) == (Hello(name="controller", role="controller"), Say(7, bytes(3_000_000)))
    else:
        with pytest.raises(WrongTag):
            run(scenario())


def test_the_two_ends_of_a_socket_pair_need_no_token():
    async def scenario():
        ours, theirs = socket.socketpair()
        connection = await adopt(ours, decode=Message, name="child")
        with closing(BlockingConnection(theirs, decode=Message)) as child:
            await connection.send(Say(1, bytes(300_000)))
            await asyncio.to_thread(lambda: child.send(child.receive()))
            assert await connection.receive() == Say(1, bytes(300_000))
        with pytest.raises(ConnectionClosed):
            await connection.receive()

    run(scenario())


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (bytes(FrameSealer(None).seal(Say(1)))[:-1], ConnectionClosed, "closed"),
        (b"", ConnectionClosed, "closed"),
        (bytes(FrameSealer(None).seal(Unknown(1))), Violation, "does not understand"),
        (bytes(FrameSealer(None).seal(msgspec.Raw(b"\x81\xa4type\xa2\xff\xfe"))), Violation, "'utf-8' codec can't"),
        ((2**32 - 1).to_bytes(4, "big") + bytes(16), Violation, "4294967295 bytes is above the limit of 1000"),
    ],
    ids=["half a frame", "nothing", "schema", "text", "size"],
)
def test_a_thread_gets_one_error_for_all_that_is_no_message(data, error, said):
    ours, theirs = socket.socketpair()
    with theirs, closing(BlockingConnection(ours, decode=Message, max_frame_bytes=1000)) as connection:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(error, match=said):
            connection.receive()


def test_a_changed_or_replayed_frame_is_refused_by_a_thread_too():
    for attack in (lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]), lambda frame: frame * 2):
        ours, theirs = socket.socketpair()
        with theirs, closing(BlockingConnection(ours, decode=Message)) as connection:
            opening = make_preamble()
            theirs.sendall(opening)

            def answer(theirs=theirs, opening=opening, attack=attack):
                reply = theirs.recv(PREAMBLE_BYTES, socket.MSG_WAITALL)
                sealer = FrameSealer(session_keys(TOKEN, ours=opening, theirs=reply, client=True).send)
                theirs.sendall(sealer.seal(HELLO) + attack(bytes(sealer.seal(Say(1)))))

            with ThreadPoolExecutor(1) as pool:
                answered = pool.submit(answer)
                assert connection.open(TOKEN, hello=HELLO, client=False, deadline=time.monotonic() + 5) == HELLO
                answered.result()
            with pytest.raises(WrongTag):
                assert connection.receive() == Say(1)
                connection.receive()


# -- addresses


def test_a_busy_port_is_named():
    async def scenario():
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=echo)
        port = server.address.rpartition(":")[2]
        with pytest.raises(UserError, match=rf"port {port} on 127\.0\.0\.1 is in use.*port 0"):
            await serve(server.address, token=TOKEN, decode=Message, on_connect=echo)
        await server.close()

    run(scenario())


def test_other_machines_are_let_in_only_when_asked_for():
    async def scenario():
        with pytest.raises(UserError, match="allow_remote"):
            await serve("tcp://0.0.0.0:0", token=TOKEN, decode=Message, on_connect=echo)
        server = await serve("tcp://0.0.0.0:0", token=TOKEN, decode=Message, on_connect=echo, allow_remote=True)
        await server.close()

    run(scenario())


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:80",
        "tcp://127.0.0.1",
        "tcp://:80",
        "tcp://h:99999",
        "http://h:80",
        "unix:///run/control.sock",
    ],
)
def test_an_address_that_cannot_be_meant_is_explained(address):
    with pytest.raises(UserError, match="address"):
        run(serve(address, token=TOKEN, decode=Message, on_connect=echo))


def test_an_address_nobody_listens_on_is_worth_another_attempt():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(ConnectionClosed, match="cannot connect"):
            run(connect(f"tcp://127.0.0.1:{port}", token=TOKEN, hello=HELLO, decode=Message))


def test_a_token_of_another_size_is_refused():
    with pytest.raises(ValueError, match="32 bytes, this one has 5"):
        run(serve(LOOPBACK, token=b"short", decode=Message, on_connect=echo))


@pytest.mark.parametrize("name", ["", "../etc", "a b", "x" * 129, "a\n"])
def test_a_peer_name_that_is_unsafe_in_a_path_is_refused(name):
    async def scenario():
        collector = Collector()
        server = await serve(LOOPBACK, token=TOKEN, decode=Message, on_connect=collector)
        hello = Hello(name=name, role="rollout")
        connection = await connect(server.address, token=TOKEN, hello=hello, decode=Message)
        await connection.closed.wait()
        assert collector.connections == []
        await server.close()

    run(scenario())


@pytest.mark.parametrize("length", [1, 32, 64])
def test_tags_are_hmac_sha256(length):
    key, parts = bytes(range(length)), (b"counted", b"", bytes(1000))
    assert frames._Tags(key).digest(*parts) == hmac.digest(key, b"".join(parts), "sha256")

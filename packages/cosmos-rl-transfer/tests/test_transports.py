import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from transfer_samples import sync, weights_at

from cosmos_rl_core.hardware_log import log_choice
from cosmos_rl_core.wire.frames import HEADER_BYTES
from cosmos_rl_core.wire.handshake import PREAMBLE_BYTES, make_preamble
from cosmos_rl_transfer.errors import AuthenticationError, PeerLost, TransferError
from cosmos_rl_transfer.publish.publisher import Publisher
from cosmos_rl_transfer.testing.conformance import (
    CHECKS,
    Ends,
    a_bucket_stays_until_it_is_given_back,
    slots_arrive_whole,
)
from cosmos_rl_transfer.transports.base import ByteRun, TransportUnavailable
from cosmos_rl_transfer.transports.select import attach, open_outlet, preference
from cosmos_rl_transfer.transports.shm import SharedMemory
from cosmos_rl_transfer.transports.tcp import Tcp
from cosmos_rl_transfer.wire.link import Link
from cosmos_rl_transfer.wire.messages import Data, TransferWelcome


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("transport", [SharedMemory, Tcp])
def test_conformance(transport, check):
    check(Ends.of(transport))


class WrongPlace(Tcp):
    """Sends every bucket shifted by one byte."""

    def open(self, *, bucket_bytes, num_slots):
        outlet = super().open(bucket_bytes=bucket_bytes, num_slots=num_slots)
        send = outlet.send
        outlet.send = lambda link, runs, *, num_bytes: send(
            link, [ByteRun(np.roll(run.data, 1), run.at) for run in runs], num_bytes=num_bytes
        )
        return outlet


class OneSlot(SharedMemory):
    """Packs every bucket into the same slot."""

    def open(self, *, bucket_bytes, num_slots):
        outlet = super().open(bucket_bytes=bucket_bytes, num_slots=num_slots)
        outlet.slots = [outlet.slots[0]] * num_slots
        return outlet


@pytest.mark.parametrize(
    ("broken", "check"), [(WrongPlace, slots_arrive_whole), (OneSlot, a_bucket_stays_until_it_is_given_back)]
)
def test_the_suite_finds_a_broken_transport(broken, check):
    with pytest.raises(AssertionError):
        check(Ends.of(broken))


def announced(num_bytes, *, slot=0, runs=()):
    return Data(bucket=0, num_bytes=num_bytes, hash=0, sums=(), slot=slot, runs=runs)


@pytest.fixture
def ends():
    """Two links, not authenticated."""
    near, far = socket.socketpair()
    links = Link(near, timeout_s=2, side="subscriber"), Link(far, timeout_s=2, side="publisher")
    yield links
    for link in links:
        link.close()


def reached(transport, link, offered, offer):
    source = TransferWelcome(b"", rank=0, wire_dtype=None, bucket_bytes=10, transport=offered, offer=dict(offer))
    name, inlet = attach(transport, link, source=source, memory=[])
    inlet.close()
    return name


def test_auto_offers_the_fastest_that_can_be_opened_and_says_so_in_one_line(capsys):
    log_choice.cache_clear()
    name, outlet = open_outlet("auto", bucket_bytes=10, num_slots=1)
    outlet.close()
    assert name == preference()[0] == "shm"  # of a machine without InfiniBand
    assert capsys.readouterr().err == "weights are offered over shm\n"


def test_auto_reads_what_is_offered(ends):
    name, outlet = open_outlet("auto", bucket_bytes=10, num_slots=1)
    assert reached("auto", ends[0], name, outlet.offer) == name
    outlet.close()


def test_auto_falls_back_to_the_link_and_says_why(ends, capsys):
    log_choice.cache_clear()
    assert reached("auto", ends[0], "shm", {"slots": "/proc/1/fd/none", "nonce": "00"}) == "tcp"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("weights are read over tcp (not over shm: the publisher's memory cannot be opened:")


@pytest.mark.parametrize("offered", ["carrier pigeon", "os:system"])
def test_auto_loads_nothing_that_is_not_installed_here(ends, offered):
    assert reached("auto", ends[0], offered, {}) == "tcp"


def test_another_transport_than_the_publishers_is_refused_with_what_it_offers(ends):
    with pytest.raises(TransportUnavailable, match="the publisher offers nixl and tcp; name the same on both sides"):
        reached("shm", ends[0], "nixl", {})
    assert reached("tcp", ends[0], "nixl", {}) == "tcp"


def test_an_unknown_transport_lists_the_known_ones():
    with pytest.raises(
        ValueError, match=r"'carrier pigeon'.*known: auto, collective, cuda_ipc, nixl, nixl_vram, shm, tcp"
    ):
        open_outlet("carrier pigeon", bucket_bytes=10, num_slots=1)


class Homing(Tcp):
    """A transport of somebody else's."""

    name = "homing"


def test_a_transport_of_ones_own_is_taken_as_it_is(ends):
    name, outlet = open_outlet(Homing(), bucket_bytes=10, num_slots=1)
    assert (name, reached(Homing(), ends[0], name, outlet.offer)) == ("homing", "homing")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda offer: {**offer, "nonce": "00" * 16}, "is not the one it offered"),
        (lambda offer: {**offer, "slots": "/proc/self/exe"}, "is not the one it offered"),
        (lambda offer: {**offer, "slots": "/nowhere"}, "cannot be opened"),
        (lambda offer: {}, "not in shared memory"),
    ],
)
def test_shared_memory_refuses_what_is_not_the_publishers_and_says_why(ends, change, reason):
    outlet = SharedMemory().open(bucket_bytes=100, num_slots=1)
    with pytest.raises(TransportUnavailable, match=reason):
        SharedMemory().attach(ends[0], offer=change(outlet.offer), memory=[])
    outlet.close()


@pytest.mark.parametrize("data", [announced(101, slot=0), announced(100, slot=1), announced(1, slot=-1)])
def test_a_slot_that_is_not_shared_is_an_error(ends, data):
    outlet = SharedMemory().open(bucket_bytes=100, num_slots=1)
    inlet = SharedMemory().attach(ends[0], offer=outlet.offer, memory=[])
    with pytest.raises(TransferError, match="which is not shared"):
        inlet.receive(data, out=None)
    outlet.close()


def test_a_mapped_slot_cannot_be_written(ends):
    outlet = SharedMemory().open(bucket_bytes=100, num_slots=1)
    inlet = SharedMemory().attach(ends[0], offer=outlet.offer, memory=[])
    with pytest.raises(ValueError, match="read-only"):
        inlet.receive(announced(100, slot=0), out=None)[0] = 1
    outlet.close()


def test_more_runs_than_one_system_call_takes_arrive_in_order(ends):
    near, far = ends
    runs = [ByteRun(np.full(3, i % 251 + 1, np.uint8), 5 * i) for i in range(5000)]
    out = np.full(25_007, 0xEE, np.uint8)
    Tcp().open(bucket_bytes=1, num_slots=0).send(far, runs, num_bytes=out.nbytes)
    Tcp().attach(near, offer={}, memory=[]).receive(announced(out.nbytes), out=out)
    wanted = np.zeros_like(out)
    for run in runs:
        wanted[run.at : run.at + 3] = run.data
    assert np.array_equal(out, wanted)


@pytest.mark.parametrize("num_bytes", [0, 1, 5000, 300_000])
def test_a_head_leaves_with_its_bytes_and_messages_around_them_stay_whole(ends, num_bytes):
    near, far = ends
    sent = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    heads = [announced(num_bytes, slot=i) for i in range(3)]

    def send():
        for head in heads:
            far.send(head, with_next=True)
            far.send_parts([sent.data])
        far.send(announced(0, slot=9))

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        for head in heads:
            assert near.receive() == head
            out = np.zeros(num_bytes, np.uint8)
            near.receive_into(out.data)
            assert np.array_equal(out, sent)
        assert near.receive() == announced(0, slot=9)
        sending.result()


def test_a_message_that_waits_for_its_bytes_is_not_sent_alone(ends):
    near, far = ends
    near.set_deadlines(timeout_s=0.1, idle_s=0.1)
    far.send(announced(1), with_next=True)
    with pytest.raises(PeerLost, match="timed out"):
        near.receive()


def test_a_hang_up_is_seen_behind_bytes_that_nobody_has_read(ends):
    near, far = ends
    near.check()
    far.send_parts([memoryview(b"unread")])
    near.check()
    far.close()
    with pytest.raises(PeerLost, match="the publisher is gone: closed"):
        near.check()
    near.close()
    with pytest.raises(PeerLost):
        near.check()


@pytest.fixture
def publisher():
    made = Publisher(weights_at(0), token=b"secret", settings=sync(transport="tcp"))
    yield made
    asyncio.run(made.close())


def test_a_wrong_token_is_refused(publisher):
    with pytest.raises(AuthenticationError, match="the publisher has another token"):
        Link.connect(publisher.address, token=b"guess", timeout_s=5)


def test_a_publisher_that_dies_while_it_answers_is_lost_and_refused_nobody():
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(Link.connect, f"127.0.0.1:{listener.getsockname()[1]}", token=b"secret", timeout_s=5)
        dying, _ = listener.accept()
        dying.recv(PREAMBLE_BYTES, socket.MSG_WAITALL)
        dying.sendall(make_preamble())
        dying.recv(HEADER_BYTES, socket.MSG_WAITALL)  # the proof that follows is read
        dying.close()
        with pytest.raises(PeerLost, match="the publisher is gone"):
            connecting.result()


def test_a_stranger_gets_no_message_before_it_proves_the_token(publisher):
    host, _, port = publisher.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n" + b"x" * 100)
        received = b""
        try:
            while more := stranger.recv(4096):
                received += more
        except ConnectionResetError:
            pass
    assert len(received) == PREAMBLE_BYTES  # the protocol's name, its version and a nonce


def test_nobody_listening_is_a_lost_peer_with_the_address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(PeerLost, match=address):
        Link.connect(address, token=b"secret", timeout_s=5)


def test_silence_past_the_deadline_is_a_lost_peer():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(PeerLost, match="timed out"):
            Link.connect(address, token=b"secret", timeout_s=0.1)


def test_publishers_listen_on_loopback_only_unless_told(publisher):
    assert publisher.address.startswith("127.0.0.1:")

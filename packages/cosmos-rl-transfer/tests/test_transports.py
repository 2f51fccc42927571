import asyncio
import socket
from contextlib import contextmanager

import pytest

from cosmos_rl_transfer.arena import Arena
from cosmos_rl_transfer.errors import AuthenticationError, PeerLost
from cosmos_rl_transfer.link import Link
from cosmos_rl_transfer.publisher import Publisher
from cosmos_rl_transfer.testing import CHECKS, weights_at
from cosmos_rl_transfer.transports.base import TransportUnavailable
from cosmos_rl_transfer.transports.select import allocate, attach, candidates
from cosmos_rl_transfer.transports.shm import SharedMemory
from cosmos_rl_transfer.transports.tcp import Tcp


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("transport", [SharedMemory, Tcp])
def test_conformance(transport, check):
    check(transport())


@contextmanager
def loopback_link():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Link(ours, timeout_s=1, side="subscriber")


def test_auto_prefers_shared_memory_and_falls_back_to_tcp():
    assert [kind.name for kind in candidates("auto")] == ["shm", "tcp"]
    (segment,) = allocate("auto", num_bytes=10, count=1)
    assert "path" in segment.offer
    segment.close()
    with loopback_link() as link:
        reader = attach("auto", link, arena=Arena({}, 0), offers=({}, {}))
        assert type(reader) is type(Tcp().attach(link, arena=Arena({}, 0), offers=()))


def test_shared_memory_refuses_what_it_cannot_map_and_says_why():
    refused = pytest.raises(TransportUnavailable, match="shm: the publisher's slots are not in shared memory")
    with loopback_link() as link, refused:
        attach("shm", link, arena=Arena({}, 0), offers=({},))


def test_an_unknown_transport_lists_the_known_ones():
    with pytest.raises(ValueError, match='"carrier pigeon" is not known; choose one of auto, shm, tcp'):
        candidates("carrier pigeon")


@pytest.fixture
def publisher():
    made = Publisher(weights_at(0), token=b"secret", transport="tcp")
    yield made
    asyncio.run(made.close())


def test_a_wrong_token_is_refused(publisher):
    with pytest.raises(AuthenticationError, match="token"):
        Link.connect(publisher.address, token=b"guess", timeout_s=5)


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
    assert len(received) == 53  # the protocol's name and a nonce


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

"""Unauthenticated connections cost a listening socket no thread that is needed, no descriptor, and never the socket."""

import asyncio
import contextlib
import logging
import socket
import threading
import time

import msgspec
import pytest
from transfer_samples import TOKEN, blank, sync, weights_at

from cosmos_rl_core.wire.frames import FrameSealer
from cosmos_rl_core.wire.listening import GRACE_S
from cosmos_rl_transfer import PeerLost, Publisher, ReplicaSubscriber, Subscriber, TransferError
from cosmos_rl_transfer.wire.link import MAX_UNAUTHENTICATED, Link, Listener
from cosmos_rl_transfer.wire.messages import Register, TransferHello
from doubles.descriptors import descriptors_left

BROKEN_TEXT = b"\x82\xa4type\xa4Join\xa6target\xa2\xff\xfe"
"""msgpack whose text is no UTF-8: msgspec raises UnicodeDecodeError, which is none of its DecodeErrors."""


@contextlib.contextmanager
def listening(talk=Link.close):
    listener = Listener("127.0.0.1", token=TOKEN, name="test", talk=talk)
    try:
        yield listener
    finally:
        listener.close()
        listener.join()


def endpoint(address):
    host, _, port = address.rpartition(":")
    return host, int(port)


@contextlib.contextmanager
def idle_connections(address, count):
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            opened.enter_context(socket.create_connection(endpoint(address), timeout=10))
        yield


def knows_the_token(address):
    Link.connect(address, token=TOKEN, timeout_s=10).close()


def until(condition):
    give_up_at = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_a_listener_that_ran_out_of_descriptors_accepts_again_and_says_so_once(caplog):
    with listening() as listener:
        with descriptors_left(1), idle_connections(listener.address, 1):  # for this end of the connection
            until(lambda: caplog.messages)
            time.sleep(0.3)  # several more attempts
        knows_the_token(listener.address)
    assert caplog.messages == ["test: a connection cannot be accepted: Too many open files"]


def test_a_listener_that_could_not_start_a_thread_goes_on(caplog):
    with listening() as listener:
        usual = threading.stack_size(1 << 46)  # more than there are addresses: no thread can be started
        try:
            with pytest.raises(PeerLost):
                knows_the_token(listener.address)
        finally:
            threading.stack_size(usual)
        knows_the_token(listener.address)
    assert caplog.messages == ["test: a connection cannot be served: can't start new thread"]


def test_strangers_are_few_at_a_time_and_who_knows_the_token_is_served_beside_them(caplog):
    async def main():
        publisher = Publisher(weights_at(0), token=TOKEN, settings=sync(transport="tcp"))
        await publisher.publish(0, weights_at(0))
        before = threading.active_count()
        with idle_connections(publisher.address, MAX_UNAUTHENTICATED + 60):
            subscriber = Subscriber(
                publisher.address, blank(), token=TOKEN, settings=sync(transport="tcp", timeout_s=10)
            )
            assert await subscriber.stage(after=-1) == 0
            until(lambda: threading.active_count() - before < MAX_UNAUTHENTICATED + 20)  # those that were closed end
            await subscriber.close()
        await publisher.close()

    asyncio.run(main())
    assert caplog.messages == ["weights: more than 64 idle connections: the oldest are closed"]


def test_many_who_know_the_token_may_come_at_once_and_authenticate_one_after_the_other(caplog):
    with listening() as listener, contextlib.ExitStack() as opened:
        connections = [socket.create_connection(endpoint(listener.address)) for _ in range(2 * MAX_UNAUTHENTICATED)]
        links = [Link(connection, timeout_s=10, side="subscriber") for connection in connections]
        for link in links:
            opened.callback(link.close)
        for link in links:
            time.sleep(2 * GRACE_S / MAX_UNAUTHENTICATED)  # the last of the first ones waits longer than a stranger may
            link.authenticate(TOKEN)
    assert caplog.messages == []


def test_a_handshake_has_one_deadline_however_often_a_byte_comes():
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def trickle():
        while not stop.wait(0.05):
            theirs.send(b"c")

    sending = threading.Thread(target=trickle)
    sending.start()
    started = time.monotonic()
    try:
        with pytest.raises(PeerLost, match="timed out"):
            Link(ours, timeout_s=0.3, side="publisher").authenticate(TOKEN)
        assert time.monotonic() - started < 1.5
    finally:
        stop.set()
        sending.join()
        ours.close()
        theirs.close()


def test_a_stranger_who_says_nothing_does_not_keep_the_ranks_of_a_replica_away():
    async def main():
        replica = ReplicaSubscriber("127.0.0.1:1", token=TOKEN, num_ranks=1)
        with idle_connections(replica.address, 1):
            link = Link.connect(replica.address, token=TOKEN, timeout_s=2)
            link.send(Register(0))
            await asyncio.to_thread(replica._wait_for_members)
            link.close()
        await replica.close()

    asyncio.run(main())


def test_text_that_is_none_is_a_clear_error_and_ends_the_connection(caplog):
    caplog.set_level(logging.INFO)

    def talk(link):
        while True:
            link.receive()

    with listening(talk) as listener:
        link = Link.connect(listener.address, token=TOKEN, timeout_s=5)
        link.send(TransferHello(1))
        link.send(msgspec.Raw(BROKEN_TEXT))
        with pytest.raises(PeerLost):
            link.receive()
        link.close()
    assert "a message this side does not understand" in caplog.messages[-1]


def test_a_reply_whose_text_is_none_is_a_transfer_error():
    ours, theirs = socket.socketpair()
    link = Link(ours, timeout_s=1, side="subscriber")
    body = msgspec.msgpack.encode({"type": "Refused", "reason": "xx"}).replace(b"xx", b"\xff\xfe")
    theirs.send(FrameSealer(None).seal(msgspec.Raw(body)))
    with pytest.raises(TransferError, match="does not understand"):
        link.receive()
    link.close()
    theirs.close()

"""Bounded unauthenticated, seldom complaints and an accept() that may fail, on the event loop."""

import asyncio
import contextlib
import resource
import socket
import time

from cosmos_rl_core.wire.listening import (
    GRACE_S,
    SeldomLog,
    UnauthenticatedConnections,
    accept_forever,
    descriptor_shortage,
    raise_descriptor_limit,
)
from doubles.descriptors import descriptors_left


def test_the_same_complaint_is_passed_on_once_a_minute_and_counted_meanwhile():
    said, now = [], [0.0]
    complain = SeldomLog(said.append, every_s=60, clock=lambda: now[0])
    for _ in range(4):
        complain("no descriptors")
    complain("no memory")
    now[0] = 59.9
    complain("no descriptors")
    now[0] = 60.0
    complain("no descriptors")
    assert said == ["no descriptors", "no memory", "no descriptors (4 times more since it was last reported)"]


def test_a_newcomer_waits_for_room_and_then_takes_the_place_of_the_oldest():
    async def main():
        said, dropped = [], []
        unauthenticated = UnauthenticatedConnections(2, complain=said.append, grace_s=0.05)
        for name in ("first", "second"):
            await unauthenticated.make_room()
            unauthenticated.enter(name, drop=lambda name=name: dropped.append(name))
        waiting = asyncio.create_task(unauthenticated.make_room())
        await asyncio.sleep(0)
        unauthenticated.leave("second")
        await waiting
        assert dropped == []
        unauthenticated.enter("third", drop=lambda: dropped.append("third"))
        await unauthenticated.make_room()
        assert dropped == ["first"] and "first" not in unauthenticated and len(unauthenticated) == 1
        assert said == ["more than 2 idle connections: the oldest are closed"]

    asyncio.run(main())


def test_nothing_is_closed_while_others_authenticate():
    async def main():
        dropped = []
        unauthenticated = UnauthenticatedConnections(2, complain=print, grace_s=0.1)
        unauthenticated.enter("slow", drop=lambda: dropped.append("slow"))
        for name in range(8):
            unauthenticated.enter(name, drop=lambda name=name: dropped.append(name))
            waiting = asyncio.create_task(unauthenticated.make_room())
            await asyncio.sleep(0.03)
            unauthenticated.authenticate(name)
            await waiting
        assert dropped == []
        unauthenticated.enter("idle", drop=lambda: dropped.append("idle"))
        await unauthenticated.make_room()
        assert dropped == ["slow"]

    asyncio.run(main())


def test_nothing_is_closed_for_the_time_in_which_the_process_did_not_run():
    async def main():
        loop, dropped = asyncio.get_running_loop(), []
        unauthenticated = UnauthenticatedConnections(1, complain=print)
        unauthenticated.enter("slow", drop=lambda: dropped.append("slow"))
        waiting = asyncio.create_task(unauthenticated.make_room())
        await asyncio.sleep(0)
        time.sleep(2 * GRACE_S)  # stopped, with the bytes of the handshake in the socket
        loop.call_later(0.01, unauthenticated.authenticate, "slow")
        await waiting
        assert dropped == []

    asyncio.run(main())


def test_a_loop_that_ran_out_of_descriptors_accepts_again():
    async def main():
        said, admitted, came = [], [], asyncio.Event()

        async def admit(connection):
            admitted.append(connection)
            came.set()

        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            accepting = asyncio.create_task(accept_forever(listener, admit, complain=said.append))
            with contextlib.ExitStack() as opened:
                with descriptors_left(1):
                    opened.enter_context(socket.create_connection(listener.getsockname()))
                    while len(said) < 2:
                        await asyncio.sleep(0.01)
                    assert not admitted
                await asyncio.wait_for(came.wait(), 5)
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            for connection in admitted:
                connection.close()
        assert set(said) == {"a connection cannot be accepted: Too many open files"}

    asyncio.run(main())


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        assert raise_descriptor_limit() == hard == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_few_open_files_for_the_replicas_are_reported_with_the_limit():
    assert descriptor_shortage(4096, allowed=20000) == ""
    assert "4096 replicas take up to 8704 open files" in descriptor_shortage(4096, allowed=8703)

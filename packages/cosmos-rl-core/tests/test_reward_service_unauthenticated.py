"""Connections to the reward server that ask for nothing, in numbers: everybody else is served beside them."""

import asyncio
import contextlib
import logging
import socket
import time

import httpx

from cosmos_rl_core.wire.http_server import HttpServer
from cosmos_rl_core.wire.listening import SeldomFilter
from doubles.descriptors import descriptors_left


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


@contextlib.asynccontextmanager
async def serving(**bounds):
    """Yield the server, its address and what it complained of."""
    said = []
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        server = HttpServer(hello, **{"most_idle": 1000, "grace_s": 5, **bounds}, log=said.append)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield server, listener.getsockname(), said
        server.should_exit = True
        await running


async def ask(address):
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        return (await client.get(f"http://{address[0]}:{address[1]}/")).text


@contextlib.contextmanager
def idle_connections(address, count):
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(socket.create_connection(address)) for _ in range(count)]


def test_idle_connections_are_few_at_a_time_and_requests_are_answered_beside_them():
    async def main():
        async with serving(most_idle=20) as (server, address, said):
            with idle_connections(address, 60):
                assert await ask(address) == "hi"
                assert len(server.server_state.connections) <= 21
            assert said == ["more than 20 idle connections: the oldest are closed"]

    asyncio.run(main())


def test_a_server_without_descriptors_says_so_once_and_answers_again(caplog):
    async def main():
        async with serving() as (_, address, said):
            with descriptors_left(1), idle_connections(address, 1):
                await asyncio.sleep(0.3)
            assert await ask(address) == "hi"
            assert said == ["a connection cannot be accepted: Too many open files"]

    asyncio.run(main())
    assert caplog.messages == []


def test_a_connection_without_a_request_is_closed_and_one_that_asks_slowly_too():
    async def main():
        async with serving(head_s=0.3) as (_, address, _):
            started = time.monotonic()
            for first in (b"", b"GET / HT"):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(first)
                assert await asyncio.wait_for(reader.read(), 5) == b""
                writer.close()
            assert time.monotonic() - started < 3

    asyncio.run(main())


def test_a_message_of_a_logger_comes_once_a_minute(caplog):
    logger = logging.getLogger("cosmos.test.seldom")
    logger.addFilter(SeldomFilter())
    for _ in range(3):
        logger.warning("Invalid HTTP request received.")
    assert caplog.messages == ["Invalid HTTP request received."]

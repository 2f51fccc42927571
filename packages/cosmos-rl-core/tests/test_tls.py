"""TLS between processes of a run: what it encrypts, and how a connection with the wrong certificate fails."""

import asyncio
import logging
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire.blocking import BlockingConnection
from cosmos_rl_core.wire.certificates import make_bundles
from cosmos_rl_core.wire.channel import ConnectionClosed, Hello, connect, serve
from cosmos_rl_core.wire.handshake import TlsRefused
from cosmos_rl_core.wire.tls import TLS_VARIABLE, WORKER, Tls, environment_tls, read_tls

TOKEN = bytes(range(32))
HELLO = Hello(name="rollout-0", role="rollout")
SECRET = b"do not read this " * 8
CONTROLLER, WORKERS = make_bundles(valid_days=1)
STRANGERS = make_bundles(valid_days=1)
EXPIRED = make_bundles(valid_days=-1)


class Note(msgspec.Struct, tag=True):
    data: bytes


async def echo(connection):
    while True:
        await connection.send(await connection.receive())


async def one_exchange(*, server, client, data=SECRET, through=None):
    """Send one message and return the reply. through: a function that makes a proxy of the server's address."""
    serving = await serve("tcp://127.0.0.1:0", token=TOKEN, decode=Note, on_connect=echo, tls=server)
    address = serving.address if through is None else through(serving.address)
    try:
        connection = await connect(address, token=TOKEN, hello=HELLO, decode=Note, tls=client, timeout_s=20)
        await connection.send(Note(data))
        reply = await connection.receive()
        connection.close()
        return reply.data
    finally:
        await serving.close()


class Recorder:
    """Passes one connection on and keeps its bytes."""

    def __init__(self, address):
        self.seen = []
        self._host, self._port = address.removeprefix("tcp://").split(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        with self._listener:
            near, _ = self._listener.accept()
        far = socket.create_connection((self._host, int(self._port)))
        with near, far, ThreadPoolExecutor(2) as pool:
            pool.submit(self._pass, near, far)
            pool.submit(self._pass, far, near)

    def _pass(self, source, target):
        while data := source.recv(65536):
            self.seen.append(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("encrypted", [True, False])
def test_with_tls_nothing_of_a_message_is_readable_on_the_way(encrypted):
    recorders = []

    def through(address):
        recorders.append(Recorder(address))
        return recorders[0].address

    both = {"server": CONTROLLER, "client": WORKERS} if encrypted else {"server": None, "client": None}
    assert asyncio.run(one_exchange(**both, through=through)) == SECRET
    seen = b"".join(recorders[0].seen)
    assert (SECRET[:16] in seen, b"rollout-0" in seen) == (not encrypted, not encrypted)


def test_large_messages_arrive_whole():
    data = os.urandom(5_000_001)
    assert asyncio.run(one_exchange(server=CONTROLLER, client=WORKERS, data=data)) == data


WRONG = {
    "the client has no certificate": (CONTROLLER, None, "the run uses TLS", "the peer does not use TLS"),
    "the run has no TLS": (None, WORKERS, "the run does not use TLS", "the peer uses TLS, and this run does not"),
    "the client is of another run": (
        CONTROLLER,
        Tls(
            STRANGERS[1].bundle.rpartition("-----BEGIN")[0] + "-----BEGIN" + WORKERS.bundle.rpartition("-----BEGIN")[2]
        ),
        "it is of another run",
        "the peer's certificate is of another run",
    ),
    "both are of other runs": (
        CONTROLLER,
        STRANGERS[1],
        "the peer's certificate is of another run",
        "the peer does not accept the certificate of this side",
    ),
    "the controller's certificate has expired": (
        EXPIRED[0],
        EXPIRED[1],
        "the peer's certificate has expired",
        "expired",
    ),
    "a worker answers instead of the controller": (WORKERS, WORKERS, "the controller is required", ""),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_certificate_is_explained_on_both_sides(case, caplog):
    server, client, to_client, to_server = WRONG[case]
    with caplog.at_level(logging.WARNING), pytest.raises(UserError, match=to_client):
        asyncio.run(one_exchange(server=server, client=client))
    assert to_server in caplog.text


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_certificate_on_a_blocking_connection(case):
    server, client, to_client, to_server = WRONG[case]
    near, far = socket.socketpair()
    deadline = time.monotonic() + 20

    def opened(end, tls, is_client):
        connection = BlockingConnection(end, decode=Note)
        try:
            connection.open(TOKEN, hello=HELLO, client=is_client, deadline=deadline, tls=tls)
        finally:
            connection.close()

    with ThreadPoolExecutor(2) as pool:
        serving = pool.submit(opened, far, server, False)
        with pytest.raises(TlsRefused, match=to_client):
            pool.submit(opened, near, client, True).result()
        if to_server:
            with pytest.raises((TlsRefused, ConnectionClosed), match=f"{to_server}|closed|reset|pipe"):
                serving.result()


def test_the_server_still_serves_after_strangers():
    """A wrong client, one of another protocol and one that says nothing leave the others unharmed."""

    async def main():
        server = await serve("tcp://127.0.0.1:0", token=TOKEN, decode=Note, on_connect=echo, tls=CONTROLLER)
        host, port = server.address.removeprefix("tcp://").split(":")
        silent = await asyncio.open_connection(host, int(port))
        other = await asyncio.open_connection(host, int(port))
        other[1].write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(other[0].read(), 20)  # the server has closed it
        with pytest.raises(UserError):
            await connect(server.address, token=TOKEN, hello=HELLO, decode=Note, tls=STRANGERS[1])
        connection = await connect(server.address, token=TOKEN, hello=HELLO, decode=Note, tls=WORKERS)
        await connection.send(Note(SECRET))
        assert (await connection.receive()).data == SECRET
        for _, writer in (silent, other):
            writer.close()
        await server.close()

    asyncio.run(main())


def test_the_token_is_required_inside_tls():
    async def main():
        server = await serve("tcp://127.0.0.1:0", token=TOKEN, decode=Note, on_connect=echo, tls=CONTROLLER)
        try:
            with pytest.raises(UserError, match="does not have this run's token"):
                await connect(server.address, token=bytes(32), hello=HELLO, decode=Note, tls=WORKERS)
        finally:
            await server.close()

    asyncio.run(main())


def test_two_threads_send_and_receive_over_one_encrypted_connection():
    """Sent and received at once, in both directions: 16 MiB each, in messages of many sizes."""
    near, far = socket.socketpair()
    sizes = [1, 17, 16 * 1024, 300_000, 1_000_000] * 12
    deadline = time.monotonic() + 60

    def opened(end, tls, is_client):
        connection = BlockingConnection(end, decode=Note)
        connection.open(TOKEN, hello=HELLO, client=is_client, deadline=deadline, tls=tls, server=WORKER)
        end.settimeout(60)
        return connection

    with ThreadPoolExecutor(4) as pool:
        serving = pool.submit(opened, far, WORKERS, False)
        ends = [opened(near, WORKERS, True), serving.result()]

        def send(connection):
            for size in sizes:
                connection.send(Note(bytes([size % 251]) * size))

        def receive(connection):
            return [(len(note.data), set(note.data)) for note in (connection.receive() for _ in sizes)]

        sending = [pool.submit(send, end) for end in ends]
        received = [pool.submit(receive, end) for end in ends]
        for one in sending:
            one.result()
        assert [one.result() for one in received] == [[(size, {size % 251}) for size in sizes]] * 2
        for end in ends:
            end.close()


def test_a_bundle_is_read_from_a_file_and_from_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "tls.pem"
    path.write_text(WORKERS.bundle)
    path.chmod(0o600)
    assert read_tls(path) == WORKERS
    monkeypatch.setenv(TLS_VARIABLE, WORKERS.bundle)
    assert environment_tls() == WORKERS
    monkeypatch.delenv(TLS_VARIABLE)
    assert environment_tls() is None
    assert re.fullmatch("[0-9a-f]{64}", WORKERS.fingerprint) and WORKERS.fingerprint == CONTROLLER.fingerprint
    assert "PRIVATE" not in repr(WORKERS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "is not the file tls.pem of a run: it has 0 PEM blocks"),
        (EXPIRED[1].bundle, "has expired; stop the run and continue it with --resume auto"),
        (WORKERS.bundle.replace("M", "N"), "is not the file tls.pem of a run"),
    ],
    ids=["no bundle", "expired", "damaged"],
)
def test_an_unusable_bundle(text, message, tmp_path):
    path = tmp_path / "tls.pem"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UserError, match=message):
        read_tls(path)


def test_a_bundle_that_others_can_read(tmp_path):
    path = tmp_path / "tls.pem"
    path.write_text(WORKERS.bundle)
    path.chmod(0o644)
    with pytest.raises(UserError, match="others can read the certificate file"):
        read_tls(path)

"""The channels that benchmarks/wire.py compares: a server and a client for each, with the same requests."""

from __future__ import annotations

import asyncio
import hmac
import json
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
import numpy as np

from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup
from cosmos_rl_core.wire.certificates import make_bundles
from cosmos_rl_core.wire.channel import Connection, Hello, connect, serve
from cosmos_rl_core.wire.payload import decode_group, encode_group
from cosmos_rl_core.wire.tls import Tls

TOKEN = bytes(32)


class Heartbeat(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """About 110 bytes."""

    worker: str
    progress: int
    busy_s: float
    leases: list[int]


class Deliver(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A rollout group."""

    payload: memoryview


class Reply(msgspec.Struct, tag=True, frozen=True, array_like=True):
    number: int
    cpu_s: float
    """CPU time the server has used so far."""


class Channel(Protocol):
    """A client's connection."""

    async def beat(self, heartbeat: Heartbeat) -> Reply: ...

    async def deliver(self, group: RolloutGroup) -> Reply: ...

    def close(self) -> None: ...


async def serve_wire(tls: Tls | None = None) -> str:
    """Answer on the control channel and return its address."""

    async def answer(connection: Connection) -> None:
        while True:
            message = await connection.receive()
            match message:
                case Heartbeat():
                    number = message.progress
                case Deliver():
                    number = decode_group(message.payload).num_terms
            await connection.send(Reply(number, time.process_time()))

    accepted = Heartbeat | Deliver
    return (await serve("tcp://127.0.0.1:0", token=TOKEN, decode=accepted, on_connect=answer, tls=tls)).address


async def serve_tls() -> str:
    """Answer on the control channel over TLS; return its address and the workers' bundle, in one line."""
    controller, workers = make_bundles(valid_days=1)
    return f"{await serve_wire(controller)} {workers.bundle.encode().hex()}"


class WireChannel:
    """The control channel."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, address: str, index: int) -> WireChannel:
        hello = Hello(name=f"rollout-{index}", role="rollout")
        return cls(await connect(address, token=TOKEN, hello=hello, decode=Reply, timeout_s=30))

    async def beat(self, heartbeat: Heartbeat) -> Reply:
        await self._connection.send(heartbeat)
        return await self._connection.receive()

    async def deliver(self, group: RolloutGroup) -> Reply:
        await self._connection.send(Deliver(memoryview(encode_group(group))))
        return await self._connection.receive()

    def close(self) -> None:
        self._connection.close()


class TlsChannel(WireChannel):
    """The control channel over TLS."""

    @classmethod
    async def open(cls, address: str, index: int) -> TlsChannel:
        where, _, bundle = address.partition(" ")
        hello, tls = Hello(name=f"rollout-{index}", role="rollout"), Tls(bytes.fromhex(bundle).decode())
        return cls(await connect(where, token=TOKEN, hello=hello, decode=Reply, timeout_s=30, tls=tls))


async def serve_http() -> str:
    """Answer JSON over HTTP/1.1 with keep-alive and a bearer token, and return the address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head, body = await _read(reader)
                assert hmac.compare_digest(_header(head, b"authorization"), TOKEN.hex().encode())
                message = json.loads(body)
                number = message["progress"] if "progress" in message else _group(message).num_terms
                _write(writer, b"HTTP/1.1 200 OK", {"number": number, "cpu_s": time.process_time()})
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionResetError, asyncio.CancelledError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096, limit=2**20)
    return "{}:{}".format(*server.sockets[0].getsockname())


class HttpChannel:
    """JSON over HTTP/1.1."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: str, index: int) -> HttpChannel:
        host, port = address.split(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def beat(self, heartbeat: Heartbeat) -> Reply:
        return await self._post(msgspec.structs.asdict(heartbeat))

    async def deliver(self, group: RolloutGroup) -> Reply:
        return await self._post(_plain(group))

    async def _post(self, message: dict[str, Any]) -> Reply:
        _write(self._writer, b"POST /message HTTP/1.1\r\nhost: controller", message)
        await self._writer.drain()
        _, body = await _read(self._reader)
        return Reply(**json.loads(body))

    def close(self) -> None:
        self._writer.close()


async def serve_echo() -> str:
    """Read frames of known length without looking at them, answer with one float, and return the address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))
                writer.write(struct.pack("<d", time.process_time()))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionResetError, asyncio.CancelledError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096, limit=2**20)
    return "{}:{}".format(*server.sockets[0].getsockname())


class EchoChannel(HttpChannel):
    """The same bytes as the control channel's, on bare asyncio streams: no authentication, no decoding."""

    async def beat(self, heartbeat: Heartbeat) -> Reply:
        return await self._send(msgspec.msgpack.encode(heartbeat))

    async def deliver(self, group: RolloutGroup) -> Reply:
        return await self._send(encode_group(group))

    async def _send(self, message: bytes | bytearray) -> Reply:
        self._writer.write(len(message).to_bytes(4, "little") + message)
        await self._writer.drain()
        return Reply(0, *struct.unpack("<d", await self._reader.readexactly(8)))


SERVERS: dict[str, Callable[[], Awaitable[str]]] = {
    "wire": serve_wire,
    "tls": serve_tls,
    "http": serve_http,
    "echo": serve_echo,
}
CHANNELS: dict[str, Any] = {"wire": WireChannel, "tls": TlsChannel, "http": HttpChannel, "echo": EchoChannel}


def _write(writer: asyncio.StreamWriter, head: bytes, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    headers = (head, b"authorization: " + TOKEN.hex().encode(), b"content-length: %d" % len(body), b"", body)
    writer.write(b"\r\n".join(headers))


async def _read(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    return head, await reader.readexactly(int(_header(head, b"content-length")))


def _header(head: bytes, name: bytes) -> bytes:
    return head.partition(b"\r\n" + name + b": ")[2].partition(b"\r\n")[0]


def _plain(group: RolloutGroup) -> dict[str, Any]:
    """The group as JSON: lists of numbers."""
    return {
        "sample": group.prompt.sample_id,
        "rollouts": [
            {
                "tokens": rollout.arrays["tokens"].tolist(),
                "logprobs": rollout.rollout_logprobs.tolist(),
                "versions": rollout.versions.tolist(),
                "loss_mask": rollout.loss_mask.tolist(),
                "reward": rollout.reward,
            }
            for rollout in group.rollouts
        ],
    }


def _group(message: dict[str, Any]) -> RolloutGroup:
    rollouts = tuple(
        Rollout(
            arrays={"tokens": np.array(one["tokens"], np.int32)},
            rollout_logprobs=np.array(one["logprobs"], np.float32),
            versions=np.array(one["versions"], np.int32),
            loss_mask=np.array(one["loss_mask"], bool),
            reward=one["reward"],
        )
        for one in message["rollouts"]
    )
    return RolloutGroup(prompt=Prompt(sample_id=message["sample"], row={}), rollouts=rollouts)

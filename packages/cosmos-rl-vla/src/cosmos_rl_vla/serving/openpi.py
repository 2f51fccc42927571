"""The websocket protocol of openpi's client: `openpi_client.websocket_client_policy.WebsocketClientPolicy`.

    server -> robot   metadata                                   once, when the connection opens
    robot -> server   observation                                a map, see `observations`
    server -> robot   {"actions": [H, D], "server_timing": ...}  or a text message, which the client raises as an error

Binary messages are msgpack. A numpy array is the map {b"__ndarray__": True, b"data": bytes in C order, b"dtype": "<f4",
b"shape": [...]}, a numpy scalar {b"__npgeneric__": True, b"data": number, b"dtype": "<f4"}. With a token the client
sends the header `Authorization: Api-Key TOKEN`. GET /healthz answers "OK", GET / the page of latencies.
"""

from __future__ import annotations

import asyncio
import hmac
import html
import math
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import msgspec
import numpy as np
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from cosmos_rl_vla.serving.batching import PassFailed, RobotBatcher
from cosmos_rl_vla.serving.observations import BadObservation
from cosmos_rl_vla.serving.served import ActionRequest

MAX_BYTES = 64 * 2**20
"""Of an observation: twenty uncompressed images of 1024 x 1024."""
_ARRAY, _SCALAR, _DATA, _DTYPE, _SHAPE = b"__ndarray__", b"__npgeneric__", b"data", b"dtype", b"shape"
_NUMBERS = "biuf"
"""Kinds of numpy's types that a message may have."""
_PAGE = "<!doctype html><meta http-equiv=refresh content=5><title>{name}</title><h1>{name}</h1><pre>{table}</pre>"


@asynccontextmanager
async def openpi_server(
    batcher: RobotBatcher, listener: socket.socket, *, token: str, say: Callable[[str], None]
) -> AsyncIterator[Server]:
    """Serve robots on a listening socket until the end of the context. An empty token is none."""
    robots = _Robots(batcher, token=token, say=say)
    options: dict[str, Any] = {"compression": None, "max_size": MAX_BYTES, "process_request": robots.on_request}
    async with serve(robots.serve, sock=listener, **options) as server:
        yield server


class _Robots:
    """The connections."""

    def __init__(self, batcher: RobotBatcher, *, token: str, say: Callable[[str], None]) -> None:
        self._batcher, self._token, self._say = batcher, token, say

    def on_request(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer a request for a page; None lets the websocket open."""
        if request.path == "/healthz":
            return connection.respond(HTTPStatus.OK, "OK\n")
        given = request.headers.get("Authorization", "")
        if self._token and not hmac.compare_digest(given.encode(), f"Api-Key {self._token}".encode()):
            return connection.respond(HTTPStatus.UNAUTHORIZED, "needs the header Authorization: Api-Key TOKEN\n")
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return None
        table = self._batcher.latencies.table()
        page = _PAGE.format(name=html.escape(self._batcher.policy.name), table=html.escape(table))
        response = connection.respond(HTTPStatus.OK, page)
        response.headers["Content-Type"] = "text/html; charset=utf-8"
        return response

    async def serve(self, connection: ServerConnection) -> None:
        """Answer one robot until it leaves."""
        robot = "{}:{}".format(*connection.remote_address[:2])
        seed, place, latencies = secrets.randbits(63), 0, self._batcher.latencies
        latencies.robots += 1
        self._say(f"{robot} connected")
        closed = asyncio.create_task(connection.wait_closed())
        try:
            await connection.send(packed(metadata(self._batcher)))
            async for message in connection:
                try:
                    request = self._request(message, seed=seed, place=place)
                    asked = asyncio.create_task(self._batcher.infer(request))
                    await asyncio.wait([asked, closed], return_when=asyncio.FIRST_COMPLETED)
                    if not asked.done():  # so that no pass is made for it
                        asked.cancel()
                        raise connection.protocol.close_exc
                    chunk = asked.result()
                except (BadObservation, PassFailed) as error:
                    self._batcher.refuse(robot, error)
                    await connection.send(str(error))
                else:
                    place += 1
                    timing = {"infer_ms": 1000 * chunk.infer_s, "wait_ms": 1000 * chunk.wait_s}
                    await connection.send(packed({"actions": chunk.actions, "server_timing": timing}))
        except ConnectionClosed as error:
            self._say(f"{robot} vanished: {error}")
        else:
            self._say(f"{robot} left after {place} chunks")
        finally:
            latencies.robots -= 1

    def _request(self, message: str | bytes, *, seed: int, place: int) -> ActionRequest:
        policy = self._batcher.policy
        return policy.admit(policy.layout.read(unpacked(message)), seed=seed, place=place)


def metadata(batcher: RobotBatcher) -> dict[str, Any]:
    """Return what the policy takes and gives, the first message to a client."""
    layout = batcher.policy.layout
    return {
        "name": batcher.policy.name,
        "cameras": list(layout.cameras),
        "state": list(layout.state_keys),
        "state_dim": layout.state_dim,
        "action_dim": layout.action_dim,
        "action_horizon": layout.horizon,
    }


def packed(message: Any) -> bytes:
    """Return a message as msgpack; numpy's arrays and scalars as in the module's description."""
    return msgspec.msgpack.encode(message, enc_hook=_as_map)


def unpacked(message: str | bytes) -> Any:
    """Return what a client sent. Raises BadObservation for another format."""
    if isinstance(message, str):
        raise BadObservation("a text message; observations are binary messages of msgpack")
    try:
        return _with_arrays(msgspec.msgpack.decode(message))
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:
        raise BadObservation(f"not msgpack with numpy arrays as openpi's client sends it: {error}") from error


def _as_map(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {_ARRAY: True, _DATA: value.tobytes(), _DTYPE: value.dtype.str, _SHAPE: list(value.shape)}
    raise TypeError(f"{type(value).__name__} in a message")


def _with_arrays(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_arrays(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY not in value and _SCALAR not in value:
        return {str(key): _with_arrays(each) for key, each in value.items()}
    dtype = np.dtype(value.get(_DTYPE))
    if dtype.kind not in _NUMBERS:
        raise ValueError(f"an array of {dtype}")
    if _SCALAR in value:
        return dtype.type(value.get(_DATA))
    data, shape = value.get(_DATA), value.get(_SHAPE)
    if not isinstance(data, bytes) or not isinstance(shape, list) or not all(isinstance(n, int) for n in shape):
        raise ValueError("an array without bytes or shape")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"an array of {shape} {dtype} in {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape)

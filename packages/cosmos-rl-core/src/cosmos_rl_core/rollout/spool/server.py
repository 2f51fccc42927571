"""A replica's spool for consumers that do not reach its files.

consumer                              replica
  Pull(path, offset)       ->
                           <-         Piece        bytes from there on
                           <-         Absent       no such file any more
"""

from __future__ import annotations

import asyncio

import msgspec

from cosmos_rl_core.rollout.spool.store import Spool
from cosmos_rl_core.wire.channel import Connection, Hello, Server, serve

PIECE_BYTES = 4 * 2**20
"""Most bytes of one answer."""


class Pull(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for the bytes of a file from `offset` on."""

    path: str
    offset: int


class Piece(msgspec.Struct, frozen=True, tag=True, array_like=True):
    data: memoryview
    """At least one byte, at most PIECE_BYTES."""


class Absent(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The file is not here, or has no byte at that place."""


Answer = Piece | Absent


async def serve_spool(spool: Spool, *, bind: str, token: bytes, name: str, allow_remote: bool) -> Server:
    """Listen on a free port of `bind` and answer whoever holds the run's token. Raises as `wire.serve`."""

    async def answer(connection: Connection) -> None:
        while True:
            pull: Pull = await connection.receive()
            data = await asyncio.to_thread(spool.read, pull.path, offset=max(0, pull.offset), num_bytes=PIECE_BYTES)
            await connection.send(Piece(memoryview(data)) if data else Absent())

    return await serve(
        f"tcp://{bind}:0",
        token=token,
        decode=Pull,
        on_connect=answer,
        hello=Hello(name=name, role="spool"),
        allow_remote=allow_remote,
    )

"""Serves a replica's spool to consumers that cannot read its files.

consumer                              replica
  Pull(path, offset)       ->
                           <-         Piece        bytes from offset on
                           <-         Absent       the file does not exist
"""

from __future__ import annotations

import asyncio

import msgspec

from cosmos_rl_core.rollout.spool.store import Spool
from cosmos_rl_core.wire.channel import Connection, Hello, Server, serve

PIECE_BYTES = 4 * 2**20
"""Maximum bytes of one reply."""


class Pull(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Request for the bytes of a file from `offset` on."""

    path: str
    offset: int


class Piece(msgspec.Struct, frozen=True, tag=True, array_like=True):
    data: memoryview
    """At least one byte, at most PIECE_BYTES."""


class Absent(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The file does not exist, or has no byte at this offset."""


Answer = Piece | Absent


async def serve_spool(spool: Spool, *, bind: str, token: bytes, name: str, allow_remote: bool) -> Server:
    """Listen on a free port of `bind` and serve clients that have the run's token. Raises like `wire.serve`."""

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

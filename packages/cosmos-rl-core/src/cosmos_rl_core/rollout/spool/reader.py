"""The policy's side of the spools: reads the bytes of a referenced group.

the file is readable here, with the right size and digest  -> mapped: pages are read from disk or shared by ranks
else                                                       -> pulled from the replica in pieces
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.rollout.spool.store import Absent, Answer, Pull, Spooled
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed, Hello, connect
from cosmos_rl_core.wire.tls import WORKER, Tls

RETRY_S = 0.5
"""Pause before another attempt to reach a replica."""


class PayloadGone(Exception):
    """A group cannot be read; the message is the reason."""


class SpoolReader:
    """Reads referenced groups.

    payload = await SpoolReader(token=token, name="policy-0", timeout_s=30).read(reference)
    """

    def __init__(self, *, token: bytes, name: str, timeout_s: float, tls: Tls | None = None) -> None:
        """timeout_s: maximum wait for the next piece from a replica, including attempts to connect."""
        self._token, self._tls = token, tls
        self._hello = Hello(name=name, role="policy")
        self._timeout_s = timeout_s

    async def read(self, reference: Spooled) -> memoryview:
        """Return the bytes, read-only, after a check of the digest. Raises PayloadGone."""
        mapped = await asyncio.to_thread(_map, reference)
        if mapped is not None:
            return mapped
        if not reference.address:
            raise PayloadGone(f"{reference.path} is not readable here, and the replica that wrote it is gone")
        data = await self._pull(reference)
        if not await asyncio.to_thread(_is_whole, data, reference):
            raise PayloadGone(f"{reference.path} is damaged: {reference.address} sent bytes with another digest")
        return data

    async def _pull(self, reference: Spooled) -> memoryview:
        """Pull the file in pieces; a broken connection is replaced."""
        pulled = _Pulled(memoryview(bytearray(reference.num_bytes)))
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + self._timeout_s
        while True:
            before = pulled.done
            try:
                async with asyncio.timeout_at(give_up_at) as deadline:
                    await self._pull_rest(reference, pulled, deadline)
                return pulled.data.toreadonly()
            except TimeoutError as error:
                silent = f"{reference.address} sent nothing for {self._timeout_s:g} s"
                raise PayloadGone(f"{reference.path} is not readable here, and {silent}") from error
            except (ConnectionClosed, UserError) as error:  # UserError: now another run uses that address
                give_up_at = clock() + self._timeout_s if pulled.done > before else give_up_at
                if clock() + RETRY_S >= give_up_at:
                    raise PayloadGone(f"{reference.path} is not readable here, and {error}") from error
            await asyncio.sleep(RETRY_S)

    async def _pull_rest(self, reference: Spooled, pulled: _Pulled, deadline: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        connection = await connect(
            reference.address,
            token=self._token,
            hello=self._hello,
            decode=Answer,
            timeout_s=self._timeout_s,
            tls=self._tls,
            server=WORKER,
        )
        try:
            while pulled.done < len(pulled.data):
                await self._pull_piece(connection, reference, pulled)
                deadline.reschedule(loop.time() + self._timeout_s)
        finally:
            connection.close()

    async def _pull_piece(self, connection: Connection, reference: Spooled, pulled: _Pulled) -> None:
        await connection.send(Pull(path=reference.path, offset=pulled.done))
        answer: Answer = await connection.receive()
        if isinstance(answer, Absent):
            raise PayloadGone(f"{reference.address} no longer has {reference.path}")
        pulled.add(answer.data)


class _Pulled:
    """A buffer and the number of bytes received."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.done = 0

    def add(self, piece: memoryview) -> None:
        """Append a piece. Raises PayloadGone for an empty or too large one."""
        end = self.done + len(piece)
        if not piece or end > len(self.data):
            raise PayloadGone(f"received {end} or more bytes of a file of {len(self.data)}")
        self.data[self.done : end] = piece
        self.done = end


def _map(reference: Spooled) -> memoryview | None:
    """Map the file; return None if it is not readable on this machine, or has another size or digest."""
    try:
        with open(reference.path, "rb") as file:
            if os.fstat(file.fileno()).st_size != reference.num_bytes:
                return None
            data = memoryview(mmap.mmap(file.fileno(), reference.num_bytes, access=mmap.ACCESS_READ))
    except OSError:
        return None
    return data if _is_whole(data, reference) else None


def _is_whole(data: memoryview, reference: Spooled) -> bool:
    return hashlib.sha256(data).digest() == reference.digest

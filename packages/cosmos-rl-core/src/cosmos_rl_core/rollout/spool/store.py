"""Storage of large groups at the replica that generated them: files that the policy maps, or pulls from the replica.

    <root>/rollout-0/12-1-9f86d081.group      sample 12, attempt 1; written atomically

    put -> the controller holds the reference -> every policy rank reads the file -> step committed -> release

`serve_spool` serves the files to consumers that cannot open them: Pull(path, offset) -> Piece, or Absent.

A file outlives its process: a killed replica loses no delivered group. Its successor keeps the files that the
controller still references and removes the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire.channel import ChannelServer, Connection, Hello, serve
from cosmos_rl_core.wire.tls import Tls

_PARTIAL = ".part"


class Spooled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reference to a group's bytes in a spool."""

    path: str
    """The file, on the replica's machine or on a shared file system."""
    num_bytes: int
    digest: bytes
    """[32]: SHA-256 of the bytes."""
    address: str = ""
    """Address at which the replica serves the file; empty if the replica is gone."""


class Spool:
    """The stored groups of one replica, with a limit on their size.

    spool = Spool(directory, threshold_bytes=2**20, capacity_bytes=2**34, step_groups=4, kept=welcome.kept)
    spool.room()                                      # groups that still fit: the limit for lease requests
    reference = await spool.put(payload, name="12-1")
    spool.release([reference.path])                   # when they are no longer needed
    """

    def __init__(
        self,
        directory: Path,
        *,
        threshold_bytes: int,
        capacity_bytes: int,
        step_groups: int,
        kept: Collection[str] = (),
    ) -> None:
        """Create or reopen the directory and remove all files except `kept`.

        threshold_bytes: groups of at least this size are stored. step_groups: number of groups of one step that this
        replica must be able to store, so that the step can be completed.
        """
        self._directory = directory
        self._threshold_bytes = threshold_bytes
        self._capacity_bytes = capacity_bytes
        self.step_groups = step_groups
        """Number of groups of one step that must fit."""
        self._sizes: dict[str, int] = {}
        self._largest = 0
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.iterdir():
            if str(path) in kept:
                self._add(path, path.stat().st_size)
            else:
                path.unlink()

    @property
    def num_bytes(self) -> int:
        """Total size of the stored groups."""
        return sum(self._sizes.values())

    def room(self) -> int:
        """Return the number of groups that still fit, assuming the largest size so far; unlimited before the first."""
        return max(0, self._capacity_bytes - self.num_bytes) // max(1, self._largest)

    async def put(self, payload: bytes, *, name: str) -> bytes | Spooled:
        """Write a group's bytes and return the reference; return the bytes of a small group unchanged.

        Raises UserError if a step's groups of this size can never fit, and OSError.
        """
        if len(payload) < self._threshold_bytes:
            return payload
        self._must_fit(len(payload))
        path = self._directory / f"{name}-{secrets.token_hex(4)}.group"
        writing = asyncio.create_task(asyncio.to_thread(_write, path, payload))
        try:
            digest = await asyncio.shield(writing)
        except asyncio.CancelledError:  # the thread continues; its file must be removed afterwards
            writing.add_done_callback(lambda _: path.unlink(missing_ok=True))
            raise
        self._add(path, len(payload))
        return Spooled(path=str(path), num_bytes=len(payload), digest=digest)

    def read(self, path: str, *, offset: int, num_bytes: int) -> bytes | None:
        """Return up to `num_bytes` bytes of a file from `offset` on, or None for an unknown file."""
        if path not in self._sizes:
            return None
        try:
            with open(path, "rb") as file:
                return os.pread(file.fileno(), num_bytes, offset)
        except FileNotFoundError:
            return None

    def release(self, paths: Iterable[str]) -> None:
        """Remove files; missing ones are ignored."""
        for path in paths:
            if self._sizes.pop(path, None) is not None:
                Path(path).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all stored groups."""
        self.release(list(self._sizes))
        with contextlib.suppress(OSError):  # not empty, or removed with the run
            self._directory.rmdir()

    def _add(self, path: Path, size: int) -> None:
        self._sizes[str(path)] = size
        self._largest = max(self._largest, size)

    def _must_fit(self, size: int) -> None:
        needed = size * self.step_groups
        if needed > self._capacity_bytes:
            raise UserError(
                f"[rollout.spool] capacity_bytes = {self._capacity_bytes} is too small: a step needs "
                f"{self.step_groups} groups from each replica, and one has {size} bytes. Set it to {needed} or more."
            )


def spool_root(directory: str | None, run_dir: Path) -> Path:
    """Return the folder of a run's spools: one per run in `directory`, or `spool` in the run's directory."""
    if directory is None:
        return run_dir / "spool"
    return Path(directory) / f"cosmos-rl-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:16]}"


def clear_spools(root: Path) -> None:
    """Remove the files of a run's spools on this machine."""
    shutil.rmtree(root, ignore_errors=True)


def _write(path: Path, payload: bytes) -> bytes:
    """Write a file under a temporary name, rename it, return the digest. A failed write leaves no file."""
    partial = path.with_suffix(_PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(payload)
        partial.rename(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # the error of a full disk names no file
    return hashlib.sha256(payload).digest()


PIECE_BYTES = 4 * 2**20
"""Maximum bytes of one reply."""


class Pull(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Request for the bytes of a file from `offset` on."""

    path: str
    offset: int


class SpoolPiece(msgspec.Struct, frozen=True, tag=True, array_like=True):
    data: memoryview
    """At least one byte, at most PIECE_BYTES."""


class Absent(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The file does not exist, or has no byte at this offset."""


Answer = SpoolPiece | Absent


async def serve_spool(
    spool: Spool, *, bind: str, token: bytes, name: str, allow_remote: bool, tls: Tls | None = None
) -> ChannelServer:
    """Listen on a free port of `bind` and serve clients that have the run's token. Raises like `wire.serve`."""

    async def answer(connection: Connection) -> None:
        while True:
            pull: Pull = await connection.receive()
            data = await asyncio.to_thread(spool.read, pull.path, offset=max(0, pull.offset), num_bytes=PIECE_BYTES)
            await connection.send(SpoolPiece(memoryview(data)) if data else Absent())

    return await serve(
        f"tcp://{bind}:0",
        token=token,
        decode=Pull,
        on_connect=answer,
        hello=Hello(name=name, role="spool"),
        allow_remote=allow_remote,
        tls=tls,
    )

"""Groups that stay with the replica that made them: files that the policy maps, or pulls from the replica.

    <root>/rollout-0/12-1-9f86d081.group      sample 12, attempt 1; whole, or not there

    put -> the controller holds the reference -> every policy rank reads the file -> the step is committed -> release

A file outlives its process, so that a replica that is killed loses nothing it has delivered: its successor keeps what
the controller still refers to and removes the rest.
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

_PARTIAL = ".part"


class Spooled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Where the bytes of a group lie, in place of the bytes."""

    path: str
    """The file, on the machine of the replica or on a file system that machines share."""
    num_bytes: int
    digest: bytes
    """[32]: SHA-256 of the bytes."""
    address: str = ""
    """Where the replica answers those that do not reach the file; empty where it is gone."""


class Spool:
    """The files of one replica, and room for more.

    spool = Spool(directory, threshold_bytes=2**20, capacity_bytes=2**34, step_groups=4, kept=welcome.kept)
    spool.room()                                      # groups that still fit; ask for no more leases than that
    reference = await spool.put(payload, name="12-1")
    spool.release([reference.path])                   # once nobody needs them
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
        """Make or reopen the directory, of which only the files `kept` stay.

        threshold_bytes: size from which a group is written here. step_groups: how many groups of a step this replica
        may have to hold, for the step to be made up.
        """
        self._directory = directory
        self._threshold_bytes = threshold_bytes
        self._capacity_bytes = capacity_bytes
        self._step_groups = step_groups
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
        """What lies here."""
        return sum(self._sizes.values())

    def room(self) -> int:
        """Return how many more groups fit, each as large as the largest so far; before the first, any number."""
        return max(0, self._capacity_bytes - self.num_bytes) // max(1, self._largest)

    async def put(self, payload: bytes, *, name: str) -> bytes | Spooled:
        """Write a group's bytes and return the reference; return those of a small group as they are.

        Raises UserError where a step's groups of this size can never fit, and OSError.
        """
        if len(payload) < self._threshold_bytes:
            return payload
        self._must_fit(len(payload))
        path = self._directory / f"{name}-{secrets.token_hex(4)}.group"
        writing = asyncio.create_task(asyncio.to_thread(_write, path, payload))
        try:
            digest = await asyncio.shield(writing)
        except asyncio.CancelledError:  # the thread goes on; what it writes belongs to nobody
            writing.add_done_callback(lambda _: path.unlink(missing_ok=True))
            raise
        self._add(path, len(payload))
        return Spooled(path=str(path), num_bytes=len(payload), digest=digest)

    def read(self, path: str, *, offset: int, num_bytes: int) -> bytes | None:
        """Return up to so many bytes of a file from `offset` on, or None for one that is not here."""
        if path not in self._sizes:
            return None
        try:
            with open(path, "rb") as file:
                return os.pread(file.fileno(), num_bytes, offset)
        except FileNotFoundError:
            return None

    def release(self, paths: Iterable[str]) -> None:
        """Remove files, those that are gone already included."""
        for path in paths:
            if self._sizes.pop(path, None) is not None:
                Path(path).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all that is left."""
        self.release(list(self._sizes))
        with contextlib.suppress(OSError):  # not empty: somebody else's, or gone with the run
            self._directory.rmdir()

    def _add(self, path: Path, size: int) -> None:
        self._sizes[str(path)] = size
        self._largest = max(self._largest, size)

    def _must_fit(self, size: int) -> None:
        needed = size * self._step_groups
        if needed > self._capacity_bytes:
            raise UserError(
                f"[rollout.spool] capacity_bytes = {self._capacity_bytes} is too small: a step takes "
                f"{self._step_groups} groups from each replica, and one has {size} bytes. Set it to {needed} or more."
            )


def spool_root(directory: str | None, run_dir: Path) -> Path:
    """Return the folder of all spools of a run: `directory` holds one for each run, else it lies in the run's own."""
    if directory is None:
        return run_dir / "spool"
    return Path(directory) / f"cosmos-rl-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:16]}"


def clear_spools(root: Path) -> None:
    """Remove what a run's spools on this machine hold."""
    shutil.rmtree(root, ignore_errors=True)


def _write(path: Path, payload: bytes) -> bytes:
    """Write a file under another name, rename it, return the digest. What could not be written leaves nothing."""
    partial = path.with_suffix(_PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(payload)
        partial.rename(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk's own error names no file
    return hashlib.sha256(payload).digest()

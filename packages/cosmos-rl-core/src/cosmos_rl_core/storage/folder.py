"""A folder on a disk or in an object store, through fsspec: the operations that checkpoints need. No torch.

    folder = Folder.at("s3://bucket/run/checkpoints")
    digest = folder.write("step_12/state.json", [b"{}"])

A disk renames a folder atomically, an object store does not: see `Folder.is_local`.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import shutil
import sys
from collections.abc import Iterable
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.storage.s3 import s3_options

BLOCK_BYTES = 8 * 2**20
"""Size of the pieces that files are read and hashed in."""


class Folder:
    """One folder. Names are relative to it, with "/" between parts."""

    def __init__(self, files: Any, path: str, *, prefix: str) -> None:
        self._files = files
        """An fsspec file system."""
        self._path = path
        self._prefix = prefix
        """"s3://" and the like; empty on a disk."""

    @classmethod
    def at(cls, location: str | Path | Folder) -> Folder:
        """Return the folder of a path or URL. Raises UserError for a URL that nothing installed can open."""
        if isinstance(location, Folder):
            return location
        text = os.fspath(location)
        scheme, _, rest = text.partition("://")
        from fsspec.core import url_to_fs

        try:
            options = s3_options() if scheme in ("s3", "s3a") else {"use_listings_cache": False}
            files, path = url_to_fs(text if rest else os.path.abspath(text), **options)
        except (ImportError, ValueError) as error:
            hint = pip_install("cosmos-rl-core[s3]") if scheme == "s3" else "a path, or a URL such as s3://bucket/run"
            raise UserError(f"cannot open {text}: {error}. Try {hint}.") from error
        local = files.protocol == "file" or "file" in files.protocol
        return cls(files, path.rstrip("/"), prefix="" if local else f"{scheme}://")

    @property
    def is_local(self) -> bool:
        """Whether it is on a disk, where folders can be renamed and files synced."""
        return not self._prefix

    @property
    def name(self) -> str:
        return posixpath.basename(self._path)

    @property
    def parent(self) -> Folder:
        return type(self)(self._files, posixpath.dirname(self._path), prefix=self._prefix)

    @property
    def path(self) -> Path:
        """Its path on the disk."""
        assert self.is_local, f"{self} is not on a disk"
        return Path(self._path)

    def __truediv__(self, name: str) -> Folder:
        return type(self)(self._files, f"{self._path}/{name}", prefix=self._prefix)

    def __str__(self) -> str:
        return f"{self._prefix}{self._path}"

    def __repr__(self) -> str:
        return f"Folder({str(self)!r})"

    def has(self, name: str) -> bool:
        """Whether it holds this file or folder."""
        return self._files.exists(f"{self._path}/{name}")

    def folders(self) -> list[str]:
        """Names of the folders in it, sorted; none where it does not exist."""
        if not self._files.isdir(self._path):
            return []
        entries = self._files.ls(self._path, detail=True)
        return sorted(
            posixpath.basename(entry["name"].rstrip("/")) for entry in entries if entry["type"] == "directory"
        )

    def walk(self) -> list[str]:
        """Names of all files in it and below, sorted."""
        return sorted(posixpath.relpath(path, self._path) for path in self._files.find(self._path))

    def open(self, name: str) -> BufferedIOBase:
        """Open a file for reading; it can seek."""
        return self._files.open(f"{self._path}/{name}", "rb", block_size=BLOCK_BYTES)

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def digest(self, name: str) -> str:
        """SHA-256 of a file."""
        total = hashlib.sha256()
        with self.open(name) as file:
            while block := file.read(BLOCK_BYTES):
                total.update(block)
        return total.hexdigest()

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> str:
        """Write a file, durable when this returns; parts follow one another. Returns its SHA-256."""
        total = hashlib.sha256()
        path = f"{self._path}/{name}"
        if self.is_local:
            os.makedirs(posixpath.dirname(path), exist_ok=True)
        with self._files.open(path, "wb") as file:
            for part in parts:
                for start in range(0, len(part), BLOCK_BYTES):
                    block = part[start : start + BLOCK_BYTES]
                    total.update(block)
                    file.write(block)
            if self.is_local:
                file.flush()
                os.fsync(file.fileno())
        return total.hexdigest()

    def rename(self, name: str) -> Folder:
        """Rename a folder on a disk within its parent, durably."""
        new = self.path.with_name(name)
        self.path.rename(new)
        sync(new.parent)
        return Folder.at(new)

    def remove(self) -> None:
        """Remove it with its contents; no-op where it does not exist."""
        if self.is_local:
            shutil.rmtree(self.path, ignore_errors=True)
        elif self._files.exists(self._path):
            self._files.rm(self._path, recursive=True)


def sync(path: Path) -> None:
    """Make the entries of a folder on a disk durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def store_errors() -> tuple[type[Exception], ...]:
    """Exceptions of a store that cannot read or write a file; s3fs lets some of botocore's own through."""
    if "botocore" not in sys.modules:
        return (OSError,)
    from botocore.exceptions import BotoCoreError, ClientError

    return (OSError, BotoCoreError, ClientError)

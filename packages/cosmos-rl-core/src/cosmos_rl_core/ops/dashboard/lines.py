"""JSON lines of files that grow, are replaced when a run is resumed, and end in the middle of a line after a kill.

file = GrowingFile(run_dir / "events.jsonl", most_bytes=2**22)
for line in file.new(): ...              # the complete lines since the last call
if file.restarted: ...                   # they are those of another file
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec


class GrowingFile:
    """Reads the lines that were added to a file since the last time."""

    def __init__(self, path: Path, *, most_bytes: int | None = None) -> None:
        """most_bytes: of a file that is larger, only its end is read; None: all of it."""
        self._path = path
        self._most_bytes = most_bytes
        self._inode = -1
        self._offset = 0
        self.is_cut = False
        """Whether lines before those of the last restart were left out."""
        self.restarted = False
        """Whether the lines of the last call are the first of another file."""

    def new(self) -> list[bytes]:
        """Return the complete lines that were added; all lines of a file that was replaced or cut."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                self.restarted = status.st_ino != self._inode or status.st_size < self._offset
                if self.restarted:
                    self._inode, self._offset = status.st_ino, self._begin(status.st_size)
                    self.is_cut = self._offset > 0
                if status.st_size == self._offset:
                    return []
                file.seek(self._offset)
                data = file.read(status.st_size - self._offset)
        except OSError:  # not there yet, or removed
            self.restarted, self._inode, self._offset = self._inode != -1, -1, 0
            return []
        complete = data[: data.rfind(b"\n") + 1]
        lines = complete.splitlines()
        if self.restarted and self._offset:
            lines = lines[1:]  # it began in the middle of a line
        self._offset += len(complete)
        return lines

    def _begin(self, size: int) -> int:
        return 0 if self._most_bytes is None else max(0, size - self._most_bytes)


class FileRows:
    """The objects in the lines of a small file. Thread-safe."""

    def __init__(self, path: Path, *, most_bytes: int = 2**24) -> None:
        self._file = GrowingFile(path, most_bytes=most_bytes)
        self._rows: list[dict[str, Any]] = []
        self._lock = Lock()

    def read(self) -> list[dict[str, Any]]:
        """Return all rows so far. Lines that are not objects are skipped."""
        with self._lock:
            lines = self._file.new()
            if self._file.restarted:
                self._rows = []
            self._rows += [row for row in map(as_object, lines) if row is not None]
            return list(self._rows)


def as_object(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line, or None."""
    try:
        value = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is none."""
    try:
        return as_object(path.read_bytes()) or {}
    except OSError:
        return {}


def short(value: float) -> float | None:
    """Return a number with six digits, for the page; None for one that is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None

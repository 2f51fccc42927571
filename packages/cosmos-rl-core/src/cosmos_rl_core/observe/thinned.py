"""A file of JSON lines that shows a run of any length in a bounded size: older lines are thinned out.

log = ThinnedLog(path, every_s=5.0, most_lines=2000, most_bytes=2**26)
log.add(line)
wait(log.every_s)                 # doubles each time that the file was full
"""

from __future__ import annotations

from pathlib import Path

from cosmos_rl_core.observe.record import append_lines


class ThinnedLog:
    """Appends lines; once the file is full, every second line is dropped."""

    def __init__(self, path: Path, *, every_s: float, most_lines: int, most_bytes: int) -> None:
        """every_s: interval at which lines are due while the file has not been full."""
        self.every_s = every_s
        self._path = path
        self._most_lines, self._most_bytes = most_lines, most_bytes
        written = path.read_bytes() if path.is_file() else b""
        self._lines, self._bytes = written.count(b"\n"), len(written)

    def add(self, line: bytes) -> None:
        """Append a line, due or not. Raises OSError if the file cannot be thinned; without room the line is lost."""
        if self._lines >= self._most_lines or self._bytes >= self._most_bytes:
            self._thin()
        append_lines(self._path, [line])
        self._lines, self._bytes = self._lines + 1, self._bytes + len(line) + 1

    def _thin(self) -> None:
        kept = self._path.read_bytes().splitlines(keepends=True)[::2] if self._path.is_file() else []
        temporary = self._path.with_suffix(".tmp")
        temporary.write_bytes(b"".join(kept))
        temporary.replace(self._path)
        self._lines, self._bytes, self.every_s = len(kept), sum(map(len, kept)), self.every_s * 2

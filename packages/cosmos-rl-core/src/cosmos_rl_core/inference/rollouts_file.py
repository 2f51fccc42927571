"""rollouts.jsonl of `cosmos-rl generate` and `eval`: one line per rollout, appended as rows finish, sorted at the end.

    {"sample": 3, "rollout": 0, "prompt": ..., "response": ..., "media": ["media/000003_0.mp4"], ...}
    {"sample": 4, "error": "rows.jsonl:5: the row has no caption"}

Rows in the file are skipped: a stopped command continues when it is run again. `request.json` next to it contains the
request, so that rollouts of different requests are never mixed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.json_files import parse_json, read_json_object

ROLLOUTS, REQUEST, MEDIA, LOCK = "rollouts.jsonl", "request.json", "media", ".lock"

Line = dict[str, Any]


class RolloutsFile:
    """The file, locked and open for appending by one command."""

    def __init__(self, path: Path, *, num_samples: int, lock: IO[str]) -> None:
        """Keep the complete rows: those with `num_samples` rollouts. Takes ownership of `lock`."""
        self.path = path
        self._lock = lock
        kept = _whole_rows(_read(path), num_samples=num_samples)
        self.done: set[int] = {line["sample"] for line in kept}
        self._rewrite(kept)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    @classmethod
    def open(cls, directory: Path, *, request: Mapping[str, Any], num_samples: int, overwrite: bool) -> RolloutsFile:
        """Create or reopen the file of a request. Raises UserError if `directory` has rollouts of another request."""
        path, beside = directory / ROLLOUTS, directory / REQUEST
        with contextlib.ExitStack() as unless_held:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                lock = unless_held.enter_context((directory / LOCK).open("a"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if overwrite and beside.exists():
                    path.unlink(missing_ok=True)
                    shutil.rmtree(directory / MEDIA, ignore_errors=True)
                elif path.exists():
                    _must_match(directory, _read_request(beside), request)
                beside.write_text(json.dumps(request, indent=1) + "\n", encoding="utf-8")
                file = cls(path, num_samples=num_samples, lock=lock)
            except BlockingIOError as error:
                raise UserError(f"{directory} is in use by another command; wait, or choose another --out") from error
            except OSError as error:
                raise UserError(f"cannot use {directory} as --out: {error.strerror}") from error
            unless_held.pop_all()
        return file

    def add(self, lines: Sequence[Line]) -> None:
        """Append the lines of one row."""
        self._file.write("".join(map(_encoded, lines)))
        self._file.flush()

    def close(self) -> list[Line]:
        """Sort the lines by row and rollout, and return them."""
        self._file.close()
        lines = sorted(_read(self.path), key=lambda line: (line["sample"], line.get("rollout", 0)))
        self._rewrite(lines)
        self._lock.close()
        return lines

    def _rewrite(self, lines: Iterable[Line]) -> None:
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_text("".join(map(_encoded, lines)), encoding="utf-8")
        partial.replace(self.path)


def _read(path: Path) -> list[Line]:
    """Return the valid lines; the last one may be incomplete after a kill."""
    lines: list[Line] = []
    if path.exists():
        for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):  # JSON may contain other line ends
            try:
                line = parse_json(text, where=str(path))
            except UserError:
                continue
            match line:
                case {"sample": int(), "rollout": int()} | {"sample": int(), "error": _}:
                    lines.append(line)
    return lines


def _whole_rows(lines: Sequence[Line], *, num_samples: int) -> list[Line]:
    """Return the lines of rows with all rollouts; failed rows are left out, to be retried."""
    rows: dict[int, dict[int, Line]] = {}
    for line in lines:
        if "rollout" in line:
            rows.setdefault(line["sample"], {})[line["rollout"]] = line
    return [line for row in rows.values() if len(row) == num_samples for line in row.values()]


def _encoded(line: Line) -> str:
    return json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"


def _read_request(path: Path) -> dict[str, Any]:
    """Return the stored request; empty, which matches no request, for a missing or damaged file."""
    try:
        return read_json_object(path)
    except UserError:
        return {}


def _must_match(directory: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = [key for key in now if before.get(key) != now[key]]
    if changed:
        raise UserError(
            f"{directory} contains rollouts of another request (other {', '.join(changed)}). Choose another --out, or "
            "replace them with --overwrite."
        )

"""Snapshots: the state after a journal's first n records, in one checksummed file named by n."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

from cosmos_rl_core.control.journal.segment import (
    decode_frame,
    encode_frame,
    segment_firsts,
    segment_path,
    sync_directory,
)

KEPT = 2
"""Number of snapshots kept: if the newest is damaged, the one before and the records since are used."""


def write_snapshot(directory: Path, number: int, state: bytes) -> None:
    """Write the state after `number` records atomically."""
    path = _path(directory, number)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        file.write(encode_frame(state, number))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    sync_directory(directory)


def latest_snapshot(directory: Path) -> tuple[int, bytes | None]:
    """Return the newest intact snapshot's number of records and state; (0, None) if there is none."""
    for number in reversed(_numbers(directory)):
        state = decode_frame(memoryview(_path(directory, number).read_bytes()), 0, number)
        if state is not None:
            return number, bytes(state)
    return 0, None


def remove_superseded(directory: Path) -> None:
    """Remove snapshots beyond the newest two, and segments that end before the older of these."""
    numbers = _numbers(directory)
    for number in numbers[:-KEPT]:
        _path(directory, number).unlink()
    if len(numbers) < KEPT:
        return
    firsts = segment_firsts(directory)
    for first, following in pairwise(firsts):
        if following <= numbers[-KEPT]:
            segment_path(directory, first).unlink()
    sync_directory(directory)


def _path(directory: Path, number: int) -> Path:
    return directory / f"{number:016d}.snapshot"


def _numbers(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in directory.glob("*.snapshot"))

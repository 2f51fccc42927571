"""Snapshots: the state that a journal's first n records lead to, in one checked file named by n."""

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
"""Snapshots kept: should the newest be damaged, the one before and the records since do."""


def write_snapshot(directory: Path, number: int, state: bytes) -> None:
    """Write the state after `number` records so that it is there whole or not at all."""
    path = _path(directory, number)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        file.write(encode_frame(state, number))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    sync_directory(directory)


def latest_snapshot(directory: Path) -> tuple[int, bytes | None]:
    """Return the newest intact snapshot and its number of records; (0, None) where there is none."""
    for number in reversed(_numbers(directory)):
        state = decode_frame(memoryview(_path(directory, number).read_bytes()), 0, number)
        if state is not None:
            return number, bytes(state)
    return 0, None


def remove_superseded(directory: Path) -> None:
    """Remove snapshots beyond the newest two, and segments that lie wholly before the older of these."""
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

"""The journal's files: segments, which are sequences of frames, and snapshots, one frame each.

    frame = length u32 | crc of the body u32 | crc of these 8 bytes u32 | body        (little endian)

The body's checksum is seeded with the frame's sequence number, which detects moved, repeated and missing frames as
well as flipped bits. The header's is not, so that frames after a damaged one can be recognised. Both are zlib's
CRC-32: the standard library has no CRC-32C.

A snapshot is the state after the first n records, in a file named by n.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from cosmos_rl_core.errors import UserError

_HEADER = struct.Struct("<III")
_CHECKED = struct.Struct("<II")
KEPT = 2
"""Number of snapshots kept: if the newest is damaged, the one before and the records since are used."""


class JournalError(UserError):
    """The journal is damaged or cannot be written. It is never repaired by guessing. Ends with the remedy."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text}: continue from the newest checkpoint with --resume auto")


def encode_frame(body: bytes, sequence: int) -> bytes:
    """Return the frame of a body."""
    checked = _CHECKED.pack(len(body), zlib.crc32(body, sequence & 0xFFFFFFFF))
    return checked + zlib.crc32(checked).to_bytes(4, "little") + body


def decode_frame(data: memoryview, offset: int, sequence: int) -> memoryview | None:
    """Return the body of the frame at `offset`, or None if no intact frame of that number is there."""
    if not _is_header(data, offset):
        return None
    length, body_crc, _ = _HEADER.unpack_from(data, offset)
    start = offset + _HEADER.size
    body = data[start : start + length]
    return body if zlib.crc32(body, sequence & 0xFFFFFFFF) == body_crc else None


def _is_header(data: memoryview, offset: int) -> bool:
    """Return whether there is an intact header at `offset`, followed by its whole body."""
    if offset + _HEADER.size > len(data):
        return False
    length, _, header_crc = _HEADER.unpack_from(data, offset)
    is_intact = zlib.crc32(data[offset : offset + _CHECKED.size]) == header_crc
    return is_intact and offset + _HEADER.size + length <= len(data)


def read_segment(path: Path, *, first: int, is_last: bool) -> Iterator[tuple[bytes, int]]:
    """Yield each body of a segment with the offset where its frame ends; `first` is the first frame's number.

    The end of the last segment may be torn: the machine stopped before a write was complete. Its frames were never
    acknowledged and are skipped. Damage before an intact frame is not a torn end. Raises JournalError for damage.
    """
    data = memoryview(path.read_bytes())
    offset, sequence = 0, first
    while offset < len(data):
        body = decode_frame(data, offset, sequence)
        if body is None:
            if is_last and not any(_is_header(data, later) for later in range(offset + 1, len(data))):
                return
            raise JournalError(f"{path}: record {sequence} at byte {offset} is damaged")
        offset += _HEADER.size + len(body)
        sequence += 1
        yield bytes(body), offset


def segment_path(directory: Path, first: int) -> Path:
    """Return the path of the segment whose first frame has the number `first`."""
    return directory / f"{first:016d}.journal"


def segment_firsts(directory: Path) -> list[int]:
    """Return the first record numbers of the segments, ascending."""
    return sorted(int(path.stem) for path in directory.glob("*.journal"))


def cut_off(path: Path, size: int) -> None:
    """Shorten a file to `size` bytes, durably."""
    with path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def renew(path: Path) -> None:
    """Replace a file, if there is one, by a copy, durably: who has it open writes to the earlier one."""
    if not path.exists():
        return
    copy = path.with_suffix(".copy")
    with copy.open("wb") as file:
        file.write(path.read_bytes())
        file.flush()
        os.fsync(file.fileno())
    copy.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make creations, renames and removals of files in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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

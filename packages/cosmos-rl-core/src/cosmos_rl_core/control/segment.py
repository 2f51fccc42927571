"""The journal's files: frames one after another.

    frame = length u32 | crc of the body u32 | crc of these 8 bytes u32 | body        (little endian)

Both checksums start from the frame's sequence number, so that a frame that was moved, repeated or left out
is found like one with a flipped bit. The checksum is zlib's CRC-32: the standard library has no CRC-32C.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

_HEADER = struct.Struct("<III")
_CHECKED = struct.Struct("<II")


class JournalError(Exception):
    """The journal is damaged or cannot be written. Nothing is repaired by guessing."""


def encode_frame(body: bytes, sequence: int) -> bytes:
    """Return the frame of a body."""
    seed = sequence & 0xFFFFFFFF
    checked = _CHECKED.pack(len(body), zlib.crc32(body, seed))
    return checked + zlib.crc32(checked, seed).to_bytes(4, "little") + body


def decode_frame(data: memoryview, offset: int, sequence: int) -> memoryview | None:
    """Return the body of the frame at `offset`, or None if no intact frame of that number lies there."""
    if offset + _HEADER.size > len(data):
        return None
    length, body_crc, header_crc = _HEADER.unpack_from(data, offset)
    start, seed = offset + _HEADER.size, sequence & 0xFFFFFFFF
    if zlib.crc32(data[offset : offset + _CHECKED.size], seed) != header_crc or start + length > len(data):
        return None
    body = data[start : start + length]
    return body if zlib.crc32(body, seed) == body_crc else None


def read_segment(path: Path, *, first: int, is_last: bool) -> Iterator[tuple[bytes, int]]:
    """Yield each body of a segment with the offset where its frame ends; `first` is the first frame's number.

    In the last segment the end may be torn: the machine stopped before a write was complete, so nobody was
    told of those frames, and they are left out. Damage before an intact frame is no torn end. Raises
    JournalError for damage.
    """
    data = memoryview(path.read_bytes())
    offset, sequence = 0, first
    while offset < len(data):
        body = decode_frame(data, offset, sequence)
        if body is None:
            if is_last and not _has_frame_after(data, offset, sequence):
                return
            raise JournalError(
                f"{path}: record {sequence} at byte {offset} is damaged; resume from a checkpoint"
            )
        offset += _HEADER.size + len(body)
        sequence += 1
        yield bytes(body), offset


def _has_frame_after(data: memoryview, offset: int, sequence: int) -> bool:
    """Return whether an intact later frame lies behind the damage at `offset`.

    Only frames near `sequence` are tried: each damaged byte range hides at least one frame, and few bytes
    hide few.
    """
    nearby = range(sequence + 1, sequence + 3)
    return any(
        decode_frame(data, start, later) is not None
        for start in range(offset + 1, len(data) - _HEADER.size + 1)
        for later in nearby
    )


def segment_path(directory: Path, first: int) -> Path:
    """Return the path of the segment whose first frame has the number `first`."""
    return directory / f"{first:016d}.journal"


def segment_firsts(directory: Path) -> list[int]:
    """Return the numbers segments start at, ascending."""
    return sorted(int(path.stem) for path in directory.glob("*.journal"))


def cut_off(path: Path, size: int) -> None:
    """Shorten a file to `size` bytes, durably."""
    with path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Make created, renamed and removed names durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

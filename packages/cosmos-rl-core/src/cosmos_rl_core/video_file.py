"""What a video file lacks, told by its headers alone: decoders say "Invalid data" of a file that was cut off.

ISO base media files (.mp4, .mov; ISO/IEC 14496-12) are a row of boxes, each with its size and a type of four letters.
Their index, the box "moov", is written last by most encoders: a recording or copy that was ended early has none.
RIFF files (.avi) have their size in front.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import BinaryIO

_FIRST = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp")
"""Types that a file of boxes begins with."""


def cut_off(source: str | Path | bytes) -> str:
    """Return how a video file is cut off, as a phrase that follows its name; "" where its headers do not tell.

    source: a file, or what is in one. Nothing is raised for one that cannot be read.
    """
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(0)
            return _missing(file, length)
    except OSError:
        return ""


def _missing(file: BinaryIO, length: int) -> str:
    head = file.read(12)
    file.seek(0)
    if not head:
        return "is empty: it has 0 bytes"
    if head[:4] == b"RIFF" and len(head) >= 8:
        size = int.from_bytes(head[4:8], "little")
        return _short(length, 8 + size) if size < 2**32 - 1 else ""  # of a stream, whose length nobody knew
    return _missing_box(file, length) if head[4:8] in _FIRST else ""


def _missing_box(file: BinaryIO, length: int) -> str:
    begin, indexed = 0, False
    while begin < length:
        file.seek(begin)
        head = file.read(16)
        size, kind = int.from_bytes(head[:4], "big"), head[4:8]
        size = {0: length - begin, 1: int.from_bytes(head[8:16], "big")}.get(size, size)
        if size < 8:
            return _short(length, begin + 8) if len(head) < 8 else ""  # no box at all: damaged in another way
        if begin + size > length:
            return _short(length, begin + size)
        indexed = indexed or kind == b"moov"
        begin += size
    return "" if indexed else "has no index (moov): the recording or the copy was ended before it was written"


def _short(length: int, wanted: int) -> str:
    return f"is cut off: it has {length:,} bytes of at least {wanted:,}" if length < wanted else ""

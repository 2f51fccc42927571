"""The journal: write-ahead log of the ledger's records.

    journal = Journal(directory)
    ledger = Ledger.restore(config, journal.snapshot, journal.replay())
    journal.append(record)            # returns at once
    await journal.flush()             # one fdatasync for all appended records and all waiters

A directory contains segments, named by the number of their first record, and snapshots, named by the number of
records they include. On opening, a torn end of the last segment is truncated; any other damage raises. An error of
write or fdatasync is final: after a failed fsync the kernel may have dropped the pages, so a retry could report
success falsely.

Segments are sequences of frames, a snapshot is one frame: the state after the first n records, in a file named by n.

    frame = length u32 | crc of the body u32 | crc of these 8 bytes u32 | body        (little endian)

The body's checksum is seeded with the frame's sequence number, which detects moved, repeated and missing frames as
well as flipped bits. The header's is not, so that frames after a damaged one can be recognised. Both are zlib's
CRC-32: the standard library has no CRC-32C.

A controller that takes over from a dead one claims the next generation first, by an empty file in the folder that only
one process can create. From then on an earlier one cannot write the journal any more.
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import msgspec

from cosmos_rl_core.control.ledger.records import AnyRecord, Record
from cosmos_rl_core.errors import TakenOver, UserError

_HEADER = struct.Struct("<III")
_CHECKED = struct.Struct("<II")
_CLAIM = "generation-"
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


def claim_generation(journal: Path, *, after: int) -> int:
    """Return the number of a generation after this one that no other controller has. Raises UserError, OSError."""
    generation = max([after, *(int(path.name.partition("-")[2]) for path in journal.glob(f"{_CLAIM}*"))]) + 1
    try:
        (journal / f"{_CLAIM}{generation}").touch(exist_ok=False)
    except FileExistsError as error:
        raise UserError(f"another controller has just taken over the run of {journal.parent}") from error
    return generation


class DiskFile:
    """A segment on disk, to which data is appended."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> None:
        """Append all of `data`."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def sync(self) -> None:
        """Return when all written data is on disk."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class Journal:
    """An append-only log of records with group commit. One process writes it at a time."""

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int = 64 * 2**20,
        open_file: Callable[[Path], DiskFile] = DiskFile,
        generation: int = 0,
        takes_over: bool = False,
    ) -> None:
        """Open or create the journal in `directory`. Raises JournalError if it is damaged.

        generation: of the process that writes. takes_over: whether an earlier one may still have the last segment open.
        """
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._open_file = open_file
        self._next_claim = directory / f"{_CLAIM}{generation + 1}"
        self._encoder = msgspec.msgpack.Encoder()
        directory.mkdir(parents=True, exist_ok=True)
        self._snapshot_number, self.snapshot = latest_snapshot(directory)
        first, self.num_records, self._size = self._check()
        if takes_over:
            renew(segment_path(directory, first))
        self.num_durable = self.num_records
        """Number of records on disk."""
        self._file = open_file(segment_path(directory, first))
        sync_directory(directory)
        self.num_since_snapshot = self.num_records - self._snapshot_number
        """Number of records after the newest snapshot."""
        self._pending: list[bytes] = []
        self._write: Future[None] | None = None  # the newest write; the single thread runs writes in order
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    def check_owner(self) -> None:
        """Raise TakenOver if a later process has claimed the journal.

        Called before and after each write, in the writing thread, and before each snapshot.
        """
        if self._next_claim.exists():
            raise TakenOver(f"another controller has taken over the run of {self._directory.parent}: this one ends")

    def append(self, record: Record) -> int:
        """Queue a record for the next flush and return its number."""
        number = self.num_records
        self._pending.append(encode_frame(self._encoder.encode(record), number))
        self.num_records += 1
        self.num_since_snapshot += 1
        return number

    async def flush(self) -> None:
        """Return when all records appended so far are on disk. Raises UserError if the disk is full."""
        target = self.num_records
        while self.num_durable < target:
            if self._write is None or self._write.done():
                self._start_write()
            assert self._write is not None
            written = asyncio.wrap_future(self._write)
            written.add_done_callback(_retrieve)
            await asyncio.shield(written)

    def sync(self) -> None:
        """Like `flush`, but blocking, without an event loop."""
        while self.num_durable < self.num_records:
            if self._write is None or self._write.done():
                self._start_write()
            assert self._write is not None
            self._write.result()

    def replay(self) -> Iterator[Record]:
        """Yield the durable records after `snapshot`, or all if there is none."""
        decoder = msgspec.msgpack.Decoder(AnyRecord)
        firsts = segment_firsts(self._directory)
        for first, following in zip(firsts, [*firsts[1:], None]):
            if following is not None and following <= self._snapshot_number:
                continue
            path = segment_path(self._directory, first)
            for number, (body, _) in enumerate(read_segment(path, first=first, is_last=following is None), first):
                if self._snapshot_number <= number < self.num_durable:
                    yield decoder.decode(body)

    def take_snapshot(self, state: bytes) -> None:
        """Write the state after all records so far, and remove the segments that no snapshot needs.

        The two newest snapshots are kept, with the records since the older one.
        """
        self.sync()
        self.check_owner()
        try:
            write_snapshot(self._directory, self.num_durable, state)
            self._thread.submit(self._start_segment).result()
            remove_superseded(self._directory)
            self.num_since_snapshot = 0
        except OSError as error:
            raise _failure(error, self._directory) from error

    def close(self) -> None:
        """Write the pending records and close the file."""
        try:
            self.sync()
        finally:
            self._thread.shutdown()
            self._file.close()

    def _start_write(self) -> None:
        """Submit all pending records to the thread. After a failure nothing is written again."""
        if self._write is not None and self._write.exception() is not None:
            return
        frames, self._pending = self._pending, []
        self._write = self._thread.submit(self._write_out, b"".join(frames), len(frames))

    def _write_out(self, data: bytes, count: int) -> None:
        self.check_owner()
        try:
            self._file.write(data)
            self._file.sync()
            self.check_owner()  # a process that took over meanwhile may not have read these records
            self.num_durable += count
            self._size += len(data)
            if self._size >= self._segment_bytes:
                self._start_segment()
        except OSError as error:
            raise _failure(error, self._directory) from error

    def _start_segment(self) -> None:
        if self._size:
            self._file.close()
            self._file = self._open_file(segment_path(self._directory, self.num_durable))
            self._size = 0
            sync_directory(self._directory)

    def _check(self) -> tuple[int, int, int]:
        """Check all segments, truncate a torn end; return the last segment's number, the next number and its size."""
        firsts = segment_firsts(self._directory) or [self._snapshot_number]
        number, size = firsts[0], 0
        if number > self._snapshot_number:
            raise JournalError(f"{self._directory}: the records before number {number} are missing")
        for first in firsts:
            path, size = segment_path(self._directory, first), 0
            if first != number:
                raise JournalError(f"{path}: starts at record {first}, but record {number} comes next")
            if path.exists():
                for _, end in read_segment(path, first=first, is_last=first == firsts[-1]):
                    number, size = number + 1, end
                if size < path.stat().st_size:
                    cut_off(path, size)
        if number < self._snapshot_number:
            raise JournalError(f"{self._directory}: ends at record {number}, before its snapshot")
        return firsts[-1], number, size


def _retrieve(written: asyncio.Future[None]) -> None:
    """Take the error of a write whose flush was cancelled: `close` raises it, and asyncio need not log it as well."""
    if not written.cancelled():
        written.exception()


def _failure(error: OSError, directory: Path) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(
            f"no space left for the journal in {directory}; acknowledged records are safe. "
            "Free some space there and resume"
        )
    return JournalError(f"the journal in {directory} cannot be written ({error})")

"""The journal: write-ahead log of the ledger's records.

    journal = Journal(directory)
    ledger = Ledger.replay(config, journal.replay())
    journal.append(record)            # returns at once
    await journal.flush()             # one fdatasync for all appended records and all waiters

A directory contains segments, named by the number of their first record, and snapshots, named by the number of
records they include. On opening, a torn end of the last segment is truncated; any other damage raises. An error of
write or fdatasync is final: after a failed fsync the kernel may have dropped the pages, so a retry could report
success falsely.

`DurableLedger` is the ledger behind its journal: event -> ledger.on -> records -> journal -> (one flush for everything
queued) -> outputs -> dispatch.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec

from cosmos_rl_core.control.journal.files import (
    JournalError,
    cut_off,
    encode_frame,
    latest_snapshot,
    read_segment,
    remove_superseded,
    renew,
    segment_firsts,
    segment_path,
    sync_directory,
    write_snapshot,
)
from cosmos_rl_core.control.ledger.events import Event, Output, Tick
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.records import AnyRecord, Record
from cosmos_rl_core.errors import TakenOver, UserError

FLUSHES_PER_S, FLUSH_BURST = 200.0, 100
"""Flushes of a ledger that share the events of thousands of workers: at most so many a second, after so many at once. A
flush takes 0.1 to 0.2 ms of processor time, as much as ten messages."""
CHECK_S = 1.0
SNAPSHOT_RECORDS = 250_000
"""Records after which the ledger's state is saved: a controller that takes over replays no more, about a second."""


class SegmentFile(Protocol):
    """An append-only file."""

    def write(self, data: bytes) -> None:
        """Append all of `data`."""
        ...

    def sync(self) -> None:
        """Return when all written data is on disk."""
        ...

    def close(self) -> None: ...


class DiskFile:
    """A segment on disk."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def sync(self) -> None:
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
        open_file: Callable[[Path], SegmentFile] = DiskFile,
        check: Callable[[], None] = lambda: None,
        takes_over: bool = False,
    ) -> None:
        """Open or create the journal in `directory`. Raises JournalError if it is damaged.

        check: called before and after each write, in the writing thread, and before each snapshot; raises where another
        process has taken over. takes_over: whether an earlier process may still have the last segment open.
        """
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._open_file = open_file
        self.check_owner = check
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


class Pace:
    """Limits how often something is done: `burst` times at once, then at most `per_s` times a second."""

    def __init__(self, per_s: float, *, burst: int) -> None:
        self._per_s, self._burst = per_s, burst
        self._left, self._at = float(burst), -math.inf

    async def wait(self) -> bool:
        """Wait until it may be done once more; return whether that took time."""
        now = asyncio.get_running_loop().time()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s) - 1.0
        self._at = now
        if self._left >= 0.0:
            return False
        await asyncio.sleep(-self._left / self._per_s)
        return True

    def refill(self) -> None:
        self._left = float(self._burst)


class DurableLedger:
    """Feeds events to the ledger in order; dispatches its outputs in the same order, after their records are on disk.

    durable.feed(event)            # returns at once
    await durable.run()            # flushes and dispatches until cancelled
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        journal: Journal,
        clock: Callable[[], float],
        dispatch: Callable[[Output], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """fail: ends the run with an error, after which events are ignored: the ledger may be ahead of its journal."""
        self.ledger = ledger
        self._fail = fail
        self._error: Exception | None = None
        self._checked_at = -math.inf
        self._journal = journal
        self._clock = clock
        self._dispatch = dispatch
        self._outputs: list[Output] = []
        self._work = asyncio.Event()
        self._pace = Pace(FLUSHES_PER_S, burst=FLUSH_BURST)

    def feed(self, event: Event) -> list[Record]:
        """Pass an event to the ledger and return the resulting records. Raises any error, which ends the run."""
        if self._error is not None:
            return []
        try:
            records, outputs = self.ledger.on(self._clock(), event)
            for record in records:
                self._journal.append(record)
        except Exception as error:
            self._end(error)
            raise
        self._outputs += outputs
        if records or outputs:
            self._work.set()
        return records

    def check_owner(self) -> None:
        """Raise TakenOver, which ends the run, if another controller has taken over. It looks once a second.

        A controller that was stopped finds messages of workers when it goes on, whose results are the other one's.
        """
        now = self._clock()
        if isinstance(self._error, TakenOver):
            raise self._error
        if now - self._checked_at < CHECK_S:
            return
        self._checked_at = now
        try:
            self._journal.check_owner()
        except TakenOver as error:
            self._end(error)
            raise

    def _end(self, error: Exception) -> None:
        self._error = error
        self._fail(error)

    async def run(self) -> None:
        """Flush and dispatch until cancelled. Raises any error, which ends the run."""
        try:
            await self._run()
        except Exception as error:
            self._end(error)
            raise

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            before = self._journal.num_records
            if await self._pace.wait() and self._journal.num_records == before:
                self._pace.refill()  # few workers, each of which waits for its answer: nothing to share a flush with
            self._work.clear()
            outputs, self._outputs = self._outputs, []
            await self._journal.flush()
            for output in outputs:
                self._dispatch(output)
            if self._journal.num_since_snapshot >= SNAPSHOT_RECORDS:
                self._journal.take_snapshot(self.ledger.snapshot())

    async def tick(self, every_s: float) -> None:
        """Feed a `Tick` to the ledger at this interval, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            self.feed(Tick())

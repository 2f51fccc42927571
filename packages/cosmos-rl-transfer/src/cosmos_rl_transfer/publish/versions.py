"""Leases on versions: the readers of each, and when the owner may write its memory again. No socket, no tensor.

owner    publish(version)                  open: readers may borrow it
         fence(patience)                   closed: nobody may borrow; waits for readers; copies their unread buckets
         ... writes ...
reader   wait_newer(after)                 the open version, if it is newer
         lend(version) -> Lease
         with reading(lease, bucket) as copy:    None: read live memory inside the block; else the bucket's bytes
         give_back(lease)

A lease ends when it is given back, when its copies are dropped for a newer version (unless it is to be kept), or
when the owner writes without a fence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.errors import Superseded


@dataclass(slots=True, eq=False)
class VersionLease:
    """One reader's right to a version."""

    number: int
    version: int
    unread: set[int]
    """Buckets not read yet."""
    keep: bool
    """Whether it outlives the next version."""
    copy: Callable[[int], Raw]
    """Makes a copy of a bucket out of live memory."""
    copies: dict[int, Raw] | None = None
    """By bucket, after a fence whose patience ran out; None while the bytes are in live memory."""
    base: int = -1
    """The version that the reader has, which deltas may start from; -1 for none."""
    reading_copies: int = 0
    """Readers inside `copies` at this moment."""
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class Fenced:
    """The outcome of a fence."""

    waited_s: float
    copied_bytes: int


@dataclass(slots=True)
class _State:
    newest: int = -1
    is_open: bool = False
    closed: bool = False
    reading: int = 0
    """Reads of live memory in progress, each as short as a copy or a hash."""
    sending: int = 0
    """Sends from live memory in progress, each as long as its subscriber takes."""
    leases: dict[int, VersionLease] = field(default_factory=dict)


class Versions:
    """All methods may be called from any thread."""

    def __init__(self, recycle: Callable[[Raw], None] = lambda _: None) -> None:
        """recycle: called with every copy after its last reader."""
        self._recycle = recycle
        self._state = _State()
        self._changed = threading.Condition()
        self._numbers = count(1)

    @property
    def newest(self) -> int:
        """Newest version that was published, -1 before the first."""
        return self._state.newest

    @property
    def is_open(self) -> bool:
        """Whether it can be borrowed."""
        return self._state.is_open

    def publish(self, version: int) -> None:
        """Open a version. Revokes leases written without a fence, drops copies that are not kept."""
        with self._changed:
            for lease in self._state.leases.values():
                if lease.copies is None or not lease.keep:
                    lease.revoked = True
                    self._drop_copies(lease)
            self._state.newest, self._state.is_open = version, True
            self._changed.notify_all()

    def wait_newer(self, after: int, *, timeout_s: float) -> int | None:
        """Return the open version once it is newer than `after`; None after `timeout_s` or when closed."""
        state = self._state
        with self._changed:
            self._changed.wait_for(lambda: state.closed or (state.is_open and state.newest > after), timeout_s)
            return state.newest if state.is_open and state.newest > after and not state.closed else None

    def lend(
        self, version: int, *, buckets: Iterable[int], keep: bool, copy: Callable[[int], Raw], base: int = -1
    ) -> VersionLease | None:
        """Lease a version, if it is open. `buckets`: those a fence waits for; `copy` reads one from live memory."""
        with self._changed:
            state = self._state
            if not state.is_open or state.closed or version != state.newest:
                return None
            lease = VersionLease(next(self._numbers), version, set(buckets), keep, copy, base=base)
            state.leases[lease.number] = lease
            return lease

    @contextmanager
    def reading(self, lease: VersionLease, bucket: int, *, sending: bool = False) -> Iterator[Raw | None]:
        """Hold the fence up while a bucket is read. Raises Superseded for a lease that ended.

        sending: the fence waits for its patience only. Bytes sent later may be of two versions, so they must be hashed
        before, in a block without `sending`.
        """
        with self._changed:
            if lease.revoked or (lease.copies is not None and bucket not in lease.copies):
                raise Superseded(f"version {lease.version} gave way to a newer one")
            copied = None if lease.copies is None else lease.copies[bucket]
            self._state.reading += copied is None and not sending
            self._state.sending += copied is None and sending
            lease.reading_copies += copied is not None
        try:
            yield copied
        finally:
            with self._changed:
                self._state.reading -= copied is None and not sending
                self._state.sending -= copied is None and sending
                lease.reading_copies -= copied is not None
                if lease.number not in self._state.leases or lease.revoked:
                    self._drop_copies(lease)
                self._changed.notify_all()

    def is_live(self, lease: VersionLease) -> bool:
        """Whether live memory still has the leased version: no fence has ended since."""
        with self._changed:
            return lease.copies is None and not lease.revoked

    def read(self, lease: VersionLease, bucket: int) -> None:
        """Record that the reader has a bucket."""
        with self._changed:
            lease.unread.discard(bucket)
            self._changed.notify_all()

    def give_back(self, lease: VersionLease) -> bool:
        """End a lease; returns whether it was valid until now."""
        with self._changed:
            self._state.leases.pop(lease.number, None)
            self._drop_copies(lease)
            lease.copies = lease.copies or {}
            self._changed.notify_all()
            return not lease.revoked

    def _drop_copies(self, lease: VersionLease) -> None:
        """Recycle a lease's copies once nobody is inside them. The lock is held."""
        if lease.copies and not lease.reading_copies:
            copies, lease.copies = lease.copies, {}
            for data in copies.values():
                self._recycle(data)

    def fence(self, *, patience_s: float, copy: bool = True) -> Fenced:
        """Close the version: after this the memory may be written. Copies what is unread after `patience_s`.

        Without `copy`, leases that are not read to the end by then are revoked.
        """
        # 1. Close: nobody borrows any more. 2. Wait until every lease is read and no read or send is in progress, for
        # at most `patience_s`. 3. Copy the unread buckets of the leases that are left; this thread counts as a reader
        # meanwhile. 4. Wait for reads of live memory, which are short; a send that stands still is left behind.
        started = time.monotonic()
        state, copied = self._state, 0
        with self._changed:
            state.is_open = False
            self._changed.wait_for(lambda: not (self._holding() or state.reading or state.sending), patience_s)
            waiting = self._holding()
            self._end_read()
            if not copy:
                self._revoke(waiting)
                waiting = []
            state.reading += 1  # this copy is a reader too
        try:
            for lease in waiting:
                copies = {bucket: lease.copy(bucket) for bucket in sorted(lease.unread)}
                with self._changed:
                    lease.copies = copies
                copied += sum(data.nbytes for data in copies.values())
        finally:
            with self._changed:
                state.reading -= 1
                self._changed.wait_for(lambda: not state.reading)
                # a send that goes on has a subscriber that does not read: its hash is wrong; `is_live` says why
                self._changed.wait_for(lambda: not state.sending, patience_s)
        return Fenced(time.monotonic() - started, copied)

    def _end_read(self) -> None:
        """End the leases without unread buckets. The lock is held."""
        for lease in self._state.leases.values():
            if lease.copies is None and not lease.unread:
                lease.copies = {}

    def _revoke(self, leases: Iterable[VersionLease]) -> None:
        for lease in leases:
            lease.revoked = True

    def _holding(self) -> list[VersionLease]:
        """Leases that still need live memory. The lock is held."""
        return [x for x in self._state.leases.values() if x.copies is None and not x.revoked and x.unread]

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._state.closed = True
            self._changed.notify_all()

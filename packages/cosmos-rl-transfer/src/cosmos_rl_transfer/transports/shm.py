"""Shared memory on one host: the subscriber maps the publisher's slots and copies out of them.

A slot is a memfd: it has no name to leak, does not count against the size of /dev/shm, and the kernel frees
it when the last process that maps it ends, however it ends. The subscriber opens it through the publisher's
/proc entry, which the kernel allows to the same user only, maps it read-only, and compares a nonce behind the
data to be sure that it is the same memory (containers may share addresses but not process numbers).
"""

from __future__ import annotations

import mmap
import os
import sys

import numpy as np

from cosmos_rl_transfer.arena import Arena
from cosmos_rl_transfer.digest import Raw
from cosmos_rl_transfer.link import Link
from cosmos_rl_transfer.messages import Lent
from cosmos_rl_transfer.plan import Bucket
from cosmos_rl_transfer.transports.base import TransportUnavailable

_NONCE_BYTES = 16


class SharedMemory:
    """The shared-memory transport. Linux only."""

    name = "shm"

    def allocate(self, num_bytes: int) -> _Segment:
        """Make a slot in a memfd with its pages present."""
        if sys.platform != "linux":
            raise TransportUnavailable(f"shared memory needs Linux's memfd, this is {sys.platform}")
        return _Segment(num_bytes)

    def attach(self, link: Link, *, arena: Arena, offers: tuple[dict[str, str], ...]) -> _Reader:
        """Map the publisher's slots."""
        return _Reader(arena, [_map(offer, arena.num_bytes) for offer in offers])


class _Segment:
    def __init__(self, num_bytes: int) -> None:
        nonce = os.urandom(_NONCE_BYTES)
        self._fd = os.memfd_create("cosmos-rl-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, num_bytes + _NONCE_BYTES)
        # MAP_POPULATE: a first touch of a page costs ten times a copy into it
        mapped = mmap.mmap(self._fd, num_bytes + _NONCE_BYTES, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        whole = np.frombuffer(mapped, np.uint8)
        whole[num_bytes:] = np.frombuffer(nonce, np.uint8)
        self.memory: Raw = whole[:num_bytes]
        self.offer = {"path": f"/proc/{os.getpid()}/fd/{self._fd}", "nonce": nonce.hex()}

    def close(self) -> None:
        """Drop the file; the mapping goes with its last view."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.memory = np.empty(0, np.uint8)


class _Reader:
    def __init__(self, arena: Arena, slots: list[Raw]) -> None:
        self._arena = arena
        self._slots = slots

    def read(self, bucket: Bucket, *, lent: Lent, out: Raw) -> None:
        """Pack a bucket straight out of the mapping."""
        self._arena.gather(self._slots[lent.slot], bucket, out)

    def close(self) -> None:
        """Forget the mappings; they go with their last view."""
        self._slots = []


def _map(offer: dict[str, str], num_bytes: int) -> Raw:
    if "path" not in offer:
        raise TransportUnavailable("the publisher's slots are not in shared memory")
    try:
        fd = os.open(offer["path"], os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TransportUnavailable(
            f"cannot open the publisher's memory, is it another host or user? {error}"
        ) from error
    try:
        if os.fstat(fd).st_size != num_bytes + _NONCE_BYTES:
            raise TransportUnavailable("the publisher's memory has another size: it is on another host")
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        whole = np.frombuffer(mmap.mmap(fd, num_bytes + _NONCE_BYTES, flags, mmap.PROT_READ), np.uint8)
    finally:
        os.close(fd)
    if whole[num_bytes:].tobytes().hex() != offer["nonce"]:
        raise TransportUnavailable("the publisher's memory is not the one it offered: it is on another host")
    return whole[:num_bytes]

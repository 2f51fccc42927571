"""Shared memory on one host: the publisher packs into slots that the subscriber has mapped.

A slot is a memfd: it has no name to leak, does not count against the size of /dev/shm, and the kernel frees
it when the last process that maps it ends. The subscriber opens it through the publisher's
/proc entry, which the kernel allows to the same user only, maps it read-only, and compares a nonce behind the
data to be sure that it is the same memory (containers may share addresses but not process numbers).
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.transports.base import MappedSlots, Outlet, TransportUnavailable
from cosmos_rl_transfer.wire.link import Link

_NONCE_BYTES = 16


class SharedMemory:
    """The shared-memory transport. Linux only."""

    name = "shm"

    def open(self, *, bucket_bytes: int, num_slots: int) -> _Outlet:
        """Make slots in memfds with their pages present."""
        if sys.platform != "linux":
            raise TransportUnavailable(f"shared memory needs Linux's memfd, this is {sys.platform}")
        return _Outlet(bucket_bytes, num_slots)

    def attach(self, link: Link, *, offer: Mapping[str, str], memory: Sequence[Raw]) -> MappedSlots:
        """Map the publisher's slots."""
        if "slots" not in offer:
            raise TransportUnavailable("the publisher's slots are not in shared memory")
        nonce = bytes.fromhex(offer["nonce"])
        return MappedSlots([_map(path, nonce) for path in offer["slots"].split()])


class _Outlet(Outlet):
    keeps_slot = True
    over_link = False
    direct = False

    def __init__(self, bucket_bytes: int, num_slots: int) -> None:
        nonce = os.urandom(_NONCE_BYTES)
        self._fds: list[int] = []
        self.slots: Sequence[Raw] = []
        try:
            for _ in range(num_slots):
                self._fds.append(os.memfd_create("cosmos-rl-weights", os.MFD_CLOEXEC))
            self.slots = [_create(fd, bucket_bytes, nonce) for fd in self._fds]
        except OSError as error:
            self.close()
            raise TransportUnavailable(f"cannot allocate {num_slots} slots of {bucket_bytes} bytes: {error}") from error
        paths = " ".join(f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds)
        self.offer: Mapping[str, str] = {"slots": paths, "nonce": nonce.hex()}

    def close(self) -> None:
        """Close the files; each is unmapped with its last view."""
        for fd in self._fds:
            os.close(fd)
        self._fds, self.slots = [], []


def _create(fd: int, num_bytes: int, nonce: bytes) -> Raw:
    os.ftruncate(fd, num_bytes + _NONCE_BYTES)
    # MAP_POPULATE: a first touch of a page costs ten times a copy into it
    mapped = mmap.mmap(fd, num_bytes + _NONCE_BYTES, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    segment = np.frombuffer(mapped, np.uint8)
    segment[num_bytes:] = np.frombuffer(nonce, np.uint8)
    return segment[:num_bytes]


def _map(path: str, nonce: bytes) -> Raw:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TransportUnavailable(f"the publisher's memory cannot be opened: another host or user? {error}") from error
    try:
        num_bytes = os.fstat(fd).st_size - _NONCE_BYTES
        if num_bytes < 0:
            raise TransportUnavailable("the publisher's memory is not the one it offered: it is on another host")
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        segment = np.frombuffer(mmap.mmap(fd, num_bytes + _NONCE_BYTES, flags, mmap.PROT_READ), np.uint8)
    except OSError as error:
        raise TransportUnavailable(f"the publisher's memory cannot be mapped: {error}") from error
    finally:
        os.close(fd)
    if segment[num_bytes:].tobytes() != nonce:
        raise TransportUnavailable("the publisher's memory is not the one it offered: it is on another host")
    return segment[:num_bytes]

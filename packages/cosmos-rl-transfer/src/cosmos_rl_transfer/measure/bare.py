"""What transports are compared with: the same buckets with nothing around them.

Memory         a copy within this process
RawStream      `sendall` there and `recv_into` here, over loopback
ProcessRead    process_vm_readv out of another process
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys

import numpy as np

from cosmos_rl_transfer.content.digest import Raw
from cosmos_rl_transfer.testing.sample_exchange import WINDOW

FULL = 8
"""Every eighth bucket is a full one, the others are of one byte: as a SamplePublisher's."""
TIMEOUT_S = 60.0
_MODULE = "cosmos_rl_transfer.measure.bare"


class Memory:
    """Buckets in this process."""

    def __init__(self, bucket_bytes: int) -> None:
        self._buckets = [np.ones(bucket_bytes, np.uint8) for _ in range(WINDOW)]
        self._turn = 0

    def ask(self, bucket: int) -> None:
        """Do nothing."""

    def read(self, out: Raw) -> None:
        """Copy."""
        np.copyto(out, self._buckets[self._turn % WINDOW][: out.nbytes])
        self._turn += 1


class RawStream:
    """Buckets that another process sends without a frame."""

    def __init__(self, bucket_bytes: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(TIMEOUT_S)
            port = listener.getsockname()[1]
            self._process = subprocess.Popen([sys.executable, "-m", _MODULE, "send", str(port), str(bucket_bytes)])
            self._socket = listener.accept()[0]

    def ask(self, bucket: int) -> None:
        """Ask for a full bucket, or for one byte."""
        self._socket.sendall(b"f" if bucket % FULL == 0 else b"1")

    def read(self, out: Raw) -> None:
        """Receive in a plain loop."""
        view, done = out.data, 0
        while done < len(view):
            done += self._socket.recv_into(view[done:])


class _Span(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class ProcessRead:
    """Buckets in a process that only holds them."""

    def __init__(self, bucket_bytes: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, "hold", "0", str(bucket_bytes)],
            stdin=subprocess.PIPE,  # it ends with this process
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self._addresses = [int(word) for word in self._process.stdout.readline().split()]
        self._turn = 0

    def ask(self, bucket: int) -> None:
        """Do nothing."""

    def read(self, out: Raw) -> None:
        """Let the kernel copy. Raises OSError where it may not, or gives less."""
        here = _Span(out.ctypes.data, out.nbytes)
        there = _Span(self._addresses[self._turn % WINDOW], out.nbytes)
        pid = self._process.pid
        count = self._libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count != out.nbytes:
            raise OSError(ctypes.get_errno(), f"process_vm_readv gave {count} of {out.nbytes} bytes")
        self._turn += 1


def _send(port: int, buckets: list[Raw]) -> None:
    """Send raw buckets to who asks for them."""
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        turn = 0
        while asked := link.recv(1):
            link.sendall(buckets[turn % WINDOW][: None if asked == b"f" else 1].data)
            turn += 1


def _hold(buckets: list[Raw]) -> None:
    """Tell where buckets lie, and wait for the end."""
    sys.stdout.write(" ".join(str(bucket.ctypes.data) for bucket in buckets) + "\n")
    sys.stdout.flush()
    os.read(0, 1)


if __name__ == "__main__":
    what, port, size = sys.argv[1], *map(int, sys.argv[2:])
    held: list[Raw] = [np.ones(size, np.uint8) for _ in range(WINDOW)]
    if what == "send":
        _send(port, held)
    else:
        _hold(held)

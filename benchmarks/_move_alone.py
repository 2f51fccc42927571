"""Measures transports in turns, beside process_vm_readv, the system call by which UCX reads another process's memory.

python _move_alone.py hold MIB BUCKET_MIB               prints the addresses of two buckets, and waits
python _move_alone.py process_vm_readv MIB BUCKET_MIB   what `doctor.Measurement` starts
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.doctor import Measurement, Speed, measure
from cosmos_rl_transfer.testing.sample_exchange import WINDOW

PROCESS_READ = "process_vm_readv"


def compare(names: Sequence[str], *, mib: int = 64, bucket_mib: int = 4, rounds: int = 7) -> dict[str, Speed]:
    """Measure transports in turns, `mib` MiB each time.

    Raises TransportUnavailable with the reason for one that does not work here.
    """
    measurement_of = partial(Measurement, mib=mib, bucket_mib=bucket_mib)
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(
                measurement_of(name, command=[__file__]) if name == PROCESS_READ else measurement_of(name)
            )
            for name in names
        }
        for _ in range(rounds):
            for measurement in running.values():
                measurement.round()
        return {name: measurement.speed() for name, measurement in running.items()}


class _Span(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class ProcessRead:
    """Buckets in the memory of another process."""

    def __init__(self, bucket_mib: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._process = subprocess.Popen(
            [sys.executable, __file__, "hold", "0", str(bucket_mib)],
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


def hold(bucket_mib: int) -> None:
    """Print the addresses of two buckets and wait for the end of standard input."""
    buckets = [np.ones(bucket_mib << 20, np.uint8) for _ in range(WINDOW)]
    print(*(bucket.ctypes.data for bucket in buckets), flush=True)
    os.read(0, 1)


if __name__ == "__main__":
    name, mib, bucket_mib = sys.argv[1], *map(int, sys.argv[2:])
    if name == "hold":
        hold(bucket_mib)
    else:
        measure(ProcessRead(bucket_mib), np.full(mib << 20, 0, np.uint8), bucket_mib << 20)

"""How fast each transport is by itself, beside a memcpy and a raw stream: each in processes of its own, in turns.

    parent                          child: reads                       its child: serves
    "round"            ->           asks for buckets, two at a time    sends what lies in its slots
    seconds            <-           has them all in warm memory

A round moves the same bytes in the same buckets whatever moves them, out of two buckets at the source.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np

from cosmos_rl_core import plugins
from cosmos_rl_transfer.content.digest import Raw
from cosmos_rl_transfer.errors import TransferError
from cosmos_rl_transfer.measure.bare import FULL, Memory, ProcessRead, RawStream
from cosmos_rl_transfer.testing.sample_exchange import WINDOW, PublisherProcess, SampleReader, Serve
from cosmos_rl_transfer.transports.base import Transport, TransportUnavailable
from cosmos_rl_transfer.transports.select import GROUP

MEMCPY = "memcpy"
RAW_STREAM = "raw stream"
"""One TCP connection over loopback, `sendall` and `recv_into`."""
PROCESS_READ = "process_vm_readv"
"""The system call by which UCX reads another process's memory."""
NIXL_OVER_TCP = "nixl over tcp"
_MODULE = "cosmos_rl_transfer.measure.speed"
_UCX_TCP = {"UCX_TLS": "tcp"}
_ONE_BYTE = 1
_LATENCY_READS = 200
_TIMEOUT_S = 60.0
_ANSWER = "speed "


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured of one transport."""

    gigabytes_per_s: float
    """Median over the rounds, 1e9 bytes."""
    latency_us: float
    """Median time from asking for a bucket of one byte to having it."""
    seconds: tuple[float, ...]
    """Of each round, in order: those of the same place ran one after the other."""


def compare(names: Sequence[str], *, mib: int = 64, bucket_mib: int = 4, rounds: int = 7) -> dict[str, Speed]:
    """Measure transports, and what stands above beside them, in turns, `mib` MiB each time.

    Raises TransportUnavailable with the reason for one that does not work here.
    """
    with ExitStack() as stack:
        running = {name: stack.enter_context(Measurement(name, mib=mib, bucket_mib=bucket_mib)) for name in names}
        for _ in range(rounds):
            for measurement in running.values():
                measurement.round()
        return {name: measurement.speed() for name, measurement in running.items()}


class Measurement:
    """A process that moves `mib` MiB a round when told to."""

    def __init__(
        self, name: str, *, mib: int = 64, bucket_mib: int = 4, environment: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, name, str(mib), str(bucket_mib)],
            env={**os.environ, **(_UCX_TCP if name == NIXL_OVER_TCP else {}), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.output: list[str] = []
        """Lines that libraries wrote."""
        self._num_bytes = mib << 20
        self._latency_us = 0.0
        self._seconds: list[float] = []

    def __enter__(self) -> Measurement:
        try:
            self._latency_us = self._answer()
            self.round()  # takes page faults and connections
            self._seconds.clear()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def round(self) -> None:
        """Measure one more round. Raises TransportUnavailable with the process's last words if it ends."""
        assert self._process.stdin is not None
        self._process.stdin.write("round\n")
        self._process.stdin.flush()
        self._seconds.append(self._answer())

    def speed(self, rounds: int = 0) -> Speed:
        """Return what was measured, after so many more rounds."""
        for _ in range(rounds):
            self.round()
        return Speed(self._num_bytes / median(self._seconds) / 1e9, self._latency_us, tuple(self._seconds))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        deadline = threading.Timer(_TIMEOUT_S, self._process.kill)
        deadline.start()
        try:
            for line in self._process.stdout:
                if line.startswith(_ANSWER):
                    return float(line.removeprefix(_ANSWER))
                self.output.append(line)
        finally:
            deadline.cancel()
        words = self._process.communicate()[1].strip().splitlines()
        raise TransportUnavailable(words[-1] if words else "the process that measures it ended without a word")


class _Source(Protocol):
    """Where a round's buckets come from."""

    def ask(self, bucket: int) -> None:
        """Ask for a bucket."""
        ...

    def read(self, out: Raw) -> None:
        """Have the oldest bucket that was asked for in `out`."""
        ...


class _Published:
    """Buckets of a SamplePublisher in another process."""

    def __init__(self, transport: str, memory: Raw, bucket_bytes: int) -> None:
        self._publisher = PublisherProcess.of(transport, bucket_bytes=bucket_bytes)
        end: Transport = plugins.load(GROUP, transport)()
        link = self._publisher.connect(timeout_s=_TIMEOUT_S)
        self._reader = SampleReader(link, end, bucket_bytes=bucket_bytes, memory=[memory])

    def ask(self, bucket: int) -> None:
        """Ask for what lies in the next slot."""
        self._reader.ask(Serve.AGAIN, bucket)

    def read(self, out: Raw) -> None:
        """Receive into `out`, or copy there what can be seen."""
        received = self._reader.receive(self._reader.announced(), out=out)
        if received is not out:
            np.copyto(out, received)


def _move(source: _Source, out: Raw, bucket_bytes: int) -> None:
    buckets = [out[at : at + bucket_bytes] for at in range(0, out.nbytes, bucket_bytes)]
    for i in range(min(WINDOW, len(buckets))):
        source.ask(FULL * i)
    for i, bucket in enumerate(buckets):
        source.read(bucket)
        if i + WINDOW < len(buckets):
            source.ask(FULL * (i + WINDOW))


def _latency_us(source: _Source, out: Raw) -> float:
    seconds = []
    for _ in range(_LATENCY_READS):
        started = time.perf_counter()
        source.ask(_ONE_BYTE)
        source.read(out[:1])
        seconds.append(time.perf_counter() - started)
    return median(seconds) * 1e6


def _source(name: str, memory: Raw, bucket_bytes: int) -> _Source:
    plain = {MEMCPY: Memory, RAW_STREAM: RawStream, PROCESS_READ: ProcessRead}
    if name in plain:
        return plain[name](bucket_bytes)
    return _Published("nixl" if name == NIXL_OVER_TCP else name, memory, bucket_bytes)


def _answer(value: float) -> None:
    sys.stdout.write(f"{_ANSWER}{value}\n")
    sys.stdout.flush()


def _run(name: str, mib: int, bucket_mib: int) -> None:
    """Measure the latency, then a round for each line on standard input; answer with seconds."""
    out = np.full(mib << 20, 0, np.uint8)
    try:
        source = _source(name, out, bucket_mib << 20)
    except (TransportUnavailable, TransferError) as error:
        sys.exit(str(error))
    _answer(_latency_us(source, out))
    for _ in sys.stdin:
        started = time.perf_counter()
        _move(source, out, bucket_mib << 20)
        _answer(time.perf_counter() - started)


if __name__ == "__main__":
    _run(sys.argv[1], *map(int, sys.argv[2:]))

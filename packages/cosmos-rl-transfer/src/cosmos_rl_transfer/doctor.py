"""Which transports work on this machine, and how fast each is, measured between processes beside a memcpy.

    this process                    child: reads                       its child: sends
    "round"            ->           asks for buckets, two at a time    sends what is in its slots
    seconds            <-           has them all in warm memory

A round moves the same bytes in the same buckets over every transport. Nothing is packed, hashed or landed.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

import numpy as np

from cosmos_rl_core import plugins
from cosmos_rl_core.interfaces import Check
from cosmos_rl_core.launch.versions import too_old
from cosmos_rl_core.observe.console import table
from cosmos_rl_core.processes import rdma_devices
from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.errors import TransferError
from cosmos_rl_transfer.testing.sample_exchange import WINDOW, PublisherProcess, SampleReader, Serve
from cosmos_rl_transfer.transports.base import Transport, TransportUnavailable
from cosmos_rl_transfer.transports.select import GROUP, preference

MEMCPY = "memcpy"
RAW_STREAM = "raw stream"
"""One TCP connection over loopback, `sendall` and `recv_into`."""
NIXL_OVER_TCP = "nixl over tcp"
TIMEOUT_S = 60.0
_COMMAND = ("-m", "cosmos_rl_transfer.doctor")
_UCX_TCP = {"UCX_TLS": "tcp"}
_LATENCY_READS = 200
_ANSWER = "speed "
FULL = 8
"""Every eighth bucket of a SamplePublisher is full; the next one has one byte."""

FIXES = {
    "shm": "the container must allow memfd_create and passing of descriptors",
    "nixl": "without it shm and tcp are used",
}

_SHOW_PATH = {"UCX_PROTO_INFO": "y"}
"""Makes UCX print a table of its choice for each kind of operation."""
_PATH_HEAD = "remote memory read by"
_PATH_ROW = re.compile(r"\|\s*(?P<range>\S+\.\.\S+)\s*\|\s*(?P<how>[^|]+?)\s*\|\s*(?P<lane>[^|]+?)\s*\|")


@dataclass(frozen=True, slots=True)
class TransportResult:
    """Result of one transport, or of a baseline."""

    name: str
    works: bool
    reason: str
    """The reason it does not work; or its mode, if there are several."""
    gigabytes_per_s: float | None = None
    """Of 4 MiB buckets into warm memory, 1e9 bytes; None where it was not measured."""
    latency_us: float | None = None
    """From the request for one byte to its arrival."""


def diagnose(*, mib: int = 64, rounds: int = 5) -> list[TransportResult]:
    """Try every transport; some twenty seconds. One that does not work is a finding, not an error."""
    results = [
        _measured(MEMCPY, "one thread", mib, rounds),
        _measured(RAW_STREAM, "one connection over loopback, nothing around it", mib, rounds),
        _measured("shm", "a copy out of the publisher's slot", mib, rounds),
        _measured("tcp", "over loopback", mib, rounds),
        _measured("nixl", "", mib, rounds),
        _measured(NIXL_OVER_TCP, "what NIXL does where reading another process is forbidden", mib, rounds),
    ]
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [*results, _collective(), _network(rdma_devices()), *_weights(gpus), _versions()]


def checks() -> Iterator[Check]:
    """Yield the lines of `cosmos-rl doctor`: transports that "auto" chooses from, measured for a few seconds."""
    results = [
        _measured(name, how, 16, 3) for name, how in (("shm", "one copy"), ("tcp", "over loopback"), ("nixl", ""))
    ]
    works = {one.name for one in results if one.works}
    for one in results:
        if one.works:
            text = f"{one.gigabytes_per_s:.1f} GB/s, {one.latency_us:.0f} us, {one.reason}"
            yield Check("ok", f"transport {one.name}", text)
        else:
            bad = one.name == "tcp"  # the one that works everywhere
            yield Check("bad" if bad else "note", f"transport {one.name}", one.reason, "" if bad else FIXES[one.name])
    if not works:
        return
    choice = next((name for name in preference() if name in works), preference()[-1])
    yield Check("ok", "transport auto", f"offers {choice}; python -m cosmos_rl_transfer doctor measures all")


def render(findings: Sequence[TransportResult]) -> str:
    """Return a table, and the transport that "auto" chooses."""
    rows = [
        (
            finding.name,
            "yes" if finding.works else "no",
            "-" if finding.gigabytes_per_s is None else f"{finding.gigabytes_per_s:.1f}",
            "-" if finding.latency_us is None else f"{finding.latency_us:.0f}",
            finding.reason,
        )
        for finding in findings
    ]
    works = {finding.name for finding in findings if finding.works}
    choice = next(name for name in preference() if name in works or name == preference()[-1])
    listing = table(rows, header=("transport", "works", "GB/s", "latency us", "how, or why not"))
    return f'{listing}\n\ntransport = "auto" offers {choice} here'


def ucx_path(output: str) -> str:
    """Return how UCX reads remote memory, from its output with UCX_PROTO_INFO: "zero-copy over cma/memory"."""
    _, _, after = output.partition(_PATH_HEAD)
    rows = []
    for line in after.splitlines()[1:]:
        row = _PATH_ROW.search(line)
        if row is not None:
            rows.append(f"{row['how']} over {row['lane']}")
        elif rows:
            break
    return ", ".join(dict.fromkeys(rows)) or "UCX does not report its path"


def _measured(name: str, how: str, mib: int, rounds: int) -> TransportResult:
    try:
        with Measurement(name, mib=mib, environment=_SHOW_PATH if name == "nixl" else {}) as measurement:
            speed = measurement.speed(rounds)
            how = how or ucx_path("".join(measurement.output))
            return TransportResult(name, True, how, speed.gigabytes_per_s, speed.latency_us)
    except TransportUnavailable as error:
        return TransportResult(name, False, str(error))


def _collective() -> TransportResult:
    import torch.distributed as dist

    if not dist.is_available():
        return TransportResult("collective", False, "this build of torch has no torch.distributed")
    built = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    has = ", ".join(name for name, is_built in built.items() if is_built) or "no backend"
    return TransportResult("collective", any(built.values()), f"needs a process group of your own; torch has {has}")


def _network(devices: Sequence[str]) -> TransportResult:
    rdma = f"NIXL uses {', '.join(devices)}" if devices else f"no device in {Path('/sys/class/infiniband')}"
    return TransportResult("rdma", bool(devices), rdma)


def _weights(gpus: int) -> list[TransportResult]:
    """Return the memory through which weights leave a process that trains on one of `gpus` GPUs, 0 for none."""
    if not gpus:
        return [TransportResult("weights", True, "pageable"), TransportResult("cuda ipc", False, "no CUDA device")]
    ipc = 'not tried here; "auto" tests it between a policy and an engine'
    return [TransportResult("weights", True, "pinned host"), TransportResult("cuda ipc", False, ipc)]


def _versions() -> TransportResult:
    old = too_old()
    return TransportResult("versions", not old, "; ".join(old) or "all libraries are as new as those of the tests")


@dataclass(frozen=True, slots=True)
class Speed:
    """The measured speed of one transport."""

    gigabytes_per_s: float
    """Median over the rounds, 1e9 bytes."""
    latency_us: float
    """Median time from the request for a bucket of one byte to its arrival."""
    seconds: tuple[float, ...]
    """Of each round, in order."""


class Measurement:
    """A child process that moves `mib` MiB a round."""

    def __init__(
        self,
        name: str,
        *,
        mib: int = 64,
        bucket_mib: int = 4,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = _COMMAND,
    ) -> None:
        """Start Python with `command` and the arguments name, mib and bucket_mib; it has to call `measure`."""
        self._process = subprocess.Popen(
            [sys.executable, *command, name, str(mib), str(bucket_mib)],
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
        """Measure one more round. Raises TransportUnavailable with the last line of the process's errors if it ends."""
        assert self._process.stdin is not None
        self._process.stdin.write("round\n")
        self._process.stdin.flush()
        self._seconds.append(self._answer())

    def speed(self, rounds: int = 0) -> Speed:
        """Measure so many more rounds and return the speed over all."""
        for _ in range(rounds):
            self.round()
        return Speed(self._num_bytes / median(self._seconds) / 1e9, self._latency_us, tuple(self._seconds))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        deadline = threading.Timer(TIMEOUT_S, self._process.kill)
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


class BucketSource(Protocol):
    """Where a round's buckets come from."""

    def ask(self, bucket: int) -> None:
        """Request a bucket: number n is full where n is a multiple of `FULL`, else of one byte."""
        ...

    def read(self, out: Raw) -> None:
        """Write the bucket that was requested first into `out`."""
        ...


class _Memory:
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


class _RawStream:
    """Buckets that another process sends without a frame."""

    def __init__(self, bucket_bytes: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(TIMEOUT_S)
            port = listener.getsockname()[1]
            self._process = subprocess.Popen([sys.executable, *_COMMAND, "send", str(port), str(bucket_bytes)])
            self._socket = listener.accept()[0]

    def ask(self, bucket: int) -> None:
        """Request a full bucket, or one byte."""
        self._socket.sendall(b"f" if bucket % FULL == 0 else b"1")

    def read(self, out: Raw) -> None:
        """Receive in a plain loop."""
        view, done = out.data, 0
        while done < len(view):
            done += self._socket.recv_into(view[done:])


class _Published:
    """Buckets of a SamplePublisher in another process."""

    def __init__(self, transport: str, memory: Raw, bucket_bytes: int) -> None:
        self._publisher = PublisherProcess.of(transport, bucket_bytes=bucket_bytes)
        end: Transport = plugins.load(GROUP, transport)()
        link = self._publisher.connect(timeout_s=TIMEOUT_S)
        self._reader = SampleReader(link, end, bucket_bytes=bucket_bytes, memory=[memory])

    def ask(self, bucket: int) -> None:
        """Request the content of the next slot."""
        self._reader.ask(Serve.AGAIN, bucket)

    def read(self, out: Raw) -> None:
        """Receive into `out`, or copy from a view into `out`."""
        received = self._reader.receive(self._reader.announced(), out=out)
        if received is not out:
            np.copyto(out, received)


def measure(source: BucketSource, out: Raw, bucket_bytes: int) -> None:
    """In the child: print the latency, then the seconds of a round into `out` for each line of standard input."""
    _print(_latency_us(source, out))
    for _ in sys.stdin:
        started = time.perf_counter()
        _move(source, out, bucket_bytes)
        _print(time.perf_counter() - started)


def _move(source: BucketSource, out: Raw, bucket_bytes: int) -> None:
    buckets = [out[at : at + bucket_bytes] for at in range(0, out.nbytes, bucket_bytes)]
    for i in range(min(WINDOW, len(buckets))):
        source.ask(FULL * i)
    for i, bucket in enumerate(buckets):
        source.read(bucket)
        if i + WINDOW < len(buckets):
            source.ask(FULL * (i + WINDOW))


def _latency_us(source: BucketSource, out: Raw) -> float:
    seconds = []
    for _ in range(_LATENCY_READS):
        started = time.perf_counter()
        source.ask(1)
        source.read(out[:1])
        seconds.append(time.perf_counter() - started)
    return median(seconds) * 1e6


def _print(value: float) -> None:
    sys.stdout.write(f"{_ANSWER}{value}\n")
    sys.stdout.flush()


def _send(port: int, bucket_bytes: int) -> None:
    """In the child of `_RawStream`: send raw buckets, or one byte, on request."""
    buckets = [np.ones(bucket_bytes, np.uint8) for _ in range(WINDOW)]
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        turn = 0
        while request := link.recv(1):
            link.sendall(buckets[turn % WINDOW][: None if request == b"f" else 1].data)
            turn += 1


def _main(name: str, first: int, second: int) -> None:
    """Send raw buckets of `second` bytes to port `first`, or measure `first` MiB in buckets of `second` MiB."""
    if name == "send":
        _send(first, second)
        return
    out, bucket_bytes = np.full(first << 20, 0, np.uint8), second << 20
    plain = {MEMCPY: _Memory, RAW_STREAM: _RawStream}
    try:
        if name in plain:
            source = plain[name](bucket_bytes)
        else:
            source = _Published("nixl" if name == NIXL_OVER_TCP else name, out, bucket_bytes)
    except (TransportUnavailable, TransferError) as error:
        sys.exit(str(error))
    measure(source, out, bucket_bytes)


if __name__ == "__main__":
    _main(sys.argv[1], *map(int, sys.argv[2:]))

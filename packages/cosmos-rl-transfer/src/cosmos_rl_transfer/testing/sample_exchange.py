"""Made-up buckets between two ends of a transport: what its conformance suite and its measurements run on.

    SamplePublisher      answers reads out of slots, or out of live memory it has exposed; in a thread or a process
    SampleReader         asks for buckets and knows what has to come

`ReadBuckets.lease` says how buckets are to be served, `ReadBuckets.buckets` which ones; two may be asked for at a time.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import count

import numpy as np

from cosmos_rl_core import plugins
from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.errors import PeerLost
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.transports.base import ByteRun, Inlet, Transport, TransportUnavailable
from cosmos_rl_transfer.transports.select import GROUP
from cosmos_rl_transfer.wire.link import Link
from cosmos_rl_transfer.wire.messages import PROTOCOL, Data, ReadBuckets, TransferHello, TransferWelcome

WINDOW = 2
"""Buckets asked for at a time, and slots for each reader."""
_GAP_BYTES = 100
_TIMEOUT_S = 30.0
_ADDRESS = "serving at "


class Serve(IntEnum):
    """The way a bucket is served."""

    SLOT = 0
    """Packed into a slot."""
    RUNS = 1
    """In a slot, in runs with gaps between them."""
    LIVE = 2
    """In runs with gaps, out of memory that was exposed when the publisher opened."""
    MOVED = 3
    """The same out of memory that is exposed only now."""
    AGAIN = 4
    """The content of the slot, as fast as possible."""
    SILENT = 5
    """Announced, but the bytes are never sent."""
    VANISH = 6
    """Announced, then the publisher closes everything."""


def num_bytes(bucket: int, bucket_bytes: int) -> int:
    """Return the size of a bucket: from one byte to all, odd ones too."""
    sizes = (bucket_bytes, 1, bucket_bytes - 1, 4095, 4096, 4097, bucket_bytes // 3, 2)
    return min(sizes[bucket % len(sizes)], bucket_bytes)


def places(serve: Serve, size: int) -> Iterator[tuple[int, int]]:
    """Yield place and bytes of each run of a bucket."""
    if serve not in (Serve.RUNS, Serve.LIVE, Serve.MOVED) or size < 10 * _GAP_BYTES:
        yield 0, size
        return
    part = size // 4
    for at in range(0, size - part, part):
        yield at, part - _GAP_BYTES


def content(bucket: int, size: int) -> Raw:
    """Return the bytes of a bucket, uint8 [size]."""
    return np.random.default_rng(bucket).integers(0, 256, size, np.uint8)


class SamplePublisher:
    """An outlet and the threads' or process's loop that answers for it."""

    def __init__(self, transport: Transport, *, bucket_bytes: int, num_readers: int = 1) -> None:
        self.transport, self.bucket_bytes = transport, bucket_bytes
        self.outlet = transport.open(bucket_bytes=bucket_bytes, num_slots=WINDOW * num_readers)
        self._live: list[Raw] = [np.zeros(bucket_bytes, np.uint8) for _ in self.outlet.slots]
        self.outlet.expose(self._live)

    def serve(self, link: Link, reader: int = 0) -> None:
        """Answer one reader until it leaves."""
        try:
            link.receive()
            name, offer = self.transport.name, dict(self.outlet.offer)
            link.send(TransferWelcome(Manifest(()).encode(), 0, None, self.bucket_bytes, name, offer))
            turns = count()
            while True:
                request: ReadBuckets = link.receive()
                for bucket in request.buckets:
                    self._answer(link, Serve(request.lease), bucket, WINDOW * reader + next(turns) % WINDOW)
        except PeerLost:
            return

    def close(self) -> None:
        """Close the outlet."""
        self.outlet.close()

    def _answer(self, link: Link, serve: Serve, bucket: int, slot: int) -> None:
        size = num_bytes(bucket, self.bucket_bytes)
        if serve is Serve.MOVED:
            self._live = [np.zeros(self.bucket_bytes, np.uint8) for _ in self._live]
            self.outlet.expose(self._live)
        from_slot = serve not in (Serve.LIVE, Serve.MOVED)
        memory = self.outlet.slots[slot] if from_slot else self._live[slot]
        if serve is not Serve.AGAIN:
            memory[:size] = content(bucket, size)
        runs = [ByteRun(memory[at : at + length], at) for at, length in places(serve, size)]
        located = self.outlet.locate(runs)
        number = slot if from_slot else -1
        link.send(Data(bucket=bucket, num_bytes=size, hash=0, sums=(), slot=number, runs=located))
        if serve is Serve.VANISH:
            self.close()
            link.close()
        if serve not in (Serve.SILENT, Serve.VANISH):
            self.outlet.send(link, runs, num_bytes=size)


class SampleReader:
    """A link with an inlet."""

    def __init__(
        self, link: Link, transport: Transport, *, bucket_bytes: int, memory: Sequence[Raw] | None = None
    ) -> None:
        """Say hello and attach. memory: what will be received into, if not two buffers of its own."""
        self.link = link
        self.buffers = memory or [np.full(bucket_bytes, 0, np.uint8) for _ in range(WINDOW)]
        link.send(TransferHello(PROTOCOL))
        self.welcome: TransferWelcome = link.receive()
        self.inlet: Inlet = transport.attach(link, offer=self.welcome.offer, memory=self.buffers)

    def ask(self, serve: Serve, bucket: int) -> None:
        """Ask for a bucket; whoever asks has done with the one `WINDOW` places before."""
        self.link.send(ReadBuckets(serve, (bucket,)))

    def announced(self) -> Data:
        """Wait for the head of the oldest bucket that was asked for."""
        return self.link.receive()

    def receive(self, data: Data, *, out: Raw | None = None) -> Raw:
        """Receive the bytes of an announced bucket, into a buffer if not into `out`."""
        if out is None:
            out = self.buffers[data.bucket % WINDOW][: data.num_bytes]
        return self.inlet.receive(data, out=None if self.inlet.views else out)

    def close(self) -> None:
        """Leave."""
        self.inlet.close()
        self.link.close()


class PublisherProcess:
    """A SamplePublisher in a process of its own."""

    def __init__(self, *command: str, environment: Mapping[str, str] | None = None) -> None:
        """Start Python with `command`, which ends in `serve_process`."""
        self._token = secrets.token_bytes(16)
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @classmethod
    def of(cls, transport: str, *, bucket_bytes: int, environment: Mapping[str, str] | None = None) -> PublisherProcess:
        """Serve a transport by name, or by "module:attribute" of its class."""
        return cls("-m", __name__, transport, str(bucket_bytes), environment=environment)

    def connect(self, *, timeout_s: float) -> Link:
        """Connect the one reader it serves. Raises TransportUnavailable with its last words if it does not come up."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(self._token.hex() + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:  # libraries write there too
            if line.startswith(_ADDRESS):
                return Link.connect(line.removeprefix(_ADDRESS).strip(), token=self._token, timeout_s=timeout_s)
        words = self._process.communicate()[1].strip().splitlines()
        raise TransportUnavailable(words[-1] if words else "the publisher's process ended without a word")

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def close(self) -> None:
        """End it at once (SIGKILL). May be called twice."""
        self._process.kill()
        self._process.communicate()  # waits, and closes the pipes


def serve_process(transport: Transport, *, bucket_bytes: int) -> None:
    """Serve one reader; the token comes on standard input, the address goes to standard output."""
    publisher = SamplePublisher(transport, bucket_bytes=bucket_bytes)
    token = bytes.fromhex(sys.stdin.readline())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sys.stdout.write(f"{_ADDRESS}127.0.0.1:{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        link = Link(listener.accept()[0], timeout_s=_TIMEOUT_S, side="publisher")
    link.authenticate(token)
    link.set_deadlines(timeout_s=_TIMEOUT_S, idle_s=None)
    publisher.serve(link)
    publisher.close()


if __name__ == "__main__":
    try:
        serve_process(plugins.load(GROUP, sys.argv[1])(), bucket_bytes=int(sys.argv[2]))
    except TransportUnavailable as error:
        sys.exit(str(error))

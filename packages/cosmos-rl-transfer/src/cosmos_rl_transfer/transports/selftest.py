"""The self-test of a path from GPU to GPU, which "auto" takes only after it.

    publisher                                                       subscriber
    Welcome(between_gpus, ipc_domain)                 ------->      CUDA IPC within a host, else NIXL on VRAM
                                                      <-------      TryTransport
    opens the outlet, for all subscribers
    TransportOffer, or Refused with the reason        ------->      attaches
    a few rounds over it, then over what is taken otherwise:
                                                      <-------      ReadPattern
    random bytes of its GPU into a slot: Data         ------->      receives them on its GPU, and compares their hash
                                                      <-------      EndPattern
    Revoked: had others the slot meanwhile?           ------->
                                                      <-------      Join(transport): the subscriber decides

A driver that hangs must not stop the weights: both sides use it in another thread here, for a limited time. The
publisher's side is in publish/pattern.py.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from cosmos_rl_transfer.content.gpu import SideStream, pinned
from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.errors import TransferError
from cosmos_rl_transfer.transports.base import Inlet, Transport, TransportUnavailable
from cosmos_rl_transfer.wire import messages as m
from cosmos_rl_transfer.wire.link import Link

T = TypeVar("T")
R = TypeVar("R", bound=m.Reply)

PATTERN_BYTES = 4 << 20
NUM_ROUNDS = 4
"""Over each path; the first of them takes connections and is not counted."""
LIMIT_S = 10.0
"""Longest wait for a driver."""


def driver_limit_s(timeout_s: float) -> float:
    """Return the longest wait for a driver where the other side waits `timeout_s` for an answer."""
    return min(LIMIT_S, timeout_s / 4)


def ipc_domain() -> str:
    """Name the processes that may share GPU memory with this one: those of its kernel and IPC namespace."""
    if sys.platform != "linux":
        return ""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/ipc')}"


class DriverHangs(TransportUnavailable):
    """Work on a GPU was given up; the thread that waits for it is left."""


def in_time(work: Callable[[], T], *, limit_s: float, late: Callable[[T], object] = lambda _: None) -> T:
    """Return what `work` returns. Raises TransportUnavailable where it fails, DriverHangs after `limit_s`.

    late: called with a result that comes afterwards.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # raised below
            future.set_exception(error)

    threading.Thread(target=run, name="weights-selftest", daemon=True).start()
    try:
        return future.result(limit_s)
    except (RuntimeError, OSError) as error:  # of CUDA, NIXL and their transports
        if future.done():
            raise TransportUnavailable(str(error) or type(error).__name__) from error
        future.add_done_callback(lambda done: None if done.exception() else late(done.result()))
        raise DriverHangs(f"the driver did not answer within {limit_s:g} s") from error


@dataclass(slots=True)
class SelfTest:
    """Tests paths to a subscriber's GPU. After a driver has hung it tests nothing any more."""

    device: torch.device
    limit_s: float = LIMIT_S
    clock: Callable[[], float] = time.perf_counter
    hung: DriverHangs | None = None
    side: SideStream | None = None
    """Made with the first test: a copy that hangs must be before none of the weights."""

    def trial(self, link: Link, welcome: m.TransferWelcome, *, memory: Sequence[Raw]) -> Trial | None:
        """Return the path to test with a publisher; None if it has none. memory: of the receiver, as in `attach`."""
        name = "cuda_ipc" if welcome.ipc_domain and welcome.ipc_domain == ipc_domain() else "nixl_vram"
        if name not in welcome.between_gpus:
            return None
        self.side = self.side or SideStream(self.device)
        return Trial(self, self.side, name, link, memory, num_bytes=min(PATTERN_BYTES, welcome.bucket_bytes))


@dataclass(frozen=True, slots=True)
class Trial:
    """A path from one publisher's GPU."""

    test: SelfTest
    side: SideStream
    name: str
    """Of the transport."""
    link: Link
    memory: Sequence[Raw]
    num_bytes: int
    """Of a pattern."""

    def passed(self, kind: Transport, *, than: str, inlet: Inlet) -> Inlet:
        """Return an end of `kind` that is exact, and faster than `inlet`, which is one of the transport `than`.

        Raises TransportUnavailable with the reason, and PeerLost.
        """
        if self.test.hung is not None:
            raise self.test.hung
        try:
            return self._passed(kind, than=than, inlet=inlet)
        except TransportUnavailable as error:
            self.link.check()
            if isinstance(error, DriverHangs):
                self.test.hung = error
            raise

    def _passed(self, kind: Transport, *, than: str, inlet: Inlet) -> Inlet:
        self.link.send(m.TryTransport(kind.name))
        offer = _answer(self.link, m.TransportOffer).offer
        attach = partial(kind.attach, self.link, offer=offer, memory=self.memory)
        limit_s = min(self.test.limit_s, driver_limit_s(self.link.timeout_s))
        tested = in_time(attach, limit_s=limit_s, late=lambda inlet: inlet.close())
        with ExitStack() as on_error:
            on_error.callback(tested.close)
            try:
                seconds = self._seconds(kind.name, tested, limit_s=limit_s)
            except DriverHangs:
                on_error.pop_all()  # a thread is in it
                raise
            other = self._seconds(than, inlet, limit_s=None)
            if seconds >= other:
                speeds = " against ".join(f"{self.num_bytes / each / 1e9:.1f}" for each in (seconds, other))
                raise TransportUnavailable(f"it is no faster than {than}: {speeds} GB/s")
            on_error.pop_all()
        return tested

    def _seconds(self, transport: str, inlet: Inlet, *, limit_s: float | None) -> float:
        """Return the seconds of the fastest round. limit_s: for the driver; None trusts the transport."""
        fastest = math.inf
        for number in range(NUM_ROUNDS):
            began = self.test.clock()
            self.link.send(m.ReadPattern(transport, number))
            data = _answer(self.link, m.Data)
            if data.num_bytes != self.num_bytes:
                raise TransferError(f"a pattern of {data.num_bytes} bytes came in place of {self.num_bytes}")
            receive = partial(self._received, inlet, data, self.memory[0])
            ended, exact = receive() if limit_s is None else in_time(receive, limit_s=limit_s)
            self.link.send(m.EndPattern())
            if _answer(self.link, m.Revoked).revoked:
                continue
            if limit_s is not None and not exact:
                raise TransportUnavailable("other bytes arrived than were sent")
            if number:
                fastest = min(fastest, ended - began)
        return fastest

    def _received(self, inlet: Inlet, data: m.Data, memory: Raw) -> tuple[float, bool]:
        """Return when the bytes of a pattern were on this GPU, and whether they are right."""
        received = inlet.receive(data, out=None if inlet.views else memory[: data.num_bytes])
        with self.side.current():
            here = torch.empty(data.num_bytes, dtype=torch.uint8, device=self.side.device)
            if not isinstance(received, Tensor):
                host = pinned(data.num_bytes)
                np.copyto(host.numpy(), received)
                received = host
            here.copy_(received, non_blocking=True)
        self.side.mark().synchronize()
        ended = self.test.clock()
        return ended, xxhash.xxh3_64_intdigest(self.side.to_host(here, torch.uint8).numpy().data) == data.hash


def _answer(link: Link, kind: type[R]) -> R:
    reply = link.receive()
    if isinstance(reply, m.TransferRefused):
        raise TransportUnavailable(reply.reason)
    if not isinstance(reply, kind):
        raise TransferError(f"the publisher replied {reply}; {kind.__name__} was expected")
    return reply

"""The self-test of a path from GPU to GPU, which "auto" takes only after it.

    publisher                                                       subscriber
    Welcome(between_gpus, ipc_domain)                 ------->      CUDA IPC within a host, else NIXL on VRAM
                                                      <-------      TryTransport
    opens the outlet, for all subscribers
    TransportOffer, or Refused with the reason        ------->      attaches
    a few rounds over it, then over what is taken otherwise:
                                                      <-------      ReadPattern
    random bytes of its GPU into a slot: Data         ------->      receives them on its GPU, and compares their hash
                                                      <-------      WasRevoked
    Revoked: had others the slot meanwhile?           ------->
                                                      <-------      Join(transport): the subscriber decides

A driver that hangs must not stop the weights: both sides use it in another thread here, for a limited time. The
publisher's side is in publish/pattern.py.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from cosmos_rl_core.processes import in_daemon_thread
from cosmos_rl_transfer.content.gpu import SideStream, pinned
from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.errors import TransferError
from cosmos_rl_transfer.transports.base import Inlet, Transport, TransportUnavailable
from cosmos_rl_transfer.wire import messages as m
from cosmos_rl_transfer.wire.link import Link

T = TypeVar("T")

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
    future = in_daemon_thread(work, name="weights-selftest")
    try:
        return future.result(limit_s)
    except (RuntimeError, OSError) as error:  # of CUDA, NIXL and their transports
        if future.done() and future.exception() is error:  # it may also have ended just after the wait
            raise TransportUnavailable(str(error) or type(error).__name__) from error
        future.add_done_callback(lambda done: None if done.exception() else late(done.result()))
        raise DriverHangs(f"the driver did not answer within {limit_s:g} s") from error


def path_from(source: m.TransferWelcome) -> str:
    """Return the transport to test with a publisher; empty if it has none."""
    name = "cuda_ipc" if source.ipc_domain and source.ipc_domain == ipc_domain() else "nixl_vram"
    return name if name in source.between_gpus else ""


@dataclass
class SelfTest:
    """Tests paths to a subscriber's GPU. After a driver has hung it tests nothing any more."""

    device: torch.device
    limit_s: float = LIMIT_S
    clock: Callable[[], float] = time.perf_counter
    hung: DriverHangs | None = None

    @cached_property
    def side(self) -> SideStream:
        """Made with the first test: a copy that hangs must be before none of the weights."""
        return SideStream(self.device)

    def passed(
        self, kind: Transport, link: Link, *, memory: Sequence[Raw], num_bytes: int, than: str, inlet: Inlet
    ) -> Inlet:
        """Return an end of `kind` that is exact, and faster than `inlet`, which is one of the transport `than`.

        memory: of the receiver, as in `attach`. num_bytes: of a pattern.

        Raises TransportUnavailable with the reason, and PeerLost.
        """
        if self.hung is not None:
            raise self.hung
        try:
            link.send(m.TryTransport(kind.name))
            offered = m.expected(link.receive(), m.TransportOffer, refused=TransportUnavailable)
            attach = partial(kind.attach, link, offer=offered.offer, memory=memory)
            limit_s = min(self.limit_s, driver_limit_s(link.timeout_s))
            tested = in_time(attach, limit_s=limit_s, late=lambda inlet: inlet.close())
            with ExitStack() as on_error:
                on_error.callback(tested.close)
                seconds_over = partial(self._seconds, link, memory[0][:num_bytes])
                try:
                    seconds = seconds_over(kind.name, tested, limit_s=limit_s)
                except DriverHangs:
                    on_error.pop_all()  # a thread is in it
                    raise
                other = seconds_over(than, inlet, limit_s=None)
                if seconds >= other:
                    speeds = " against ".join(f"{num_bytes / each / 1e9:.1f}" for each in (seconds, other))
                    raise TransportUnavailable(f"it is no faster than {than}: {speeds} GB/s")
                on_error.pop_all()
            return tested
        except TransportUnavailable as error:
            link.check()
            if isinstance(error, DriverHangs):
                self.hung = error
            raise

    def _seconds(self, link: Link, out: Raw, transport: str, inlet: Inlet, *, limit_s: float | None) -> float:
        """Return the seconds of the fastest round. limit_s: for the driver; None trusts the transport."""
        fastest = math.inf
        for number in range(NUM_ROUNDS):
            began = self.clock()
            link.send(m.ReadPattern(transport, number))
            data = m.expected(link.receive(), m.Data, refused=TransportUnavailable)
            if data.num_bytes != out.nbytes:
                raise TransferError(f"a pattern of {data.num_bytes} bytes came in place of {out.nbytes}")
            receive = partial(self._received, inlet, data, out)
            ended, exact = receive() if limit_s is None else in_time(receive, limit_s=limit_s)
            link.send(m.WasRevoked(m.PATTERN))
            if m.expected(link.receive(), m.Revoked).revoked:
                continue
            if limit_s is not None and not exact:
                raise TransportUnavailable("other bytes arrived than were sent")
            if number:
                fastest = min(fastest, ended - began)
        return fastest

    def _received(self, inlet: Inlet, data: m.Data, out: Raw) -> tuple[float, bool]:
        """Return when the bytes of a pattern were on this GPU, and whether they are right."""
        received = inlet.receive(data, out=None if inlet.views else out)
        with self.side.current():
            here = torch.empty(data.num_bytes, dtype=torch.uint8, device=self.side.device)
            if not isinstance(received, Tensor):
                host = pinned(data.num_bytes)
                np.copyto(host.numpy(), received)
                received = host
            here.copy_(received, non_blocking=True)
        self.side.mark().synchronize()
        ended = self.clock()
        return ended, xxhash.xxh3_64_intdigest(self.side.to_host(here, torch.uint8).numpy().data) == data.hash

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
    results: list[T] = []
    errors: list[Exception] = []
    ended, guard = threading.Event(), threading.Lock()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # raised below
            errors.append(error)
            ended.set()
            return
        with guard:
            is_late = ended.is_set()
            results.append(result)
            ended.set()
        if is_late:
            late(result)

    threading.Thread(target=run, name="weights-selftest", daemon=True).start()
    ended.wait(limit_s)
    with guard:
        has_ended = ended.is_set()
        ended.set()
    if not has_ended:
        raise DriverHangs(f"the driver did not answer within {limit_s:g} s")
    if results:
        return results[0]
    if isinstance(errors[0], RuntimeError | OSError):  # of CUDA, NIXL and their transports
        raise TransportUnavailable(str(errors[0]) or type(errors[0]).__name__) from errors[0]
    raise errors[0]


class SelfTest:
    """Tests paths to a subscriber's GPU. After a driver has hung it tests nothing any more."""

    def __init__(
        self, side: SideStream, *, limit_s: float = LIMIT_S, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._side, self._limit_s, self._clock = side, limit_s, clock
        self._hung: DriverHangs | None = None

    def trial(self, link: Link, welcome: m.TransferWelcome, *, memory: Sequence[Raw]) -> Trial | None:
        """Return the path to test with a publisher; None if it has none. memory: of the receiver, as in `attach`."""
        name = "cuda_ipc" if welcome.ipc_domain and welcome.ipc_domain == ipc_domain() else "nixl_vram"
        if name not in welcome.between_gpus:
            return None
        return Trial(self, name, link, memory, num_bytes=min(PATTERN_BYTES, welcome.bucket_bytes))

    def passed(self, trial: Trial, kind: Transport, *, than: str, inlet: Inlet) -> Inlet:
        """As `Trial.passed`."""
        if self._hung is not None:
            raise self._hung
        try:
            return self._passed(trial, kind, than=than, inlet=inlet)
        except TransportUnavailable as error:
            trial.link.check()
            if isinstance(error, DriverHangs):
                self._hung = error
            raise

    def _passed(self, trial: Trial, kind: Transport, *, than: str, inlet: Inlet) -> Inlet:
        trial.link.send(m.TryTransport(kind.name))
        offer = _answer(trial.link, m.TransportOffer).offer
        attach = partial(kind.attach, trial.link, offer=offer, memory=trial.memory)
        limit_s = min(self._limit_s, driver_limit_s(trial.link.timeout_s))
        tested = in_time(attach, limit_s=limit_s, late=_close)
        with ExitStack() as on_error:
            on_error.callback(tested.close)
            try:
                seconds = self._seconds(trial, kind.name, tested, limit_s=limit_s)
            except DriverHangs:
                on_error.pop_all()  # a thread is in it
                raise
            other = self._seconds(trial, than, inlet, limit_s=None)
            if seconds >= other:
                speeds = " against ".join(f"{trial.num_bytes / each / 1e9:.1f}" for each in (seconds, other))
                raise TransportUnavailable(f"it is no faster than {than}: {speeds} GB/s")
            on_error.pop_all()
        return tested

    def _seconds(self, trial: Trial, transport: str, inlet: Inlet, *, limit_s: float | None) -> float:
        """Return the seconds of the fastest round. limit_s: for the driver; None trusts the transport."""
        fastest = math.inf
        for number in range(NUM_ROUNDS):
            began = self._clock()
            trial.link.send(m.ReadPattern(transport, number))
            data = _answer(trial.link, m.Data)
            if data.num_bytes != trial.num_bytes:
                raise TransferError(f"a pattern of {data.num_bytes} bytes came in place of {trial.num_bytes}")
            receive = partial(self._received, inlet, data, trial.memory[0])
            ended, exact = receive() if limit_s is None else in_time(receive, limit_s=limit_s)
            trial.link.send(m.EndPattern())
            if _answer(trial.link, m.Revoked).revoked:
                continue
            if limit_s is not None and not exact:
                raise TransportUnavailable("other bytes arrived than were sent")
            if number:
                fastest = min(fastest, ended - began)
        return fastest

    def _received(self, inlet: Inlet, data: m.Data, memory: Raw) -> tuple[float, bool]:
        """Return when the bytes of a pattern were on this GPU, and whether they are right."""
        received = inlet.receive(data, out=None if inlet.views else memory[: data.num_bytes])
        with self._side.current():
            here = torch.empty(data.num_bytes, dtype=torch.uint8, device=self._side.device)
            if not isinstance(received, Tensor):
                host = pinned(data.num_bytes)
                np.copyto(host.numpy(), received)
                received = host
            here.copy_(received, non_blocking=True)
        self._side.mark().synchronize()
        ended = self._clock()
        return ended, xxhash.xxh3_64_intdigest(self._side.to_host(here, torch.uint8).numpy().data) == data.hash


@dataclass(frozen=True, slots=True)
class Trial:
    """A path from one publisher's GPU."""

    _test: SelfTest
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
        return self._test.passed(self, kind, than=than, inlet=inlet)


def _answer(link: Link, kind: type[R]) -> R:
    reply = link.receive()
    if isinstance(reply, m.TransferRefused):
        raise TransportUnavailable(reply.reason)
    if not isinstance(reply, kind):
        raise TransferError(f"the publisher replied {reply}; {kind.__name__} was expected")
    return reply


def _close(inlet: Inlet) -> None:
    inlet.close()

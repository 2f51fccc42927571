"""Selects a transport: by name, or the fastest that works between two processes.

    publisher     opens one outlet, and always serves TCP over the link too; with "auto" and weights on a GPU, those
                  between GPUs when a subscriber tests them
    subscriber    uses the publisher's outlet if that works between the two, else TCP; with "auto" and weights on a GPU,
                  a transport between GPUs that has passed its test and is faster (selftest.py)

Transports are plug-ins of the group `cosmos_rl.transports`, imported when selected or tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TypeVar

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.hardware_log import log_choice
from cosmos_rl_core.processes import rdma_devices
from cosmos_rl_core.weight_sync import BETWEEN_GPUS
from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.transports.base import Inlet, Outlet, Transport, TransportUnavailable
from cosmos_rl_transfer.transports.selftest import PATTERN_BYTES, SelfTest, path_from
from cosmos_rl_transfer.wire.link import Link
from cosmos_rl_transfer.wire.messages import TransferWelcome

T = TypeVar("T")

GROUP = "cosmos_rl.transports"
AUTO = "auto"
OVER_LINK = "tcp"
"""The transport that every publisher serves beside its outlet."""
PLAIN = ("nixl", "nixl_vram", "collective")
"""Transports between hosts that do not encrypt."""


def open_outlet(
    transport: str | Transport, *, bucket_bytes: int, num_slots: int, encrypted: bool = False
) -> tuple[str, Outlet]:
    """Open a publisher's end with the first transport that can; return its name and the end.

    encrypted: only transports that do not leave this host, and TCP, which then uses TLS.

    Raises UserError for an unknown name or one that is excluded, TransportUnavailable with every reason if none can.
    """
    if encrypted and transport in PLAIN:
        raise UserError(
            f'the transport "{transport}" does not encrypt: name "tcp" or "auto", or set tls.weights = false'
        )
    kinds = _candidates(transport, auto=[name for name in preference() if not (encrypted and name in PLAIN)])
    name, outlet, reasons = _first(kinds, lambda kind: kind.open(bucket_bytes=bucket_bytes, num_slots=num_slots))
    _log("offered", name, reasons)
    return name, outlet


def between_gpus(transport: str | Transport, *, encrypted: bool) -> tuple[str, ...]:
    """Return the transports that a publisher of weights on a GPU offers to test."""
    if transport != AUTO:
        return ()
    return tuple(name for name in BETWEEN_GPUS if not (encrypted and name in PLAIN))


def named(transport: str) -> Transport:
    """Return the transport of this name. Raises UserError."""
    return _kind(transport)()


def attach(
    transport: str | Transport,
    link: Link,
    *,
    source: TransferWelcome,
    memory: Sequence[Raw],
    selftest: SelfTest | None = None,
) -> tuple[str, Inlet]:
    """Connect to a publisher by its outlet, or by TCP over the link; return the chosen name and the end.

    source: has name and address of the publisher's outlet. memory: receive buffers. selftest: of what "auto" may test.
    Raises UserError for an unknown name, TransportUnavailable with every reason if none works.
    """

    offered = source.transport

    def reach(kind: Transport) -> Inlet:
        if kind.name not in (offered, OVER_LINK):
            raise TransportUnavailable(f"the publisher offers {offered} and {OVER_LINK}; name the same on both sides")
        return kind.attach(link, offer=source.offer, memory=memory)

    known = transport == AUTO and offered != OVER_LINK and offered in _names()  # a publisher names no module here
    name, inlet, reasons = _first(_candidates(transport, auto=[offered, OVER_LINK] if known else [OVER_LINK]), reach)
    if selftest is not None and transport == AUTO and (path := path_from(source)):
        num_bytes = min(PATTERN_BYTES, source.bucket_bytes)
        try:
            tested = selftest.passed(named(path), link, memory=memory, num_bytes=num_bytes, than=name, inlet=inlet)
        except TransportUnavailable as error:
            reasons.append(f"{path}: {error}")
        except BaseException:
            inlet.close()
            raise
        else:
            inlet.close()
            name, inlet = path, tested
    _log("read", name, reasons)
    return name, inlet


def preference() -> list[str]:
    """Return the transports of buckets in host memory that "auto" tries for a publisher, fastest first.

    RDMA with devices, else shared memory.
    """
    return ["nixl", "shm", OVER_LINK] if rdma_devices() else ["shm", OVER_LINK]


def _candidates(transport: str | Transport, *, auto: Sequence[str]) -> Iterator[Transport]:
    if not isinstance(transport, str):
        yield transport
        return
    for name in auto if transport == AUTO else [transport]:
        yield _kind(name)()


@cache  # reading the installed entry points takes tens of milliseconds
def _names() -> frozenset[str]:
    return frozenset(plugins.names(GROUP))


@cache
def _kind(name: str) -> Callable[[], Transport]:
    plugins.locate(GROUP, name, beside=(AUTO,))  # names "auto" among the known ones where this one is not
    return plugins.load(GROUP, name)


def _first(kinds: Iterable[Transport], attempt: Callable[[Transport], T]) -> tuple[str, T, list[str]]:
    """Return the first that works, its end, and why those before it do not."""
    reasons = list[str]()
    for kind in kinds:
        try:
            return kind.name, attempt(kind), reasons
        except TransportUnavailable as error:
            reasons.append(f"{kind.name}: {error}")
    raise TransportUnavailable("; ".join(reasons))


def _log(verb: str, name: str, reasons: Sequence[str]) -> None:
    log_choice(f"weights are {verb} over {name}" + (f" (not over {'; '.join(reasons)})" if reasons else ""))

"""Choose a transport: by name, or the fastest that works between two processes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from cosmos_rl_core.errors import UserError
from cosmos_rl_transfer.arena import Arena
from cosmos_rl_transfer.link import Link
from cosmos_rl_transfer.transports.base import Reader, Segment, Transport, TransportUnavailable
from cosmos_rl_transfer.transports.shm import SharedMemory
from cosmos_rl_transfer.transports.tcp import Tcp

T = TypeVar("T")
log = logging.getLogger(__name__)

BY_NAME: dict[str, type[SharedMemory] | type[Tcp]] = {"shm": SharedMemory, "tcp": Tcp}
"""Fastest first."""


def candidates(transport: str | Transport) -> list[Transport]:
    """Return the transports to try in order: all for "auto", else the one named or given."""
    if not isinstance(transport, str):
        return [transport]
    if transport == "auto":
        return [kind() for kind in BY_NAME.values()]
    if transport not in BY_NAME:
        raise UserError(f'transport = "{transport}" is not known; choose one of auto, {", ".join(BY_NAME)}')
    return [BY_NAME[transport]()]


def allocate(transport: str | Transport, *, num_bytes: int, count: int) -> list[Segment]:
    """Make the publisher's slots with the first transport that can."""
    return _first(transport, lambda kind: [kind.allocate(num_bytes) for _ in range(count)])


def attach(transport: str | Transport, link: Link, *, arena: Arena, offers: tuple[dict[str, str], ...]) -> Reader:
    """Reach a publisher's slots with the first transport that can."""
    return _first(transport, lambda kind: kind.attach(link, arena=arena, offers=offers))


def _first(transport: str | Transport, attempt: Callable[[Transport], T]) -> T:
    reasons = []
    for kind in candidates(transport):
        try:
            result = attempt(kind)
        except TransportUnavailable as error:
            reasons.append(f"{kind.name}: {error}")
            continue
        log.info("weights travel by %s%s", kind.name, f" ({'; '.join(reasons)})" if reasons else "")
        return result
    raise TransportUnavailable("; ".join(reasons))

"""Messages between the server and a worker, over a socket pair that also carries descriptors.

    server -> worker    Build
    worker -> server    Ready, or Refused and the end
    server -> worker    one descriptor per item, after one byte; then Ask
    worker -> server    Answer, with one result per item

One Ask is outstanding at a time.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import msgspec

MAX_ITEMS = 64
"""Maximum requests in one Ask: descriptors are sent in one message, and systems allow about 250."""


class Build(msgspec.Struct, frozen=True, tag=True):
    """Build a reward."""

    name: str
    """Such as "module:attribute"."""
    label: str
    """Name of its scores."""
    options: dict[str, Any]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The reward is built."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The reward cannot be built; a retry cannot succeed."""

    reason: str


class Item(msgspec.Struct, frozen=True):
    """One request."""

    num_bytes: int
    """Size of its body."""
    reward: int
    """Index of the requested reward in the header, which has its options."""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Request to score items."""

    items: list[Item]


class Result(msgspec.Struct, frozen=True):
    """One request's scores, or the error."""

    scores: dict[str, list[float]] = {}
    """Scores by the reward's name, or by "reward.part". One value per sample."""
    error: str = ""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Results in the order of the items."""

    results: list[Result]
    seconds: float
    """Duration of the scoring."""


ToWorker = Build | Ask
FromWorker = Ready | Refused | Answer


def send_descriptors(connection: socket.socket, descriptors: Sequence[int]) -> None:
    """Send the descriptors of the next Ask. Raises OSError."""
    socket.send_fds(connection, [b"\0"], descriptors)


def receive_descriptors(connection: socket.socket) -> list[int]:
    """Receive the descriptors of the next Ask; the caller must close them. Empty at the end of the connection."""
    return socket.recv_fds(connection, 1, MAX_ITEMS)[1]

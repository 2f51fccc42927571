"""Messages between the server and a worker, over a socket pair that also carries descriptors.

    server -> worker    Build
    worker -> server    Ready, or Refused and the end
    server -> worker    one descriptor an item, behind one byte; then Ask
    worker -> server    Answer, with one result an item

One Ask is outstanding at a time.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import msgspec

MAX_ITEMS = 64
"""Requests in one Ask: descriptors go in one message, and systems allow some 250."""


class Build(msgspec.Struct, frozen=True, tag=True):
    """Build a reward."""

    name: str
    """Such as "module:attribute"."""
    label: str
    """What its scores are called."""
    options: dict[str, Any]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The reward is built."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The reward cannot be built, and trying again cannot help."""

    reason: str


class Item(msgspec.Struct, frozen=True):
    """One request."""

    num_bytes: int
    """Size of its body."""
    reward: int
    """Which of the header's rewards is asked for; its options are there."""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Score these."""

    items: list[Item]


class Result(msgspec.Struct, frozen=True):
    """One request's scores, or why there are none."""

    scores: dict[str, list[float]] = {}
    """By name: the reward's own, or "reward.part" where it has parts. One value a sample."""
    error: str = ""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Results in the order of the items."""

    results: list[Result]
    seconds: float
    """Time the reward took."""


ToWorker = Build | Ask
FromWorker = Ready | Refused | Answer


def send_descriptors(connection: socket.socket, descriptors: Sequence[int]) -> None:
    """Send descriptors ahead of an Ask. Raises OSError."""
    socket.send_fds(connection, [b"\0"], descriptors)


def receive_descriptors(connection: socket.socket) -> list[int]:
    """Return the descriptors that come ahead of an Ask, which are the caller's to close; none at the end."""
    return socket.recv_fds(connection, 1, MAX_ITEMS)[1]

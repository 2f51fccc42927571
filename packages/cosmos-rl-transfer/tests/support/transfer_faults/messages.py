"""What the side that runs a trial and its processes say to each other, a line of JSON each."""

from __future__ import annotations

import msgspec

from cosmos_rl_transfer.planning.relay import Relay


class Trainer(msgspec.Struct, tag=True, frozen=True):
    """A role: one rank that publishes."""

    layout: str
    rank: int
    transport: str
    relay: Relay


class Engine(msgspec.Struct, tag=True, frozen=True):
    """A role: a rollout replica of one rank."""

    publishers: tuple[str, ...]
    transport: str


class Coordinator(msgspec.Struct, tag=True, frozen=True):
    """A role: the own process of a replica of several ranks."""

    publishers: tuple[str, ...]


class Rank(msgspec.Struct, tag=True, frozen=True):
    """A role: one rank of that replica."""

    publishers: tuple[str, ...]
    transport: str
    rank: int


Role = Trainer | Engine | Coordinator | Rank


class Publish(msgspec.Struct, tag=True, frozen=True):
    """An order: fence, change the weights into those of a version, publish them."""

    version: int


class Follow(msgspec.Struct, tag=True, frozen=True):
    """An order: stage a version newer than `after` and apply it."""

    after: int


class Enlist(msgspec.Struct, tag=True, frozen=True):
    """An order to a rank: obey this coordinator from now on."""

    address: str


class Arm(msgspec.Struct, tag=True, frozen=True):
    """An order: kill `pid` at this moment of the next sync; 0.0 its first bucket, towards 1.0 after `apply`."""

    pid: int
    moment: float


class Look(msgspec.Struct, tag=True, frozen=True):
    """An order: report the live tensors."""


Order = Publish | Follow | Enlist | Arm | Look


class Report(msgspec.Struct, tag=True, frozen=True):
    """What became of an order."""

    pid: int
    done_at: float
    """By the monotonic clock, which all processes of a machine share."""
    address: str = ""
    version: int = -1
    error: str = ""
    content: str = ""
    """`content_of` the live tensors."""


class Killing(msgspec.Struct, tag=True, frozen=True):
    """Told just before the kill; a report follows if somebody else is killed."""

    at: float

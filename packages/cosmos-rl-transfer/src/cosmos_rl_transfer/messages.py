"""What a subscriber and a publisher say to each other on their connection, in this order.

subscriber                                   publisher
Hello                                     -> Welcome          what the publisher holds, and how
Join(target, rank, plan digest)           -> Joined           or Refused: the plans differ
Await(after)                              -> Waiting ...      about once a second, so that silence means death
                                             Announce(version)
Borrow(version)                           -> Lent             a lease on the slot, with hashes; or Overtaken
ReadBucket(lease, bucket) (tcp only)      -> Data + raw bytes, or Overtaken
Return(lease)                             -> Returned         was the lease valid all the time?
"""

from __future__ import annotations

import msgspec

from cosmos_rl_transfer.layout import Manifest

PROTOCOL = 1


class Hello(msgspec.Struct, tag=True, frozen=True):
    protocol: int


class Welcome(msgspec.Struct, tag=True, frozen=True):
    source: Manifest
    """All ranks of the publishing side."""
    rank: int
    """The publisher's own."""
    wire_dtype: str | None
    bucket_bytes: int
    segments: tuple[dict[str, str], ...]
    """Per slot, how a process on the same host maps it; empty dicts where it cannot."""


class Join(msgspec.Struct, tag=True, frozen=True):
    target: Manifest
    rank: int
    plan_digest: str


class Joined(msgspec.Struct, tag=True, frozen=True):
    pass


class Refused(msgspec.Struct, tag=True, frozen=True):
    reason: str


class Await(msgspec.Struct, tag=True, frozen=True):
    after: int


class Waiting(msgspec.Struct, tag=True, frozen=True):
    pass


class Announce(msgspec.Struct, tag=True, frozen=True):
    version: int


class Borrow(msgspec.Struct, tag=True, frozen=True):
    version: int


class Lent(msgspec.Struct, tag=True, frozen=True):
    lease: int
    slot: int
    bucket_hashes: tuple[int, ...]
    """xxh3-64 of each bucket of the stream."""
    tensor_sums: dict[str, int]
    """By tensor: the additive hash of what this publisher sends of it."""


class Overtaken(msgspec.Struct, tag=True, frozen=True):
    newest: int


class ReadBucket(msgspec.Struct, tag=True, frozen=True):
    lease: int
    bucket: int


class Data(msgspec.Struct, tag=True, frozen=True):
    num_bytes: int
    """Raw bytes that follow this message."""


class Return(msgspec.Struct, tag=True, frozen=True):
    lease: int


class Returned(msgspec.Struct, tag=True, frozen=True):
    valid: bool


Request = Hello | Join | Await | Borrow | ReadBucket | Return
Reply = Welcome | Joined | Refused | Waiting | Announce | Lent | Overtaken | Data | Returned

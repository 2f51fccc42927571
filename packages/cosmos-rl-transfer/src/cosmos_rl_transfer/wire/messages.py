"""What a subscriber and a publisher say to each other on their connection, in this order.

subscriber                                   publisher
Hello                                     -> Welcome          what the publisher holds, and how it is reached
Join(target, rank, plan digest)           -> Joined           or Refused: the plans differ
Await(after)                              -> Waiting ...      about once a second, so that silence means death
                                             Announce(version, ring)
Borrow(version)                           -> Lent             a lease on the version; or Overtaken
ReadBucket(lease, bucket)                 -> Data, and what the transport sends behind it; or Overtaken
  ... a few of them unanswered
Taken(bucket)                                its slot may be used again; no answer
WasRevoked(bucket)                        -> Revoked          its hash was wrong: was its memory written meanwhile?
Return(lease)                             -> Returned         was the lease valid all the time?
Holds(version, address)                   -> Registered       it serves this version itself (peers.py)
WhoHolds(after)                           -> Holders          of the newest version, if newer than `after`
JoinRing(plan digest, source)             -> Joined           instead of Join, to a subscriber that passes on (chain.py)
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec

PROTOCOL = 6


Want = Literal["any", "dense", "delta", "link"]
"""How a bucket may come. "dense": all of it. "delta": `Data` of 0 bytes where there is none. "link": all of it over the
link, whatever the transport, out of memory that nobody writes meanwhile."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    protocol: int


class Welcome(msgspec.Struct, tag=True, frozen=True):
    source: bytes
    """What all ranks of the publishing side hold: an encoded Manifest."""
    rank: int
    """The publisher's own."""
    wire_dtype: str | None
    bucket_bytes: int
    transport: str
    """Name of the transport that the publisher's outlet is of."""
    offer: dict[str, str]
    """How the outlet is reached."""


class Join(msgspec.Struct, tag=True, frozen=True):
    target: bytes
    """What all ranks of the replica hold: an encoded Manifest."""
    rank: int
    plan_digest: str
    position: int = 0
    """Place of this replica among the rollout replicas: it turns the choice among equal owners."""
    transport: str = "tcp"
    """The one the subscriber has chosen: the publisher's own, or tcp, which always works."""
    sources: tuple[int, ...] = ()
    """Source ranks that the plan was made over, the others being gone; () for all."""


class JoinRing(msgspec.Struct, tag=True, frozen=True):
    plan_digest: str
    source: int
    """Rank of the publisher whose buckets are to be passed on."""
    transport: str


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
    ring: tuple[str, ...] = ()
    """Addresses of subscribers that want the same buckets and pass them on, in this order; () where nobody does."""


class Borrow(msgspec.Struct, tag=True, frozen=True):
    version: int
    keep: bool = False
    """Whether the lease outlives the next version: for a reader that was overtaken before."""
    held: int = -1
    """The version this subscriber has, -1 for none: what changed since may come as deltas."""
    share: tuple[int, Annotated[int, msgspec.Meta(ge=1)]] = (0, 1)
    """Position in a ring and its size: buckets that the ring passes on are read only if it does not (relay.py)."""


class Lent(msgspec.Struct, tag=True, frozen=True):
    lease: int


class Overtaken(msgspec.Struct, tag=True, frozen=True):
    newest: int


class ReadBucket(msgspec.Struct, tag=True, frozen=True):
    lease: int
    bucket: int
    want: Want = "any"


class Taken(msgspec.Struct, tag=True, frozen=True):
    bucket: int


class WasRevoked(msgspec.Struct, tag=True, frozen=True):
    bucket: int


class Revoked(msgspec.Struct, tag=True, frozen=True):
    revoked: bool
    """Whether the memory that the bucket was last handed over in may have been written before the reader was done."""


class Data(msgspec.Struct, tag=True, frozen=True):
    """Head of a bucket."""

    bucket: int
    num_bytes: int
    hash: int
    """xxh3-64 of its pieces' bytes, one after the other, without padding; of a delta's bytes."""
    sums: tuple[int, ...]
    """Additive hash of each piece."""
    slot: int = -1
    """Where it lies, -1 where it comes straight out of live memory."""
    runs: tuple[tuple[int, int, int], ...] = ()
    """`Outlet.locate`'s."""
    delta: bool = False
    """Whether the bytes are a delta (delta.py) on the version that was held."""


class Return(msgspec.Struct, tag=True, frozen=True):
    lease: int


class Returned(msgspec.Struct, tag=True, frozen=True):
    valid: bool


class Holder(msgspec.Struct, frozen=True):
    """A subscriber that serves what it has staged."""

    layout: str
    """Digest of its replica's manifest."""
    rank: int
    """Its own in that manifest."""
    address: str
    plan: str = ""
    """Digest of the plan by which publishers send to it."""

    @classmethod
    def of(cls, joined: Join, address: str) -> Holder:
        """Describe a subscriber that has joined."""
        return cls(hashlib.sha256(joined.target).hexdigest(), joined.rank, address, joined.plan_digest)


class Holds(msgspec.Struct, tag=True, frozen=True):
    version: int
    address: str


class Registered(msgspec.Struct, tag=True, frozen=True):
    pass


class WhoHolds(msgspec.Struct, tag=True, frozen=True):
    after: int


class Holders(msgspec.Struct, tag=True, frozen=True):
    version: int
    """-1 for none."""
    holders: tuple[Holder, ...]
    """Least asked first."""


class Register(msgspec.Struct, tag=True, frozen=True):
    """A rank of a replica, to the replica's own process (two_phase.py); its answers are Staged, Committed, Failed."""

    rank: int


class Staged(msgspec.Struct, tag=True, frozen=True):
    version: int


class Committed(msgspec.Struct, tag=True, frozen=True):
    version: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    version: int
    reason: str


class Stage(msgspec.Struct, tag=True, frozen=True):
    """An order: pull and verify this version or a newer one."""

    version: int


class Commit(msgspec.Struct, tag=True, frozen=True):
    """An order: write the staged version into the live tensors."""

    version: int


Request = (
    Hello
    | Join
    | JoinRing
    | Await
    | Borrow
    | ReadBucket
    | Taken
    | WasRevoked
    | Return
    | Holds
    | WhoHolds
    | Register
    | Staged
    | Committed
    | Failed
)
Reply = (
    Welcome
    | Joined
    | Refused
    | Waiting
    | Announce
    | Lent
    | Overtaken
    | Data
    | Revoked
    | Returned
    | Registered
    | Holders
    | Stage
    | Commit
)

"""Messages between a subscriber and a publisher on their connection, in this order.

subscriber                                   publisher
Hello                                     -> Welcome          the publisher's manifest and address
TryTransport(transport)                   -> Offer            or Refused; a path between GPUs is tested (selftest.py)
ReadPattern(transport, round)              -> Data             of random bytes, then the transport's bytes
WasRevoked(PATTERN)                        -> Revoked          releases its slot
Join(target, rank, plan digest)           -> Joined           or Refused: the plans differ
Await(after)                              -> Waiting ...      about once a second, so that silence means death
                                             Announce(version, ring)
Borrow(version)                           -> Lent             a lease on the version; or Overtaken
ReadBuckets(lease, buckets)               -> of each: Data, then the transport's bytes; or Overtaken
... a few of them pending
Taken(bucket)                                releases its slot; no reply; not sent for buckets over the link
WasRevoked(bucket)                        -> Revoked          its hash was wrong: was its memory written meanwhile?
Return(lease)                             -> Returned         was the lease valid throughout?
Holds(version, address)                   -> Registered       it serves this version itself (peers.py)
FindHolders(after)                        -> Holders          of the newest version, if newer than `after`
JoinRing(plan digest, source)             -> Joined           instead of Join, to a relaying subscriber (relay.py)
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from cosmos_rl_transfer.errors import LayoutError, Superseded, TransferError

PROTOCOL = 11
PATTERN = -1
"""In place of a bucket's number: the random bytes that a self-test sends."""


Want = Literal["any", "dense", "delta", "link"]
"""Requested form of a bucket. "dense": all of it. "delta": `Data` of 0 bytes if there is none. "link": all of it over
the link, independent of the transport, from memory that is not written meanwhile."""


class TransferHello(msgspec.Struct, tag=True, frozen=True):
    protocol: int


class TransferWelcome(msgspec.Struct, tag=True, frozen=True):
    source: bytes
    """Encoded Manifest of all ranks of the publishing side."""
    rank: int
    """The publisher's rank."""
    wire_dtype: str | None
    bucket_bytes: int
    transport: str
    """Transport of the publisher's outlet."""
    offer: dict[str, str]
    """Connection data of the outlet."""
    between_gpus: tuple[str, ...] = ()
    """Transports that may be tested, and joined over, beside the outlet."""
    ipc_domain: str = ""
    """Of the publisher's process (selftest.py)."""


class TryTransport(msgspec.Struct, tag=True, frozen=True):
    transport: str
    """One of `between_gpus`."""


class TransportOffer(msgspec.Struct, tag=True, frozen=True):
    offer: dict[str, str]
    """As in the welcome."""


class ReadPattern(msgspec.Struct, tag=True, frozen=True):
    transport: str
    round: int


class SubscriberJoin(msgspec.Struct, tag=True, frozen=True):
    target: bytes
    """Encoded Manifest of all ranks of the replica."""
    rank: int
    plan_digest: str
    transport: str = "tcp"
    """The subscriber's choice: the publisher's own, one that passed its test, or tcp, which always works."""
    sources: tuple[int, ...] = ()
    """Source ranks of the plan if others are lost; () for all."""


class JoinRing(msgspec.Struct, tag=True, frozen=True):
    plan_digest: str
    source: int
    """Rank of the publisher whose buckets are relayed."""
    transport: str


class SubscriberJoined(msgspec.Struct, tag=True, frozen=True):
    pass


class TransferRefused(msgspec.Struct, tag=True, frozen=True):
    reason: str


class Await(msgspec.Struct, tag=True, frozen=True):
    after: int


class SubscriberWaiting(msgspec.Struct, tag=True, frozen=True):
    pass


class Announce(msgspec.Struct, tag=True, frozen=True):
    version: int
    ring: tuple[str, ...] = ()
    """Addresses of subscribers of the same buckets, in relay order; () without relay."""


class Borrow(msgspec.Struct, tag=True, frozen=True):
    version: int
    keep: bool = False
    """Whether the lease outlives the next version, for a reader that was overtaken before."""
    held: int = -1
    """The subscriber's version, the base of deltas; -1 for none."""
    share: tuple[int, Annotated[int, msgspec.Meta(ge=1)]] = (0, 1)
    """Position in a ring and its size: relayed buckets are read only if the ring does not deliver them (relay.py)."""


class Lent(msgspec.Struct, tag=True, frozen=True):
    lease: int


class Overtaken(msgspec.Struct, tag=True, frozen=True):
    newest: int


class ReadBuckets(msgspec.Struct, tag=True, frozen=True):
    lease: int
    buckets: tuple[int, ...]
    want: Want = "any"


class Taken(msgspec.Struct, tag=True, frozen=True):
    bucket: int


class WasRevoked(msgspec.Struct, tag=True, frozen=True):
    bucket: int


class Revoked(msgspec.Struct, tag=True, frozen=True):
    revoked: bool
    """Whether the memory of the bucket's last transfer may have been written before the reader was done."""


class Data(msgspec.Struct, tag=True, frozen=True):
    """Head of a bucket."""

    bucket: int
    num_bytes: int
    hash: int
    """xxh3-64 of its pieces' bytes, one after the other, without padding; of a delta's bytes."""
    sums: tuple[int, ...]
    """Additive hash of each piece."""
    slot: int = -1
    """Index of its slot, -1 for live memory."""
    runs: tuple[tuple[int, int, int], ...] = ()
    """Result of `Outlet.locate`."""
    delta: bool = False
    """Whether the bytes are a delta (delta.py) on the held version."""


class ReturnLease(msgspec.Struct, tag=True, frozen=True):
    lease: int


class LeaseReturned(msgspec.Struct, tag=True, frozen=True):
    valid: bool


class Holder(msgspec.Struct, frozen=True):
    """A subscriber that serves its staged version."""

    layout: str
    """Digest of its replica's manifest."""
    rank: int
    """Its rank in that manifest."""
    address: str
    plan: str = ""
    """Digest of the publishers' plan for it."""

    @classmethod
    def of(cls, joined: SubscriberJoin, address: str) -> Holder:
        """Describe a subscriber that has joined."""
        return cls(hashlib.sha256(joined.target).hexdigest(), joined.rank, address, joined.plan_digest)


class Holds(msgspec.Struct, tag=True, frozen=True):
    version: int
    address: str


class Registered(msgspec.Struct, tag=True, frozen=True):
    pass


class FindHolders(msgspec.Struct, tag=True, frozen=True):
    after: int


class Holders(msgspec.Struct, tag=True, frozen=True):
    version: int
    """-1 for none."""
    holders: tuple[Holder, ...]
    """Least used first."""


class Register(msgspec.Struct, tag=True, frozen=True):
    """First message of a rank to the replica's own process (two_phase.py); later ones are Staged, Committed, Failed."""

    rank: int


class Staged(msgspec.Struct, tag=True, frozen=True):
    version: int


class VersionCommitted(msgspec.Struct, tag=True, frozen=True):
    version: int


class TransferFailed(msgspec.Struct, tag=True, frozen=True):
    version: int
    reason: str
    publisher_lost: bool = False


class StageVersion(msgspec.Struct, tag=True, frozen=True):
    """Request to pull and verify this version or a newer one."""

    version: int


class CommitVersion(msgspec.Struct, tag=True, frozen=True):
    """Request to write the staged version into the live tensors."""

    version: int


Request = (
    TransferHello
    | TryTransport
    | ReadPattern
    | SubscriberJoin
    | JoinRing
    | Await
    | Borrow
    | ReadBuckets
    | Taken
    | WasRevoked
    | ReturnLease
    | Holds
    | FindHolders
    | Register
    | Staged
    | VersionCommitted
    | TransferFailed
)
Reply = (
    TransferWelcome
    | TransportOffer
    | SubscriberJoined
    | TransferRefused
    | SubscriberWaiting
    | Announce
    | Lent
    | Overtaken
    | Data
    | Revoked
    | LeaseReturned
    | Registered
    | Holders
    | StageVersion
    | CommitVersion
)
R = TypeVar("R", bound=Reply)


def expected(reply: Any, kind: type[R], *, refused: type[Exception] = LayoutError) -> R:
    """Return a reply of this kind. Raises `refused`, Superseded where there is a newer version, else TransferError."""
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, TransferRefused):
        raise refused(reply.reason)
    if isinstance(reply, Overtaken):
        raise Superseded(f"version {reply.newest} is out")
    raise TransferError(f"the publisher replied {reply}; {kind.__name__} was expected")

"""The seam between what is transferred and how its bytes travel."""

from __future__ import annotations

from typing import Protocol

from cosmos_rl_transfer.arena import Arena
from cosmos_rl_transfer.digest import Raw
from cosmos_rl_transfer.link import Link
from cosmos_rl_transfer.messages import Lent
from cosmos_rl_transfer.plan import Bucket


class Segment(Protocol):
    """One snapshot slot's memory, owned by the publisher."""

    memory: Raw
    """uint8 [num_bytes], zero at first, page faults taken."""
    offer: dict[str, str]
    """How another process on this host maps it; empty if it cannot."""

    def close(self) -> None:
        """Give the memory back once nobody maps it. May be called twice."""
        ...


class Reader(Protocol):
    """One subscriber's way to one publisher's slots."""

    def read(self, bucket: Bucket, *, lent: Lent, out: Raw) -> None:
        """Fill `out` uint8 [bucket.num_bytes] with the packed bytes of a bucket. Several threads may call.

        Raises Superseded when the lease was revoked and the transport can tell, PeerLost when the publisher
        is gone or silent. The caller checks hashes; the reader does not.
        """
        ...

    def close(self) -> None:
        """Unmap. May be called twice."""
        ...


class Transport(Protocol):
    """How packed buckets get from a publisher's slot to a subscriber.

        publisher                                     subscriber
        segment = transport.allocate(n)   (x 2)
        server sends segment.offer         ------->   reader = transport.attach(link, arena=..., offers=...)
        packs a version into segment.memory
        grants a lease on the slot         ------->   reader.read(bucket, lent=..., out=...)
        rewrites the slot when leases end             reader.close()
        segment.close()

    A publisher serves `ReadBucket` over the link whatever its transport, so a subscriber can always fall back
    to tcp.
    """

    name: str

    def allocate(self, num_bytes: int) -> Segment:
        """Make a slot. Raises TransportUnavailable with the reason where this machine cannot."""
        ...

    def attach(self, link: Link, *, arena: Arena, offers: tuple[dict[str, str], ...]) -> Reader:
        """Reach the publisher's slots, laid out by `arena`. Raises TransportUnavailable with the reason."""
        ...


class TransportUnavailable(RuntimeError):
    """This transport does not work between these two processes. The message says why."""

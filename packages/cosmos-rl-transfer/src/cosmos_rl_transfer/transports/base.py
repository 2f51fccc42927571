"""The seam between what is transferred and how its bytes travel: one packed bucket at a time.

    publisher (an `Outlet`)                              subscriber (an `Inlet`)
    outlet = transport.open(bucket_bytes, num_slots)
    Welcome carries outlet.offer            ------->     inlet = transport.attach(link, offer=..., memory=...)
                                            <-------     ReadBucket
    packs into a free slot, or finds that
    the bucket lies ready in live memory
    Data(slot, runs=outlet.locate(runs))    ------->     inlet.receive(data, out=...)
    outlet.send(link, runs, num_bytes)      =======>
    the slot is free after `send`, or (`keeps_slot`)
    when the subscriber says so             <-------     Taken(bucket)

Hashes are the caller's: a transport may deliver torn or wrong bytes of a slot that was taken away from it (the puller
asks the publisher whether it was, and then fetches the bucket over the link), but must never wait for ever: everything
ends by the link's deadline, or as soon as the peer's death is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.wire.link import Link
from cosmos_rl_transfer.wire.messages import Data


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that lie side by side, and where they go in the packed bucket."""

    data: Raw
    """uint8 [n], contiguous."""
    at: int
    """First byte in the packed bucket."""


class Outlet(Protocol):
    """A publisher's end, shared by all its subscribers. Several threads call it, each with a link of its own."""

    slots: Sequence[Raw]
    """uint8 [bucket_bytes] each, page faults taken: where buckets are packed. Reused for ever."""
    keeps_slot: bool
    """Whether a slot must stay as it is until the subscriber has read it (shared memory, RDMA)."""
    direct: bool
    """Whether `runs` may lie outside the slots, in memory given to `expose`."""
    offer: Mapping[str, str]
    """What a subscriber needs to reach it; empty where the link is enough."""

    def expose(self, memory: Sequence[Raw]) -> None:
        """Make further contiguous memory readable, such as live weights; replaces what was exposed before.

        Called before buckets out of it are sent, never while one is. Does nothing where `direct` is false or where no
        preparation is needed.
        """
        ...

    def locate(self, runs: Sequence[Run]) -> tuple[tuple[int, int, int], ...]:
        """Return (address, place in the bucket, bytes) of each run, for subscribers that read by themselves, or ()."""
        ...

    def send(self, link: Link, runs: Sequence[Run], *, num_bytes: int) -> None:
        """Hand a bucket over, after its `Data` was sent; does nothing where subscribers read by themselves.

        Runs ascend and may leave gaps (padding); what a subscriber finds there means nothing. Raises PeerLost.
        """
        ...

    def close(self) -> None:
        """Give everything back. May be called twice."""
        ...


class Inlet(Protocol):
    """A subscriber's end of one publisher. One thread calls it at a time."""

    views: bool
    """Whether `receive` returns a view of the publisher's slot and wants no `out`."""

    def receive(self, data: Data, *, out: Raw | None) -> Raw:
        """Return the packed bytes uint8 [data.num_bytes] that `data` announced.

        That is `out` [data.num_bytes], filled, which lies in the memory given to `attach`; or, with `views`, a
        read-only view of the publisher's slot, good until the slot is given back. Raises PeerLost when the publisher is
        gone or silent past the link's deadline.
        """
        ...

    def close(self) -> None:
        """Unmap, deregister. May be called twice. Neither the link nor the memory is the inlet's to close."""
        ...


class Transport(Protocol):
    """How packed buckets get from a publisher's slot to a subscriber."""

    name: str

    def open(self, *, bucket_bytes: int, num_slots: int) -> Outlet:
        """Make a publisher's end; `num_slots` may be 0. Raises TransportUnavailable with the reason where it cannot."""
        ...

    def attach(self, link: Link, *, offer: Mapping[str, str], memory: Sequence[Raw]) -> Inlet:
        """Reach the publisher behind `link`. Raises TransportUnavailable with the reason where it cannot.

        offer: that of the publisher's outlet. memory: what buckets will be received into, for transports that have to
        prepare it.
        """
        ...


class TransportUnavailable(RuntimeError):
    """This transport does not work between these two processes. The message says why."""

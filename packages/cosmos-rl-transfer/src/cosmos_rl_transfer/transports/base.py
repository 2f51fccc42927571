"""The protocol of transports: each moves one packed bucket at a time.

    publisher (an `Outlet`)                              subscriber (an `Inlet`)
    outlet = transport.open(bucket_bytes, num_slots)
    Welcome carries outlet.offer            ------->     inlet = transport.attach(link, offer=..., memory=...)
                                            <-------     ReadBuckets
    packs into a free slot, or finds that
    the bucket is ready in live memory
    Data(slot, runs=outlet.locate(runs))    ------->     inlet.receive(data, out=...)
    outlet.send(link, runs, num_bytes)      =======>
    the slot is free after `send`, or (`keeps_slot`)
    when the subscriber releases it         <-------     Taken(bucket), unless `over_link`

The caller verifies hashes: a transport may deliver torn or wrong bytes of a slot that the publisher reused (the puller
asks the publisher whether it was, and then fetches the bucket over the link). Every wait ends by the link's deadline,
or when the peer's death is detected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cosmos_rl_transfer.content.raw import Block, ByteRun, Raw
from cosmos_rl_transfer.errors import TransferError
from cosmos_rl_transfer.wire.link import Link
from cosmos_rl_transfer.wire.messages import Data


class Outlet(Protocol):
    """A publisher's end, shared by all its subscribers. Several threads call it, each with its own link.

    A subclass inherits methods that are right for slots that a subscriber reads by itself.
    """

    slots: Sequence[Block]
    """uint8 [bucket_bytes] each, pages allocated: buffers of packed buckets, reused. On a GPU, buckets never pass
    through host memory, and only their additive hashes are verified."""
    keeps_slot: bool
    """Whether a slot must stay as it is until the subscriber has read it (shared memory, RDMA)."""
    over_link: bool
    """Whether `send` writes to the link, so that a bucket's `Data` can leave in the same system call."""
    direct: bool
    """Whether `runs` may be outside the slots, in memory given to `expose`."""
    offer: Mapping[str, str]
    """Data that a subscriber needs to connect; empty if the link is enough."""

    def expose(self, memory: Sequence[Raw]) -> None:
        """Make further contiguous memory readable, such as live weights; replaces the previously exposed memory.

        Called before buckets from it are sent, never during a send. Does nothing if `direct` is false or no preparation
        is needed.
        """

    def locate(self, runs: Sequence[ByteRun]) -> tuple[tuple[int, int, int], ...]:
        """Return (address, offset in the bucket, bytes) of each run, for subscribers that read by themselves.

        () where the number of the slot is enough, or the bytes come without a request.
        """
        return ()

    def send(self, link: Link, runs: Sequence[ByteRun], *, num_bytes: int) -> None:
        """Send a bucket, after its `Data`; does nothing if subscribers read by themselves.

        Runs ascend and may leave gaps (padding), whose bytes are undefined at the subscriber. Raises PeerLost.
        """

    def close(self) -> None:
        """Release all resources. Idempotent."""
        self.slots = []


class Inlet(Protocol):
    """A subscriber's end of one publisher. One thread calls it at a time."""

    views: bool
    """Whether `receive` returns a view of the publisher's slot and needs no `out`."""
    over_link: bool
    """Whether the bytes come over the link: TCP holds the publisher back, and no slot has to be released."""

    def receive(self, data: Data, *, out: Raw | None) -> Block:
        """Return the packed bytes uint8 [data.num_bytes] that `data` announced.

        That is `out` [data.num_bytes], filled, a part of the memory given to `attach`; or, with `views`, a read-only
        view of the publisher's slot, valid until the slot is released, or memory of its own on a GPU. Raises PeerLost
        if the publisher is lost or silent past the link's deadline.
        """
        ...

    def close(self) -> None:
        """Unmap and deregister. Idempotent. Closes neither the link nor the memory."""


class MappedSlots(Inlet):
    """A subscriber's end that maps the publisher's slots; each is unmapped with its last view."""

    views = True
    over_link = False

    def __init__(self, slots: Sequence[Block]) -> None:
        self._slots = slots

    def receive(self, data: Data, *, out: Raw | None) -> Block:
        """View the slot's bytes."""
        if not 0 <= data.slot < len(self._slots) or data.num_bytes > self._slots[data.slot].nbytes:
            raise TransferError(f"{data.num_bytes} bytes were announced in slot {data.slot}, which is not shared")
        return self._slots[data.slot][: data.num_bytes]

    def close(self) -> None:
        self._slots = []


class Transport(Protocol):
    """Moves packed buckets from a publisher's slots to a subscriber."""

    name: str

    def open(self, *, bucket_bytes: int, num_slots: int) -> Outlet:
        """Create a publisher's end; `num_slots` may be 0. Raises TransportUnavailable with the reason."""
        ...

    def attach(self, link: Link, *, offer: Mapping[str, str], memory: Sequence[Raw]) -> Inlet:
        """Connect to the publisher behind `link`. Raises TransportUnavailable with the reason.

        offer: of the publisher's outlet. memory: receive buffers, for transports that prepare them.
        """
        ...


class TransportUnavailable(RuntimeError):
    """This transport does not work between these two processes. The message has the reason."""

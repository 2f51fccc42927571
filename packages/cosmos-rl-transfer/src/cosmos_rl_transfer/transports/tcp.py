"""TCP: the subscriber asks for a bucket on its link and receives it into preallocated memory."""

from __future__ import annotations

import threading

import numpy as np

from cosmos_rl_transfer.arena import Arena
from cosmos_rl_transfer.digest import Raw
from cosmos_rl_transfer.errors import Superseded, TransferError
from cosmos_rl_transfer.link import Link
from cosmos_rl_transfer.messages import Data, Lent, Overtaken, ReadBucket
from cosmos_rl_transfer.plan import Bucket


class Tcp:
    """The TCP transport. Works everywhere."""

    name = "tcp"

    def allocate(self, num_bytes: int) -> _Segment:
        """Make a slot in private memory."""
        return _Segment(num_bytes)

    def attach(self, link: Link, *, arena: Arena, offers: tuple[dict[str, str], ...]) -> _Reader:
        """Read over the link itself."""
        return _Reader(link)


class _Segment:
    def __init__(self, num_bytes: int) -> None:
        self.memory: Raw = np.empty(num_bytes, np.uint8)
        self.memory.fill(0)  # takes the page faults now
        self.offer: dict[str, str] = {}

    def close(self) -> None:
        """Drop the memory."""
        self.memory = np.empty(0, np.uint8)


class _Reader:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._turn = threading.Lock()
        """One exchange at a time; while one thread receives, others hash what they have."""

    def read(self, bucket: Bucket, *, lent: Lent, out: Raw) -> None:
        """Ask for a bucket and receive it."""
        with self._turn:
            self._link.send(ReadBucket(lent.lease, bucket.index))
            reply = self._link.receive()
            if isinstance(reply, Overtaken):
                raise Superseded(f"the slot was given to version {reply.newest}")
            if not isinstance(reply, Data) or reply.num_bytes != out.nbytes:
                raise TransferError(f"bucket {bucket.index}: expected {out.nbytes} bytes, the publisher sent {reply}")
            self._link.receive_into(out)

    def close(self) -> None:
        """The link is not the reader's to close."""

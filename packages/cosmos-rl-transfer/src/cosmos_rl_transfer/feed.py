"""A subscriber's connection to one publisher."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cosmos_rl_transfer import messages as m
from cosmos_rl_transfer.digest import Raw
from cosmos_rl_transfer.errors import LayoutError, Superseded, TransferError
from cosmos_rl_transfer.layout import Manifest
from cosmos_rl_transfer.link import Link
from cosmos_rl_transfer.plan import Bucket, Plan
from cosmos_rl_transfer.transports.base import Inlet, Transport
from cosmos_rl_transfer.transports.select import attach

R = TypeVar("R", bound=m.Reply)


@dataclass(slots=True)
class Feed:
    """One publisher, from the first handshake on."""

    link: Link
    welcome: m.Welcome
    inlet: Inlet | None = None
    buckets: tuple[Bucket, ...] = ()
    """What this publisher sends us."""
    _sending: threading.Lock = field(default_factory=threading.Lock)
    """Buckets are asked for by one thread and let go by others."""

    @classmethod
    def open(cls, address: str, *, token: bytes, timeout_s: float) -> Feed:
        """Connect and learn what the publisher holds."""
        link = Link.connect(address, token=token, timeout_s=timeout_s)
        try:
            link.send(m.Hello(m.PROTOCOL))
            return cls(link, _expect(link.receive(), m.Welcome))
        except BaseException:
            link.close()
            raise

    def join(
        self,
        made: Plan,
        *,
        target: Manifest,
        rank: int,
        position: int,
        transport: str | Transport,
        memory: Sequence[Raw],
    ) -> None:
        """Choose the transport and agree on the plan. Raises LayoutError if the publisher refuses."""
        source = self.welcome
        chosen, self.inlet = attach(transport, self.link, offered=source.transport, offer=source.offer, memory=memory)
        self.link.send(m.Join(target, rank, made.digest, position, chosen))
        _expect(self.link.receive(), m.Joined)
        self.buckets = made.stream(source.rank, rank)

    def newer(self, after: int) -> int:
        """Wait for a version newer than `after`. The publisher's heartbeat keeps the link's deadline away."""
        self.link.send(m.Await(after))
        while isinstance(reply := self.link.receive(), m.Waiting):
            pass
        return _expect(reply, m.Announce).version

    def borrow(self, version: int, *, keep: bool) -> int:
        """Lease a version and return the lease. Raises Superseded when there is a newer one."""
        self.link.send(m.Borrow(version, keep))
        return _expect(self.link.receive(), m.Lent).lease

    def ask(self, lease: int, bucket: Bucket) -> None:
        """Ask for a bucket."""
        with self._sending:
            self.link.send(m.ReadBucket(lease, bucket.index))

    def done_with(self, bucket: Bucket) -> None:
        """Tell that a bucket's slot may be used again. Any thread may call."""
        with self._sending:
            self.link.send(m.Taken(bucket.index))

    def receive(self, bucket: Bucket, *, out: Raw | None) -> tuple[m.Data, Raw]:
        """Receive the oldest bucket that was asked for: its head and its packed bytes. Raises Superseded."""
        assert self.inlet is not None, "a feed is joined before it is read"
        data = _expect(self.link.receive(), m.Data)
        if (data.bucket, data.num_bytes, len(data.sums)) != (bucket.index, bucket.num_bytes, len(bucket.pieces)):
            raise TransferError(f"bucket {bucket.index} of {bucket.num_bytes} bytes was asked for, {data} came")
        return data, self.inlet.receive(data, out=out)

    def give_back(self, lease: int) -> bool:
        """End the lease; returns whether it held all the time."""
        self.link.send(m.Return(lease))
        return _expect(self.link.receive(), m.Returned).valid

    def close(self) -> None:
        """Disconnect; a thread that waits here gets PeerLost. May be called twice."""
        self.link.close()
        if self.inlet is not None:
            self.inlet.close()


def _expect(reply: Any, kind: type[R]) -> R:
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, m.Refused):
        raise LayoutError(reply.reason)
    if isinstance(reply, m.Overtaken):
        raise Superseded(f"version {reply.newest} is out")
    raise TransferError(f"the publisher answered {reply} where {kind.__name__} was expected")

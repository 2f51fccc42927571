"""A subscriber's connection to one publisher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from cosmos_rl_transfer import messages as m
from cosmos_rl_transfer.arena import Arena
from cosmos_rl_transfer.errors import LayoutError, Superseded, TransferError
from cosmos_rl_transfer.layout import Manifest
from cosmos_rl_transfer.link import Link
from cosmos_rl_transfer.plan import Bucket, Plan
from cosmos_rl_transfer.transports.base import Reader, Transport
from cosmos_rl_transfer.transports.select import attach

R = TypeVar("R", bound=m.Reply)


@dataclass(slots=True)
class Feed:
    """One publisher, from the first handshake on."""

    link: Link
    welcome: m.Welcome
    reader: Reader | None = None
    buckets: tuple[Bucket, ...] = ()
    """What this publisher sends us."""

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

    def join(self, made: Plan, *, target: Manifest, rank: int, transport: str | Transport) -> None:
        """Agree on the plan and reach the publisher's slots. Raises LayoutError if the publisher refuses."""
        self.link.send(m.Join(target, rank, made.digest))
        _expect(self.link.receive(), m.Joined)
        source = self.welcome
        self.buckets = made.streams.get((source.rank, rank), ())
        arena = Arena.of(source.source, rank=source.rank, wire_dtypes=made.wire_dtypes)
        self.reader = attach(transport, self.link, arena=arena, offers=source.segments)

    def newer(self, after: int) -> int:
        """Wait for a version newer than `after`. The publisher's heartbeat keeps the link's deadline away."""
        self.link.send(m.Await(after))
        while isinstance(reply := self.link.receive(), m.Waiting):
            pass
        return _expect(reply, m.Announce).version

    def borrow(self, version: int) -> m.Lent:
        """Lease the slot with `version`. Raises Superseded when there is a newer one."""
        self.link.send(m.Borrow(version))
        return _expect(self.link.receive(), m.Lent)

    def give_back(self, lent: m.Lent) -> bool:
        """End the lease; returns whether it held all the time."""
        self.link.send(m.Return(lent.lease))
        return _expect(self.link.receive(), m.Returned).valid

    def close(self) -> None:
        """Disconnect; a thread that waits here gets PeerLost. May be called twice."""
        self.link.close()
        if self.reader is not None:
            self.reader.close()


def _expect(reply: Any, kind: type[R]) -> R:
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, m.Refused):
        raise LayoutError(reply.reason)
    if isinstance(reply, m.Overtaken):
        raise Superseded(f"version {reply.newest} is out")
    raise TransferError(f"the publisher answered {reply} where {kind.__name__} was expected")

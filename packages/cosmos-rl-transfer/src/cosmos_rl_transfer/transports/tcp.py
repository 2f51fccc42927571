"""TCP: the publisher sends each bucket over the subscriber's link, out of a slot or straight out of live memory.

The link has authentication and deadlines. Between hosts the kernel grows socket buffers as needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.content.staging import host_memory
from cosmos_rl_transfer.transports.base import ByteRun, Inlet, Outlet
from cosmos_rl_transfer.wire.link import Link
from cosmos_rl_transfer.wire.messages import Data

_ZEROS = memoryview(bytes(4096))


class Tcp:
    """The TCP transport. Works everywhere."""

    name = "tcp"

    def open(self, *, bucket_bytes: int, num_slots: int) -> _Outlet:
        """Make slots in private memory."""
        return _Outlet(bucket_bytes, num_slots)

    def attach(self, link: Link, *, offer: Mapping[str, str], memory: Sequence[Raw]) -> _Inlet:
        """Receive over the link itself."""
        return _Inlet(link)


class _Outlet(Outlet):
    keeps_slot = False
    over_link = True
    direct = True

    def __init__(self, bucket_bytes: int, num_slots: int) -> None:
        self.offer: Mapping[str, str] = {}
        self.slots: Sequence[Raw] = [host_memory(bucket_bytes) for _ in range(num_slots)]

    def send(self, link: Link, runs: Sequence[ByteRun], *, num_bytes: int) -> None:
        """Send the runs with zeros between them, `num_bytes` in all, without a copy."""
        link.send_parts(_parts(runs, num_bytes))


class _Inlet(Inlet):
    views = False
    over_link = True

    def __init__(self, link: Link) -> None:
        self._link = link

    def receive(self, data: Data, *, out: Raw | None) -> Raw:
        """Fill `out` from the link."""
        assert out is not None and out.nbytes == data.num_bytes, "TCP receives into the caller's memory"
        self._link.receive_into(out.data)
        return out


def _parts(runs: Sequence[ByteRun], num_bytes: int) -> Iterator[memoryview]:
    """Yield the runs and zeros for the gaps before, between and after them."""
    end = 0
    for run in runs:
        yield from _zeros(run.at - end)
        yield run.data.data
        end = run.at + run.data.nbytes
    yield from _zeros(num_bytes - end)


def _zeros(count: int) -> Iterator[memoryview]:
    while count > 0:
        part = _ZEROS[:count]
        yield part
        count -= len(part)

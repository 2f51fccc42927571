"""torch.distributed: sends buckets between two ranks of an existing process group.

For jobs that have such a group and no other path. It is two-sided and static: a transport object has one peer, so
a publisher serves one subscriber with it. After a rank has died or become silent the group must not be used any more:
pending operations cannot be cancelled and end only by a time-out. The link detects a death at once, so the caller
does not wait for that.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_rl_transfer.content.gpu import SideStream
from cosmos_rl_transfer.content.raw import Block, Raw
from cosmos_rl_transfer.content.staging import host_memory
from cosmos_rl_transfer.errors import PeerLost, TransferError
from cosmos_rl_transfer.transports.base import ByteRun, Inlet, Outlet, TransportUnavailable
from cosmos_rl_transfer.wire.link import Link
from cosmos_rl_transfer.wire.messages import Data

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

_TAG = 0x5EED
_CHECK_S = 0.1
"""Interval of link checks during a wait."""


class Collective:
    """Send and receive between two ranks of a process group (gloo, NCCL)."""

    name = "collective"

    def __init__(self, group: ProcessGroup | None = None, *, peer: int | None = None, device: str = "cpu") -> None:
        """Exchange buckets with rank `peer` of `group`.

        group: None for the default group. peer: None for the other one of two. device: of the group's tensors. With a
        GPU (NCCL), buckets are packed and received there, without a copy in host memory; the engine writes them to its
        live tensors with staging = "in_place". Unproven on hardware.
        """
        self._group, self._peer, self._device = group, peer, device

    def open(self, *, bucket_bytes: int, num_slots: int) -> _Outlet:
        """Make slots in private memory. Raises TransportUnavailable without a group or with too many ranks in it."""
        return _Outlet(self._pair(), bucket_bytes, num_slots)

    def attach(self, link: Link, *, offer: Mapping[str, str], memory: Sequence[Raw]) -> _Inlet:
        """Receive from the publisher, which must be the peer."""
        pair = self._pair()
        if offer.get("group") != pair.key(pair.peer, pair.rank):
            raise TransportUnavailable(
                f"rank {pair.peer} of the process group is not the publisher, which offers {dict(offer)}"
            )
        return _Inlet(pair, link)

    def _pair(self) -> _Pair:
        group = self._group
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None:
            raise TransportUnavailable("torch.distributed has no process group here; call init_process_group first")
        if self._peer is None and group.size() != 2:
            raise TransportUnavailable(f"the process group has {group.size()} ranks: set the other one, peer=...")
        peer = 1 - group.rank() if self._peer is None else self._peer
        return _Pair(group, peer, torch.device(self._device))


class _Pair:
    """This rank and its peer."""

    def __init__(self, group: ProcessGroup, peer: int, device: torch.device) -> None:
        self.rank, self.peer = group.rank(), peer
        self._group, self._device = group, device
        self._side = SideStream(device) if device.type == "cuda" else None

    def key(self, publisher: int, subscriber: int) -> str:
        """Name a publisher and its subscriber."""
        return f"{publisher}>{subscriber}/{self._group.size()}"

    @property
    def on_gpu(self) -> bool:
        return self._side is not None

    def blocks(self, num_bytes: int, count: int) -> list[Block]:
        """Allocate memory that the group sends and receives: uint8 [num_bytes] each."""
        if not self.on_gpu:
            return [host_memory(num_bytes) for _ in range(count)]  # full takes the page faults now
        with self._beside():
            return [torch.zeros(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(count)]

    def send(self, runs: Sequence[Block], link: Link) -> None:
        """Send runs of bytes, one message each."""
        with self._beside():
            works = [self._group.send([_tensor(run)], self.peer, _TAG) for run in runs]
        self._wait(works, link)

    def receive(self, runs: Sequence[Block], link: Link) -> None:
        """Receive as many runs of the same lengths."""
        with self._beside():
            works = [self._group.recv([_tensor(run)], self.peer, _TAG) for run in runs]
        self._wait(works, link)

    def _beside(self) -> AbstractContextManager[None]:
        """The stream that NCCL waits for must not be the one that trains."""
        return nullcontext() if self._side is None else self._side.current()

    def _wait(self, works: Sequence[Work], link: Link) -> None:
        """Wait in a thread of its own: gloo has neither a completion signal nor short timed waits."""
        done = threading.Event()
        failures: list[RuntimeError] = []

        def wait() -> None:
            try:
                with self._beside():  # the current stream waits for the work: not the one that trains
                    for work in works:
                        work.wait(timedelta(seconds=link.timeout_s))
            except RuntimeError as error:
                failures.append(error)
            done.set()

        threading.Thread(target=wait, name="weights-collective", daemon=True).start()
        while not done.wait(_CHECK_S):
            link.check()
        if failures:
            raise PeerLost(f"rank {self.peer} of the process group is lost: {failures[0]}") from failures[0]


def _tensor(run: Block) -> Tensor:
    return run if isinstance(run, Tensor) else torch.from_numpy(run)


class _Outlet(Outlet):
    keeps_slot = False
    over_link = False
    direct = True

    def __init__(self, pair: _Pair, bucket_bytes: int, num_slots: int) -> None:
        self._pair = pair
        self.offer: Mapping[str, str] = {"group": pair.key(pair.rank, pair.peer)}
        self.slots: Sequence[Block] = pair.blocks(bucket_bytes, num_slots)

    def locate(self, runs: Sequence[ByteRun]) -> tuple[tuple[int, int, int], ...]:
        """Return (0, place, bytes) of each run: each is a message."""
        return tuple((0, run.at, run.data.nbytes) for run in runs)

    def send(self, link: Link, runs: Sequence[ByteRun], *, num_bytes: int) -> None:
        """Send each run."""
        self._pair.send([run.data for run in runs], link)


class _Inlet(Inlet):
    over_link = False

    def __init__(self, pair: _Pair, link: Link) -> None:
        self._pair, self._link = pair, link
        self.views = pair.on_gpu

    def receive(self, data: Data, *, out: Block | None) -> Block:
        """Receive each run into its position in `out`, or in new memory on the GPU."""
        if self._pair.on_gpu:
            [out] = self._pair.blocks(data.num_bytes, 1)
        assert out is not None and out.nbytes == data.num_bytes, "a group receives into the caller's memory"
        if any(at < 0 or size < 0 or at + size > out.nbytes for _, at, size in data.runs):
            raise TransferError(f"bucket {data.bucket}: the publisher named bytes outside its {out.nbytes}")
        self._pair.receive([out[at : at + size] for _, at, size in data.runs], self._link)
        return out

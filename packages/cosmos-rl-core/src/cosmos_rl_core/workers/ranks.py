"""The ranks of a policy replica, and the messages between them.

    controller --Welcome, Batch, Committed, Stop--> lead (rank 0) --the same, as bytes--> followers (all other ranks)

Every rank runs the same loop; only the lead is connected to the controller and relays each message before it acts on
it. The bytes travel over a gloo group of their own, so that they never mix with the collectives of training. A
follower waits there while nothing is to do, for as long as the rollouts take; a rank that dies closes its sockets,
which ends the wait of all others.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.parallel.rank_group import RankGroup

T = TypeVar("T")
IDLE = timedelta(days=365)
"""Longest wait for the lead's next message: practically unlimited."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's place among those of its replica. Made by `Ranks.join` in all of them at the same time."""

    messages: RankGroup
    """Bytes between all of them."""
    _group: dist.ProcessGroup
    _thread: ThreadPoolExecutor
    """All messages pass in this one thread, in the order of the calls."""

    @classmethod
    def join(cls, *, timeout_s: float, store: Path | None) -> Ranks:
        """Make the default process group of RANK and WORLD_SIZE, and the group for messages.

        The ranks find each other through the file `store`; without it through the server that MASTER_ADDR and
        MASTER_PORT name. A collective of training that takes longer than `timeout_s` is an error.
        """
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            _backend(),
            store=dist.FileStore(str(store), world_size) if store else None,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        group = dist.new_group(backend="gloo", timeout=IDLE)
        assert isinstance(group, dist.ProcessGroup)
        return cls(RankGroup(group), group, ThreadPoolExecutor(1, thread_name_prefix="ranks"))

    @property
    def rank(self) -> int:
        return self.messages.rank

    async def broadcast(self, message: p.ToWorker) -> None:
        """Send a message to all followers; the lead calls it."""
        await self._in_thread(lambda: self._exchange(msgspec.msgpack.encode(message)))

    async def receive(self) -> p.ToWorker:
        """Wait for the lead's next message; a follower calls it for each `broadcast`."""
        return msgspec.msgpack.decode(await self._in_thread(lambda: self._exchange(b"")), type=p.ToWorker)

    async def gather(self, data: bytes) -> list[bytes]:
        """Return what every rank gave, in the order of ranks; all call it after the same message."""
        return await self._in_thread(lambda: self.messages.gather(data))

    async def leave(self) -> None:
        """Wait until all ranks are here, then end the groups."""
        await self._in_thread(self.messages.meet)
        dist.destroy_process_group()

    def _exchange(self, mine: bytes) -> bytes:
        length = torch.tensor([len(mine)])
        dist.broadcast(length, src=0, group=self._group)
        data = _bytes_tensor(mine, int(length))
        dist.broadcast(data, src=0, group=self._group)
        return data.numpy().tobytes()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _backend() -> str:
    """nccl where there are GPUs, one for each rank of the machine; gloo for tensors of the CPU, offloaded ones too."""
    if not torch.cuda.is_available():
        return "gloo"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return "cpu:gloo,cuda:nccl"


def _bytes_tensor(data: bytes, size: int) -> Tensor:
    """uint8 [size] that begins with `data`."""
    tensor = torch.zeros(size, dtype=torch.uint8)
    if data:
        tensor[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tensor

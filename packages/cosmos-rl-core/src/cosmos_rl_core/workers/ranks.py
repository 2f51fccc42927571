"""Messages between the ranks of a policy replica.

    controller --Welcome, Batch, Committed, Stop--> rank 0 --the same, as bytes--> followers (all other ranks)

Every rank runs the same loop; only rank 0 is connected to the controller, and it relays each message before it acts on
it. The bytes are sent over a separate gloo group, apart from the collectives of training. An idle follower waits for
the next message as long as the rollouts take; a rank that dies closes its sockets, which ends the wait of all others.
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
from cosmos_rl_core.parallel.device import use_device
from cosmos_rl_core.parallel.rank_group import RankGroup

T = TypeVar("T")
IDLE = timedelta(days=365)
"""Maximum wait for rank 0's next message: practically unlimited."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's connection to the others of its replica. All ranks call `Ranks.join` at the same time."""

    messages: RankGroup
    """Group for messages between all ranks."""
    _group: dist.ProcessGroup
    _thread: ThreadPoolExecutor
    """Runs all exchanges, in the order of the calls."""
    _requests: dist.Store
    """Requests of any rank to rank 0."""

    @classmethod
    def join(cls, *, timeout_s: float, store: Path | None) -> Ranks:
        """Create the default process group from RANK and WORLD_SIZE, and the group for messages.

        The ranks rendezvous through the file `store`, or without it through the server at MASTER_ADDR and
        MASTER_PORT. A training collective that takes longer than `timeout_s` is an error.
        """
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        backend, device = _backend()
        dist.init_process_group(
            backend,
            device_id=device,
            store=dist.FileStore(str(store), world_size) if store else None,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        group = dist.new_group(backend="gloo", timeout=IDLE)
        assert isinstance(group, dist.ProcessGroup)
        thread = ThreadPoolExecutor(1, thread_name_prefix="ranks", initializer=use_device)
        requests = dist.PrefixStore("requests", dist.distributed_c10d._get_default_store())
        return cls(RankGroup(group), group, thread, requests)

    @property
    def rank(self) -> int:
        return self.messages.rank

    async def broadcast(self, message: p.ToWorker) -> None:
        """Send a message to all followers; called by rank 0."""
        await self._in_thread(lambda: self._exchange(msgspec.msgpack.encode(message)))

    async def receive(self) -> p.ToWorker:
        """Return rank 0's next message; followers call it once for each `broadcast`."""
        return msgspec.msgpack.decode(await self._in_thread(lambda: self._exchange(b"")), type=p.ToWorker)

    async def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's data, in the order of ranks; all ranks call it after the same message."""
        return await self._in_thread(lambda: self.messages.gather(data))

    async def leave(self) -> None:
        """Wait for all ranks, then destroy the groups."""
        await self._in_thread(self.messages.meet)
        dist.destroy_process_group()

    def ask(self, request: str) -> None:
        """Ask rank 0 for something from any rank, outside the order of messages."""
        self._requests.set(request, "")

    async def asked(self, request: str) -> bool:
        """Return whether a rank has asked since the last call."""
        return await asyncio.to_thread(self._take, request)

    def _take(self, request: str) -> bool:
        return self._requests.check([request]) and self._requests.delete_key(request)

    def _exchange(self, mine: bytes) -> bytes:
        length = torch.tensor([len(mine)])
        dist.broadcast(length, src=0, group=self._group)
        data = _bytes_tensor(mine, int(length))
        dist.broadcast(data, src=0, group=self._group)
        return data.numpy().tobytes()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _backend() -> tuple[str, torch.device | None]:
    """nccl for GPU tensors, with one GPU per local rank; gloo for CPU tensors, including offloaded ones.

    With the GPU, torch connects nccl at once, and the groups of the mesh's axes are split off that communicator.
    """
    device = use_device()
    return ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)


def _bytes_tensor(data: bytes, size: int) -> Tensor:
    """uint8 [size] that starts with `data`."""
    tensor = torch.zeros(size, dtype=torch.uint8)
    if data:
        tensor[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tensor

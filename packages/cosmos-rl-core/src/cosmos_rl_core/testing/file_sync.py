"""Weight sync through safetensors files and a Unix socket that announces versions: core's tests need no other package.

A recipe names it `backend = "cosmos_rl_core.testing.file_sync:FileSync"`.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cosmos_rl_core.parallel.dtensor import whole
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_core.types import WeightSpec
from cosmos_rl_core.weight_sync import SyncCost, WeightPublisher, WeightSubscriber

POLL_S = 0.01


class FileSync:
    """Makes both sides. Implements `weight_sync.WeightSync`; token, transport and sizes are ignored."""

    def publisher(self, weights: Mapping[str, Tensor], *, ranks: RankGroup | None, **_: Any) -> FilePublisher:
        return FilePublisher(rank=ranks.rank if ranks else 0)

    def subscriber(self, address: str, weights: Mapping[str, Tensor], **_: Any) -> FileSubscriber:
        return FileSubscriber(Path(address), weights)

    def plan(self, specs: Sequence[WeightSpec], *, replicas: int, **_: Any) -> SyncCost:
        size = sum(math.prod(spec.shape) * 4 for spec in specs)
        return SyncCost(
            received_bytes=replicas * size,
            lower_bound_bytes=replicas * size,
            busiest_bytes=replicas * size,
            busiest_bound_bytes=replicas * size,
            extra_bytes=size,
        )


class FilePublisher(WeightPublisher):
    """Writes each version to a file and sends its number to every subscriber. Of several ranks rank 0 does so."""

    def __init__(self, *, rank: int = 0) -> None:
        self._rank = rank
        self._directory = tempfile.TemporaryDirectory(prefix="cosmos-rl-")
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._version = -1
        self._is_closed = False

    @property
    def address(self) -> str:
        return self._directory.name

    async def publish(
        self, version: int, weights: Mapping[str, Tensor], *, ready: torch.cuda.Event | None = None
    ) -> Mapping[str, float]:
        if ready is not None:
            ready.synchronize()
        tensors = {name: whole(tensor).contiguous() for name, tensor in weights.items()}  # with all ranks
        if self._rank != 0:
            return {}
        root = Path(self.address)
        if self._server is None:
            self._server = await asyncio.start_unix_server(self._welcome, root / "versions")
        partial = root / "partial"
        save_file(tensors, partial)
        partial.rename(root / f"{version}.safetensors")
        self._version = version
        for writer in self._writers:
            writer.write(f"{version}\n".encode())
        return {"sync_bytes": float(sum(t.numel() * t.element_size() for t in tensors.values()))}

    async def close(self) -> None:
        self._is_closed = True
        for writer in self._writers:
            writer.close()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()  # also for connections that were accepted just now
        self._directory.cleanup()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        if not self._is_closed:
            writer.write(f"{self._version}\n".encode())
            await reader.read()  # until the subscriber closes
        self._writers.discard(writer)
        writer.close()


class FileSubscriber(WeightSubscriber):
    """Reads the newest version that was announced."""

    def __init__(self, directory: Path, weights: Mapping[str, Tensor]) -> None:
        self._directory = directory
        self._weights = weights
        self._staged: Mapping[str, Tensor] = {}
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def stage(self, *, after: int) -> int:
        try:
            return await self._stage(after)
        except FileNotFoundError as error:  # closing removes its directory
            raise ConnectionError("the publisher closed") from error

    async def _stage(self, after: int) -> int:
        if self._reader is None:
            while self._directory.exists() and not (self._directory / "versions").exists():
                await asyncio.sleep(POLL_S)  # nothing is published yet
            self._reader, self._writer = await asyncio.open_unix_connection(self._directory / "versions")
        version = after
        while version <= after:
            line = await self._reader.readline()
            if not line:
                raise ConnectionError("the publisher closed")
            version = int(line)
        self._staged = load_file(self._directory / f"{version}.safetensors")
        return version

    def apply(self) -> None:
        with torch.no_grad():
            for name, tensor in self._weights.items():
                tensor.copy_(self._staged[name])

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

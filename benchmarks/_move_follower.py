"""A subscriber in a process of its own, for measurements: `python -m _move_follower`.

leader                                    follower
Following as a line of JSON    ------->   makes live tensors
                               <-------   an empty line; it connects with the first stage
an empty line                  ------->   stage, apply
                               <-------   Synced as a line of JSON
end of input                   ------->   exits
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_transfer.errors import PeerLost
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES, Manifest, Shard

if TYPE_CHECKING:
    from torch import Tensor

WIDTH = 1024
"""Columns of a matrix."""
NUM_MATRICES = 32


class SampleModel(msgspec.Struct, frozen=True):
    """Equal matrices [rows, WIDTH] and one odd vector, so that one rank receives `mib` MiB."""

    mib: int
    dtype: str = "float32"
    column_ranks: int = 1
    """Ranks of the receiving replica, which cut the columns; the model is as many times larger."""

    def specs(self) -> list[WeightSpec]:
        """Return the whole tensors."""
        rows = (self.mib << 20) * self.column_ranks // (ITEM_BYTES[self.dtype] * WIDTH * NUM_MATRICES)
        matrices = [WeightSpec(name=f"layer{i}", shape=(rows, WIDTH), dtype=self.dtype) for i in range(NUM_MATRICES)]
        return [*matrices, WeightSpec(name="bias", shape=(7,), dtype=self.dtype)]

    def tensors(self) -> dict[str, Tensor]:
        """Return random weights, whole."""
        import torch

        return {spec.name: torch.rand(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in self.specs()}

    def target(self) -> Manifest:
        """Return the cuts of the receiving replica."""
        specs = self.specs()
        cuts = {spec.name: [Shard(1)] for spec in specs if len(spec.shape) == 2}
        return Manifest.sharded(specs, mesh_shape=[self.column_ranks], placements=cuts)

    def landing(self, rank: int = 0) -> dict[str, Tensor]:
        """Return the receive buffers of `rank` of that replica, filled with ones: their pages are mapped."""
        import torch

        dtype = getattr(torch, self.dtype)
        return {spec.name: torch.ones(box.shape, dtype=dtype) for spec, box in self.target().held_by(rank)}


class Following(msgspec.Struct, frozen=True):
    """The task of a follower."""

    address: str
    token: bytes
    model: SampleModel
    transport: str = "auto"
    staging: Literal["shadow", "in_place"] = "shadow"


class Synced(msgspec.Struct, frozen=True):
    """One sync."""

    version: int
    stage_s: float
    apply_s: float
    num_bytes: int
    """Received."""


class Follower:
    """The leader's handle of the other process."""

    def __init__(self, following: Following) -> None:
        """Start the process and wait until it is ready to connect."""
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self._process.pid
        self._send(msgspec.json.encode(following))
        self._receive()

    def sync(self) -> Synced:
        """Make it receive the newest version. Raises PeerLost if it died."""
        self._send(b"")
        return msgspec.json.decode(self._receive(), type=Synced)

    def close(self) -> None:
        """Close its input and wait for its exit."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _receive(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerLost(f"the follower ended with code {self._process.wait()}; its reason stands above")
        return line

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()


async def follow(following: Following) -> None:
    """Stage and apply one version for each line of standard input."""
    from cosmos_rl_transfer.pull.subscriber import Subscriber

    model, version = following.model, -1
    subscriber = Subscriber(
        following.address,
        model.landing(),
        token=following.token,
        manifest=model.target(),
        settings=SyncSection(transport=following.transport, staging=following.staging),
    )
    _answer(b"")
    while await asyncio.to_thread(sys.stdin.buffer.readline):
        started = time.perf_counter()
        version = await subscriber.stage(after=version)
        staged = time.perf_counter()
        await asyncio.to_thread(subscriber.apply)
        done = Synced(version, staged - started, time.perf_counter() - staged, subscriber.pulled.num_bytes)
        _answer(msgspec.json.encode(done))
    await subscriber.close()


def _answer(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(follow(msgspec.json.decode(sys.stdin.buffer.readline(), type=Following)))

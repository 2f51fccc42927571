"""Where buckets are written at the subscriber: beside the live tensors, or straight into them.

Shadow     an arena of this rank's parts in their wire dtype; `apply` copies it over the live tensors
InPlace    the live tensors themselves, which nobody may use meanwhile
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cosmos_rl_transfer.arena import Arena, raw_view
from cosmos_rl_transfer.digest import Raw
from cosmos_rl_transfer.dtensor import dtype_name, local
from cosmos_rl_transfer.layout import Box, Manifest
from cosmos_rl_transfer.plan import Bucket
from cosmos_rl_transfer.raw import same_width, torch_view

if TYPE_CHECKING:
    from torch import Tensor

_TASK_BYTES = 4 << 20
"""What one thread copies at a time."""


class Landing(Protocol):
    """Takes buckets that were verified."""

    memory: Raw
    """What `place` returns parts of; empty if nothing can be received into its place."""

    def place(self, bucket: Bucket) -> Raw | None:
        """Return where the bucket's packed bytes may be received directly, padding included, or None."""
        ...

    def write(self, bucket: Bucket, data: Raw) -> None:
        """Put packed bytes uint8 [bucket.num_bytes] in their places."""
        ...


class Shadow:
    """One rank's parts in host memory."""

    def __init__(self, manifest: Manifest, *, rank: int, wire_dtypes: Mapping[str, str]) -> None:
        self.arena = Arena.of(manifest, rank=rank, wire_dtypes=wire_dtypes)
        self.memory: Raw = np.empty(self.arena.num_bytes, np.uint8)
        self.memory.fill(0)  # takes the page faults now

    def place(self, bucket: Bucket) -> Raw | None:
        start = self.arena.flat_start(bucket)
        return None if start is None else self.memory[start : start + bucket.num_bytes]

    def write(self, bucket: Bucket, data: Raw) -> None:
        place = self.place(bucket)
        if place is None:
            self.arena.scatter(data, bucket, self.memory)
        elif place.ctypes.data != data.ctypes.data:
            np.copyto(place, data)

    def apply(self, weights: Mapping[str, Tensor], *, pool: Executor) -> None:
        """Copy everything into this rank's live tensors, casting where dtypes differ."""
        runs: list[tuple[Tensor, Tensor]] = []
        for name, place in self.arena.places.items():
            source = torch_view(self.memory, place.at, place.box.shape, place.dtype)
            target = local(weights[name])
            if target.device.type != "cpu" or not target.is_contiguous() or target.dtype != source.dtype:
                target.copy_(source)
                continue
            step = _TASK_BYTES // place.item_bytes
            runs += zip(source.view(-1).split(step), target.view(-1).split(step))
        # not torch's own threads: they wait for each other, and a busy machine makes that ten times slower
        list(pool.map(lambda run: np.copyto(same_width(run[1]), same_width(run[0])), runs))


class InPlace:
    """One rank's live tensors."""

    def __init__(
        self, manifest: Manifest, weights: Mapping[str, Tensor], *, rank: int, wire_dtypes: Mapping[str, str]
    ) -> None:
        self.memory: Raw = np.empty(0, np.uint8)
        self._boxes: dict[str, Box] = {spec.name: box for spec, box in manifest.held_by(rank)}
        self._weights = weights
        self._wire = wire_dtypes
        self._scratch: Raw = np.empty(0, np.uint8)

    def place(self, bucket: Bucket) -> Raw | None:
        return None

    def write(self, bucket: Bucket, data: Raw) -> None:
        for piece in bucket.pieces:
            inside = piece.box.within(self._boxes[piece.name])
            target, dtype = local(self._weights[piece.name])[inside.slices()], self._wire[piece.name]
            if target.device.type == "cpu" and dtype_name(target) == dtype:
                np.copyto(same_width(target), raw_view(data, piece.at, piece.box.shape, target.element_size()))
            else:
                target.copy_(torch_view(self._writable(data), piece.at, piece.box.shape, dtype))

    def _writable(self, data: Raw) -> Raw:
        """Torch does not take memory that is mapped read-only."""
        if data.flags.writeable:
            return data
        if self._scratch.size < data.size:
            self._scratch = np.zeros(data.size, np.uint8)
        np.copyto(self._scratch[: data.size], data)
        return self._scratch[: data.size]

"""Who holds which part of which tensor, in checkpoint coordinates.

    Manifest            one per side: trainer, rollout replica
      TensorLayout      one per tensor: its WeightSpec and the box each rank holds
        Box             offset and shape inside the whole tensor

A rank holds at most one box of a tensor. Any cut is allowed: nothing has to divide evenly.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import msgspec

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.errors import LayoutError

if TYPE_CHECKING:
    from torch import Tensor

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of one element, by torch's name without the prefix."""


def is_floating(dtype: str) -> bool:
    """Say whether `dtype` may be cast on the way."""
    return dtype.startswith(("float", "bfloat"))


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor."""

    offset: tuple[int, ...]
    """Index of the first element, one a dim."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index, one a dim."""
        return tuple(o + n for o, n in zip(self.offset, self.shape))

    def intersect(self, other: Box) -> Box | None:
        """Return the common part, or None where there is none."""
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(map(min, self.end, other.end))
        if any(a >= b for a, b in zip(low, high)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high)))

    def contains(self, other: Box) -> bool:
        """Say whether every element of `other` lies in this box."""
        starts = all(a <= b for a, b in zip(self.offset, other.offset))
        return starts and all(a >= b for a, b in zip(self.end, other.end))

    def within(self, parent: Box) -> Box:
        """Return the same elements in the coordinates of `parent`."""
        return Box(tuple(a - b for a, b in zip(self.offset, parent.offset)), self.shape)

    def run_length(self, shape: Sequence[int]) -> int:
        """Return how many elements lie side by side in a row-major tensor of `shape` before the first gap."""
        run = 1
        for mine, whole in zip(reversed(self.shape), reversed(shape)):
            run *= mine
            if mine != whole:
                break
        return run

    def is_contiguous(self, shape: Sequence[int]) -> bool:
        """Say whether the box is one run of a row-major tensor of `shape`."""
        return self.run_length(shape) == self.numel

    def start(self, shape: Sequence[int]) -> int:
        """Return the flat index of the first element in a row-major tensor of `shape`."""
        flat = 0
        for offset, size in zip(self.offset, shape):
            flat = flat * size + offset
        return flat

    def slices(self) -> tuple[slice, ...]:
        """Return the indices that cut this box out of an array in the same coordinates."""
        return tuple(slice(a, b) for a, b in zip(self.offset, self.end))


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that covers a tensor of `shape`."""
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class Shard:
    """A mesh axis cuts `dim` by torch.chunk's rule."""

    dim: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """A mesh axis holds copies."""


Placement = Shard | Replicate


def shard_box(
    shape: Sequence[int],
    *,
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> Box:
    """Return the box at `coordinate` of the mesh, cutting left to right over the axes as DTensor does.

    Chunks have ceil(size / parts) elements; the last ones are smaller or empty (torch.chunk).
    """
    offset, size = [0] * len(shape), list(shape)
    for parts, placement, index in zip(mesh_shape, placements, coordinate):
        if isinstance(placement, Shard):
            dim = placement.dim % len(shape)
            chunk = -(-size[dim] // parts)
            low = min(index * chunk, size[dim])
            high = min(low + chunk, size[dim])
            offset[dim] += low
            size[dim] = high - low
    return Box(tuple(offset), tuple(size))


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor and the part of it each rank holds."""

    spec: WeightSpec
    boxes: dict[int, Box]
    """By rank, ascending. Ranks without a part are left out."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything one side holds."""

    layouts: tuple[TensorLayout, ...]

    @classmethod
    def whole(cls, specs: Sequence[WeightSpec], rank: int = 0) -> Manifest:
        """Describe whole tensors on one rank."""
        return cls(tuple(TensorLayout(spec, {rank: whole_box(spec.shape)}) for spec in specs))

    @classmethod
    def sharded(
        cls,
        specs: Sequence[WeightSpec],
        *,
        mesh_shape: Sequence[int],
        placements: Mapping[str, Sequence[Placement]],
        first_rank: int = 0,
    ) -> Manifest:
        """Describe tensors cut over a mesh whose ranks count row-major from `first_rank`; needs no process.

        `placements` has one entry a mesh axis for each tensor's name; a name left out is replicated.
        """
        coordinates = list(product(*(range(n) for n in mesh_shape)))
        everywhere = (Replicate(),) * len(mesh_shape)
        layouts = []
        for spec in specs:
            chosen = placements.get(spec.name, everywhere)
            if len(chosen) != len(mesh_shape):
                raise LayoutError(f"{spec.name}: {len(chosen)} placements for a mesh of shape {tuple(mesh_shape)}")
            found = (
                shard_box(spec.shape, mesh_shape=mesh_shape, placements=chosen, coordinate=at) for at in coordinates
            )
            layouts.append(TensorLayout(spec, {first_rank + i: b for i, b in enumerate(found) if b.numel}))
        return cls(tuple(layouts))

    @classmethod
    def from_tensors(cls, weights: Mapping[str, Tensor], *, rank: int = 0) -> Manifest:
        """Describe live tensors: DTensors by their mesh and placements, others as whole tensors on `rank`."""
        from cosmos_rl_transfer.dtensor import describe

        return cls(tuple(describe(name, tensor, rank=rank) for name, tensor in weights.items()))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold anything, ascending."""
        return tuple(sorted({rank for layout in self.layouts for rank in layout.boxes}))

    @property
    def specs(self) -> dict[str, WeightSpec]:
        return {layout.spec.name: layout.spec for layout in self.layouts}

    def held_by(self, rank: int) -> Iterator[tuple[WeightSpec, Box]]:
        """Yield what `rank` holds, in order."""
        for layout in self.layouts:
            if rank in layout.boxes:
                yield layout.spec, layout.boxes[rank]

    def encode(self) -> bytes:
        """Return the manifest as msgpack; equal manifests give equal bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Read what `encode` wrote. Raises msgspec.DecodeError on anything else."""
        return msgspec.msgpack.decode(data, type=cls)

    @property
    def digest(self) -> str:
        """SHA-256 of the encoded manifest."""
        return hashlib.sha256(self.encode()).hexdigest()

"""The placement of a tensor on one axis of a mesh, and the box at each coordinate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.box import Box


@dataclass(frozen=True, slots=True)
class Shard:
    """A mesh axis cuts `dim` by torch.chunk's rule: ceil(size / parts) each, the last ones smaller or empty."""

    dim: int
    multiple: int = 1
    """The dim is thought padded to a multiple of this before it is cut: engines pad vocabularies. Padding is no part
    of any box."""
    copies: int = 1
    """So many neighbours on the axis hold the same chunk: KV heads where there are more ranks than heads."""


@dataclass(frozen=True, slots=True)
class StridedShard:
    """A mesh axis cuts `dim` after all later axes that cut it: FSDP2 over tensor parallelism.

    torch calls it `_StridedShard`. Only where `split_factor` is the number of parts that the later axes make does a
    rank hold one box.
    """

    dim: int
    split_factor: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """A mesh axis holds copies."""


Placement = Shard | StridedShard | Replicate


def shard_box(
    shape: Sequence[int],
    *,
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> Box:
    """Return the box at `coordinate` of the mesh, of a tensor of `shape`.

    Axes cut left to right as DTensor does, strided ones after the later axes of their dim. Raises LayoutError where a
    rank would hold several boxes.
    """
    box = Box((0,) * len(shape), tuple(shape))
    for axis in cutting_order(mesh_shape, placements):
        box = _chunk(box, placements[axis], parts=mesh_shape[axis], index=coordinate[axis])
    return box


def cutting_order(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """Return the mesh axes that cut, in the order they do. Raises LayoutError as `shard_box`."""
    order: list[int] = []
    for axis in reversed(range(len(mesh_shape))):
        placement = placements[axis]
        if isinstance(placement, Shard):
            order.insert(0, axis)
        elif isinstance(placement, StridedShard):
            later = math.prod(mesh_shape[a] for a in order if _dim(placements[a]) == placement.dim)
            if placement.split_factor not in (1, later):
                raise LayoutError(
                    f"{placement} on axis {axis} of a mesh of shape {tuple(mesh_shape)}: the later axes cut dim "
                    f"{placement.dim} into {later} parts, so that a rank would hold several boxes; "
                    "redistribute the tensor to Shard or Replicate"
                )
            order.insert(len(order) if placement.split_factor == later else 0, axis)
    return order


def _dim(placement: Placement) -> int | None:
    return None if isinstance(placement, Replicate) else placement.dim


def _chunk(box: Box, placement: Placement, *, parts: int, index: int) -> Box:
    assert not isinstance(placement, Replicate)
    dim, size = placement.dim % len(box.shape), box.shape[placement.dim]
    if isinstance(placement, Shard):
        size = -(-size // placement.multiple) * placement.multiple
        parts, index = -(-parts // placement.copies), index // placement.copies
    chunk = -(-size // parts)
    low, high = (min(at * chunk, box.shape[dim]) for at in (index, index + 1))
    return box.cut(dim, low, high)

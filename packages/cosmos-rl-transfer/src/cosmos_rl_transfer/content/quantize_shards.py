"""Quantised shards of a DTensor: each rank its own, scales agreed upon where one takes several ranks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_rl_transfer.content.quantize import BLOCKS, Scheme, named, tiles_straddle
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.dtensor import describe, local

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def is_sharded(weight: Tensor) -> TypeGuard[DTensor]:
    """Say whether a tensor is a DTensor, without importing their module: it takes seconds."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(weight, module.DTensor)


def quantized_shards(name: str, weight: DTensor, scheme: Scheme) -> dict[str, Tensor]:
    """Return the values and scales of one weight by name, cut as it is; all ranks of its mesh call this together.

    Raises LayoutError if a shard cuts a tile of one scale.
    """
    block, whole = BLOCKS[scheme], tuple(weight.shape)
    boxes = describe(name, weight, rank=0).boxes.values()
    if block is not None and any(tiles_straddle(box, block, shape=whole) for box in boxes):
        raise LayoutError(
            f"{name}: its shards cut the {block[0]} x {block[1]} tiles of {scheme}; publish it as it is and let the "
            "engine quantise it, or train with shards that are multiples of a tile"
        )
    shard = local(weight)
    parts = named(name, shard, scheme, amax=_amax(weight, shard, scheme))
    wholes = named(name, torch.empty(whole, device="meta"), scheme)  # for the shapes
    return {part: _placed(tensor, tuple(wholes[part].shape), weight) for part, tensor in parts.items()}


def _amax(weight: DTensor, shard: Tensor, scheme: Scheme) -> Tensor | None:
    """Return the largest magnitudes over all shards under one scale: of the tensor [], or of a shard's rows [n, 1]."""
    if scheme in ("fp8", "nvfp4"):
        largest = shard.abs().amax() if shard.numel() else shard.new_zeros(())
        cut = [dim for dim, p in enumerate(weight.placements) if not p.is_replicate()]
    elif scheme == "fp8_channel":
        largest = shard.abs().amax(-1, keepdim=True) if shard.shape[1] else shard.new_zeros(shard.shape[0], 1)
        cut = [dim for dim, p in enumerate(weight.placements) if _cuts_rows(p)]
    else:
        return None
    for dim in cut:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=weight.device_mesh.get_group(dim))
    return largest


def _placed(part: Tensor, whole: tuple[int, ...], weight: DTensor) -> DTensor:
    """Return a DTensor of shape `whole` that is cut where `weight` is."""
    from torch.distributed.tensor import DTensor, Replicate

    def keeps(placement: Placement) -> bool:
        return len(whole) == 2 and not (whole[1] == 1 and _cuts_rows(placement))

    placements = [p if keeps(p) else Replicate() for p in weight.placements]
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(part, weight.device_mesh, placements, shape=torch.Size(whole), stride=stride)


def _cuts_rows(placement: Placement) -> bool:
    """Say whether ranks hold different columns, so that they share the rows' scales."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == 1

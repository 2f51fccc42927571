"""Boxes of live torch tensors. The only file that knows DTensor.

Its module takes seconds to import and no DTensor can exist before that, so it is looked up, not imported.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout import Placement, Replicate, Shard, TensorLayout, shard_box, whole_box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement


def dtype_name(tensor: Tensor) -> str:
    """Return torch's name of the dtype without the prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def local(tensor: Tensor) -> Tensor:
    """Return the part of the tensor that lies on this rank, without gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if _is_dtensor(tensor) else tensor


def describe(name: str, tensor: Tensor, *, rank: int) -> TensorLayout:
    """Return the layout of a tensor over all ranks of its mesh; a plain tensor lies whole on `rank`.

    Raises LayoutError for a placement that is not a plain Shard or Replicate.
    """
    spec = WeightSpec(name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor))
    if not _is_dtensor(tensor):
        return TensorLayout(spec, {rank: whole_box(spec.shape)})
    mesh = tensor.device_mesh.mesh
    placements = [_placement(name, placement) for placement in tensor.placements]
    boxes = {
        int(mesh[tuple(at)]): shard_box(
            spec.shape, mesh_shape=tuple(mesh.shape), placements=placements, coordinate=tuple(at)
        )
        for at in (mesh == mesh).nonzero().tolist()
    }
    return TensorLayout(spec, {r: boxes[r] for r in sorted(boxes) if boxes[r].numel})


def _is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _placement(name: str, placement: TorchPlacement) -> Placement:
    from torch.distributed import tensor as torch_tensor

    if type(placement) is torch_tensor.Shard:
        return Shard(placement.dim)
    if type(placement) is torch_tensor.Replicate:
        return Replicate()
    raise LayoutError(
        f"{name}: a tensor placed as {placement} cannot be transferred; redistribute it to Shard or Replicate"
    )

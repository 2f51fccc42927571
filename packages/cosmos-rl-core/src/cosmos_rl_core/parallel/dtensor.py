"""DTensors: gather the whole tensor from all ranks, and fill a rank's own shard from a file."""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return the tensor with all its elements, without gradient; all ranks that hold parts of a DTensor call it."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


Index = tuple[slice, ...] | EllipsisType
"""A box of a tensor, or all of it."""


def fill_own_part(tensor: Tensor, read: Callable[[Index], Tensor]) -> None:
    """Copy the result of `read` into a parameter, or into this rank's shard of one; only that box is read.

    Args:
        tensor: plain, or a DTensor; the value is cast to its type. Call it inside of `torch.no_grad()`.
        read: returns a box of the whole, as slices of safetensors do.
    """
    if not isinstance(tensor, DTensor):
        tensor.copy_(read(...))
        return
    local = tensor.to_local()
    if local.numel():
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        local.copy_(read(tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))))

"""Models over ranks, of which a rank allocates only its own shards; whole tensors from all ranks.

    with parameters_on_meta():        parameters have shapes and dtypes alone; buffers have their values
        model = make(config)
    fully_shard(model), ...           parameters become DTensors whose local shards are on meta
    materialise(model, device=...)    memory for the local shards, uninitialised
    fill_own_part(parameter, read)    their values, from a file

Buffers such as rotary frequencies are computed by constructors and are not in a checkpoint, so they never go to meta.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import EllipsisType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, without gradient; it shares the tensor's memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


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


_PATCHED = threading.Lock()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within the context, parameters that this thread registers in a module are on the meta device.

    A constructor's own tensor is allocated first, without being written by `torch.empty`, and freed at once. Tied
    parameters stay tied. Modules of other threads are not affected.
    """
    thread = threading.get_ident()
    with _PATCHED:
        register = nn.Module.register_parameter

        def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None and not param.is_meta and threading.get_ident() == thread:
                param = _on_meta(param)
            register(self, name, param)

        nn.Module.register_parameter = register_on_meta
        try:
            yield
        finally:
            nn.Module.register_parameter = register


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    moved = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    vars(moved).update(vars(parameter))  # marks that libraries set
    return moved


def materialise(module: nn.Module, *, device: torch.device) -> None:
    """Allocate the local shards of the parameters on meta, uninitialised, on `device`; other tensors stay.

    Call it after `fully_shard`, before an optimizer is made: parameters keep their identity, also tied ones.
    """

    def allocate(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    module._apply(allocate)

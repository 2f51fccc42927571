"""Boxes of live torch tensors. The only file that uses DTensor.

DTensor's module takes seconds to import, and no DTensor exists before: it is looked up in `sys.modules`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.box import Box, whole_box
from cosmos_rl_transfer.layout.placement import Placement, Replicate, Shard, StridedShard, shard_box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement


def dtype_name(tensor: Tensor) -> str:
    """Return torch's name of the dtype without the prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def local(tensor: Tensor) -> Tensor:
    """Return the part of the tensor that this rank holds, without gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if _is_dtensor(tensor) else tensor


def ties(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names whose memory was listed before, and under which name: {alias: first name}.

    A rank that holds nothing of a tensor sees by its empty storage what the others see by their parts.
    """
    tensors = {name: (tensor, local(tensor)) for name, tensor in weights.items()}
    kinds: dict[int, set[object]] = {}  # of the tensors in a storage
    for tensor, part in tensors.values():
        kinds.setdefault(_storage(part), set()).add((tensor.shape, part.dtype))
    first: dict[object, str] = {}
    owners = {name: first.setdefault(_memory(name, *pair, kinds), name) for name, pair in tensors.items()}
    return {name: owner for name, owner in owners.items() if name != owner}


def _memory(name: str, tensor: Tensor, part: Tensor, kinds: Mapping[int, set[object]]) -> object:
    """Return a key that is equal for tensors in the same memory; a tensor without memory, or in a pool, has its own.

    Storages whose memory is freed for a while, as those of an engine that sleeps, have no address.
    """
    if not part.is_meta and part.numel() and part.untyped_storage().nbytes():
        return part.device, part.data_ptr(), part.dtype, part.shape, part.stride()
    if not tensor.numel() or len(kinds[_storage(part)]) > 1:
        return name
    return _storage(part), part.storage_offset(), part.shape, part.stride()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def describe(name: str, tensor: Tensor, *, rank: int) -> tuple[WeightSpec, dict[int, Box]]:
    """Return a tensor's spec and its boxes by rank over the mesh; a plain tensor is whole on `rank`.

    Raises LayoutError for a tensor that holds partial sums, and for cuts that give a rank several boxes.
    """
    spec = WeightSpec(name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor))
    if not _is_dtensor(tensor):
        return spec, {rank: whole_box(spec.shape)}
    placements = tuple(_placement(name, placement) for placement in tensor.placements)
    mesh = tensor.device_mesh.mesh
    try:
        boxes = _boxes(spec.shape, tuple(mesh.shape), placements, tuple(mesh.reshape(-1).tolist()))
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from error
    _check_local(name, tensor, boxes, placements)
    return spec, boxes


@lru_cache(maxsize=1024)
def _boxes(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], ranks: tuple[int, ...]
) -> dict[int, Box]:
    """Boxes by rank; tensors placed alike share the dict."""
    boxes = {
        rank: shard_box(shape, mesh_shape=mesh_shape, placements=placements, coordinate=_unravel(i, mesh_shape))
        for i, rank in enumerate(ranks)
    }
    return {rank: boxes[rank] for rank in sorted(boxes) if boxes[rank].numel}


def _unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The coordinate of the index-th place of a row-major mesh."""
    places = []
    for size in reversed(shape):
        index, place = divmod(index, size)
        places.append(place)
    return tuple(reversed(places))


def _check_local(name: str, tensor: DTensor, boxes: Mapping[int, Box], placements: Sequence[Placement]) -> None:
    """Torch's two ways to cut a dim unevenly with a strided shard differ; trust the memory that is there."""
    if not any(isinstance(placement, StridedShard) for placement in placements):
        return
    from torch.distributed import get_rank

    box = boxes.get(get_rank())
    here = tensor.to_local()
    if here.numel() != (box.numel if box else 0) or (box and tuple(here.shape) != box.shape):
        raise LayoutError(
            f"{name}: this rank holds {tuple(here.shape)} of {tuple(tensor.shape)}, but {tuple(tensor.placements)} "
            f"should give it {box.shape if box else 'nothing'}; make the dim divisible by its cuts"
        )


def _is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _placement(name: str, placement: TorchPlacement) -> Placement:
    from torch.distributed.tensor import placement_types as torch_placements

    if type(placement) is torch_placements.Shard:
        return Shard(placement.dim)
    if type(placement) is torch_placements.Replicate:
        return Replicate()
    if type(placement) is torch_placements._StridedShard:
        return StridedShard(placement.dim, int(placement.split_factor))
    raise LayoutError(
        f"{name}: a tensor placed as {placement} cannot be transferred; redistribute it to Shard or Replicate"
    )

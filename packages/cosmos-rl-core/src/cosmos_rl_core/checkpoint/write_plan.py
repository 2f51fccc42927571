"""Assigns every box of every tensor to one rank that writes it, as DCP's planner does.

    held = local_pieces(tensors)                     # this rank's boxes, of plain tensors and DTensors
    written = assign([held of rank 0, held of rank 1, ...])   # each box once, the work spread evenly

Only the planner of torch.distributed.checkpoint is used: DCP's own driver exchanges plans as pickled objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType


class TensorPiece(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor, in the coordinates of the whole."""

    name: str
    dtype: str
    """torch's name without the prefix."""
    size: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """First index of the box on every dim."""
    shape: tuple[int, ...]
    """Shape of the box."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_of(self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.torch_dtype.itemsize * torch.Size(self.shape).numel()


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of a name: "float32"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def local_pieces(tensors: Mapping[str, Tensor]) -> list[TensorPiece]:
    """Return this rank's box of each tensor; none for a tensor without a part on this rank."""
    pieces = []
    for item in create_default_local_save_plan(dict(tensors), False).items:
        data = item.tensor_data
        assert data is not None, f"{item.index.fqn} is no tensor"
        if data.chunk.sizes.numel():
            dtype = str(data.properties.dtype).removeprefix("torch.")
            box = (tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            pieces.append(TensorPiece(item.index.fqn, dtype, *box))
    return pieces


def assign(pieces_of_ranks: Sequence[Sequence[TensorPiece]]) -> list[list[TensorPiece]]:
    """Boxes held by each rank -> boxes written by each rank: every box once."""
    plans = dedup_save_plans([SavePlan([_write_item(piece) for piece in pieces]) for pieces in pieces_of_ranks])
    chosen = [{(item.index.fqn, item.index.offset) for item in plan.items} for plan in plans]
    return [
        [piece for piece in pieces if (piece.name, torch.Size(piece.offset)) in mine]
        for pieces, mine in zip(pieces_of_ranks, chosen)
    ]


def _write_item(piece: TensorPiece) -> WriteItem:
    box = ChunkStorageMetadata(offsets=torch.Size(piece.offset), sizes=torch.Size(piece.shape))
    data = TensorWriteData(chunk=box, properties=TensorProperties(dtype=piece.torch_dtype), size=torch.Size(piece.size))
    return WriteItem(MetadataIndex(piece.name, box.offsets), WriteItemType.SHARD, tensor_data=data)

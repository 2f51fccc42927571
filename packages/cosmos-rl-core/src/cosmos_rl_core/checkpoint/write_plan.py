"""Assigns every box of every tensor to one rank that writes it.

    pieces = local_pieces(tensors)                       # this rank's boxes, of plain tensors and DTensors
    written = assign([pieces of rank 0, of rank 1, ...])   # each box once, the work spread evenly

The boxes are those of torch.distributed.checkpoint's planner; its own driver exchanges plans as pickled objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan


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
    """Boxes held by each rank -> boxes written by each rank: every box once, and about as many bytes a rank.

    Every rank calls it with the same lists and gets the same result, so that nothing is sent back.
    """
    # Copies of a replicated tensor are equal pieces, which several ranks hold; shards are held by one rank each.
    holders: dict[TensorPiece, list[int]] = {}
    for rank, pieces in enumerate(pieces_of_ranks):
        for piece in pieces:
            holders.setdefault(piece, []).append(rank)
    # Greedy: each box goes to that one of its holders with the fewest bytes so far. Shards cannot move, and come as
    # they do; a large replicated tensor after them evens the ranks out again.
    num_bytes = [0] * len(pieces_of_ranks)
    writers: dict[TensorPiece, int] = {}
    for piece, ranks in holders.items():
        writers[piece] = min(ranks, key=num_bytes.__getitem__)
        num_bytes[writers[piece]] += piece.num_bytes
    return [[piece for piece in pieces if writers[piece] == rank] for rank, pieces in enumerate(pieces_of_ranks)]

"""Context parallelism: sequences cut over the ranks of `cp`, whole again for attention, where heads are cut instead.

    [L/cp, heads, D]   each rank has its rows of every head              matrix products, norms, experts, output head
       |  all-to-all
    [L, heads/cp, D]   each rank has every row of its heads              attention, of any kind
       |  all-to-all
    [L/cp, heads, D]

All ranks along cp have the same samples and compute the same loss; each one's parameters get the gradient of its rows,
and the sum over cp is the whole gradient. Source: DeepSpeed-Ulysses, Jacobs et al., arXiv:2309.14509.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh


def rows_to_heads(rows: Tensor, axis: DeviceMesh) -> Tensor:
    """Exchange this rank's rows of all heads [L/cp, heads, D] for all rows of its heads [L, heads/cp, D].

    Differentiable; cp must divide the heads. All ranks of `axis` call it together.
    """
    length, heads, width = rows.shape
    size = axis.size()
    assert heads % size == 0, f"{heads} heads over {size} ranks"
    by_rank = rows.view(length, size, heads // size, width).transpose(0, 1)  # [to rank, L/cp, heads/cp, D]
    return _AllToAll.apply(by_rank, axis).flatten(0, 1)


def heads_to_rows(heads: Tensor, axis: DeviceMesh) -> Tensor:
    """Exchange all rows of this rank's heads [L, heads/cp, D] for its rows of all heads [L/cp, heads, D].

    Differentiable; cp must divide L. All ranks of `axis` call it together.
    """
    size = axis.size()
    assert len(heads) % size == 0, f"{len(heads)} rows over {size} ranks"
    by_rank = heads.unflatten(0, (size, -1))  # [to rank, L/cp, heads/cp, D]
    return _AllToAll.apply(by_rank, axis).transpose(0, 1).flatten(1, 2)


def place_terms(values: Tensor, places: Tensor, length: int, axis: DeviceMesh) -> Tensor:
    """Gather the terms of all ranks: every rank gets all of them.

    The backward pass returns this rank's part of the gradient, which is the same on every rank.

    Args:
        values: [t, ...], t differs from rank to rank and may be 0.
        places: [t] int64: their indices in the result; every index belongs to one rank of `axis`.
        length: T, the terms of all ranks.

    Returns:
        [T, ...], the same on every rank.
    """
    return _PlaceTerms.apply(values, places, length, axis)


class _AllToAll(torch.autograd.Function):
    """Block i [size, ...] goes to rank i; blocks come back in the order of ranks. Its own backward."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, axis: DeviceMesh) -> Tensor:
        ctx.axis = axis
        return _exchange(blocks, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.axis), None


def _exchange(blocks: Tensor, axis: DeviceMesh) -> Tensor:
    blocks = blocks.contiguous()
    output = torch.empty_like(blocks)
    dist.all_to_all_single(output, blocks, group=axis.get_group())
    return output


class _PlaceTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, length: int, axis: DeviceMesh) -> Tensor:
        ctx.save_for_backward(places)
        placed = values.new_zeros(length, *values.shape[1:]).index_copy_(0, places, values)
        dist.all_reduce(placed, group=axis.get_group())
        return placed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return gradients[0][places], None, None, None

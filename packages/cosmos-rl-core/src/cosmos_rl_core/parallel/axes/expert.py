"""Experts spread over ranks: rows are sent to the rank of their expert, computed there, and sent back.

    hidden [N, H], experts [N, k]     every row goes to k experts: N k slots
    dispatch                          slots sorted by expert --all-to-all--> rows [R, H] sorted by this rank's experts
    grouped_linear                    one matrix an expert
    combine                           --all-to-all--> outputs of the k slots, summed with their gates [N, k] -> [N, H]

Counts are sent first, for the splits are uneven: no row is dropped and none is padded. The layout is that of GShard
(arXiv:2006.16668) without its capacity, as in MegaBlocks (arXiv:2211.15841). All ranks along `ep` call together.

On a GPU the host waits once in a `dispatch` over an axis, for the splits, and never without one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from cosmos_rl_core.hardware_log import log_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class RowExchange:
    """The origin of dispatched rows, by which `combine` sends their outputs back."""

    home: Tensor
    """[N k] int64: index of each slot among the rows that left this rank."""
    arrived: Tensor
    """[R] int64: index of each arrived row among the rows sorted by expert."""
    left: list[int]
    """Rows that left for each rank of the axis."""
    came: list[int]
    """Rows that came from each rank of the axis."""
    axis: DeviceMesh | None


def dispatch(
    hidden: Tensor, experts: Tensor, *, num_experts: int, axis: DeviceMesh | None
) -> tuple[Tensor, Tensor, RowExchange]:
    """Send each row of `hidden` to its experts, of which a rank holds `num_experts / ep` in order.

    Args:
        hidden: [N, H], with gradient; N may differ from rank to rank, and be 0.
        experts: [N, k] int64: which of all experts each row goes to.
        axis: the ep axis, None where one rank holds all experts.

    Returns:
        The rows [R, H] for this rank's experts, sorted by expert; [local experts] int32, where each expert's rows end;
        and the input of `combine`.
    """
    # A row with k experts fills k slots. Sorted by expert, the slots of a rank's experts are one run, which is what
    # all-to-all sends; a stable sort keeps equal experts in the order of rows, the same on every run.
    slots = experts.reshape(-1)
    order = slots.argsort(stable=True)
    rows = hidden[order // experts.shape[1]]
    counts = count_slots(slots, num_experts)
    if axis is None:
        kept = torch.arange(len(slots), device=slots.device)
        return rows, _ends(counts), RowExchange(home=_inverse(order), arrived=kept, left=[], came=[], axis=None)
    # The counts travel first, one row of them a rank: the splits of the rows themselves are not known before.
    leaving = counts.view(axis.size(), -1)  # [rank, its experts]
    each = [1] * axis.size()
    coming = _all_to_all(leaving, each, each, axis)  # [rank they come from, my experts]
    left, came = _splits(leaving, coming)
    # Rows arrive sorted by rank and, within a rank, by expert; `grouped_linear` needs all rows of an expert together.
    by_expert = _experts_of(coming, num_rows=sum(came)).argsort(stable=True)
    rows = _all_to_all(rows, came, left, axis)[by_expert]
    exchange = RowExchange(home=_inverse(order), arrived=_inverse(by_expert), left=left, came=came, axis=axis)
    return rows, _ends(coming.sum(0)), exchange


def combine(rows: Tensor, gates: Tensor, exchange: RowExchange) -> Tensor:
    """Bring the experts' outputs [R, H] back and sum those of each row with its `gates` [N, k]: [N, H]."""
    if exchange.axis is not None:
        rows = _all_to_all(rows[exchange.arrived], exchange.left, exchange.came, exchange.axis)
    slots = rows[exchange.home].view(*gates.shape, rows.shape[-1])
    return (slots * gates.unsqueeze(-1)).sum(dim=1).to(rows.dtype)


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Multiply the rows of each expert by its matrix.

    Args:
        rows: [R, in], sorted by expert.
        weight: [experts, in, out].
        ends: [experts] int32: where each expert's rows end.
        bias: [experts, out].

    Returns:
        [R, out] in the type of `weight`, or of autocast on a GPU, whose fast kernel takes bfloat16 alone. An expert
        without rows gets a gradient of zeros, so that every rank has one.
    """
    if weight.device.type == "cuda":
        _log_slow_products(weight)
    mixed = weight.device.type == "cuda" and torch.is_autocast_enabled("cuda")
    weight = weight.to(torch.get_autocast_dtype("cuda")) if mixed else weight
    rows, bias = rows.to(weight.dtype), None if bias is None else bias.to(weight.dtype)
    product = F.grouped_mm(rows, weight, offs=ends) if _has_grouped_mm(weight) else _loop(rows, weight, ends)
    if bias is None:
        return product
    return product + bias.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), dim=0, output_size=len(rows))


def own_rows(num_rows: int, axis: DeviceMesh | None) -> slice:
    """Return this rank's slice of rows that all ranks of `axis` have: parts whose sizes differ by at most one."""
    if axis is None:
        return slice(num_rows)
    rank, size = axis.get_local_rank(), axis.size()
    return slice(num_rows * rank // size, num_rows * (rank + 1) // size)


def count_slots(experts: Tensor, num_experts: int) -> Tensor:
    """Return the number of slots [num_experts] int64 of each expert. Unlike with bincount, the host does not wait."""
    slots = experts.reshape(-1)
    return slots.new_zeros(num_experts).scatter_add_(0, slots, torch.ones_like(slots))


def _splits(leaving: Tensor, coming: Tensor) -> tuple[list[int], list[int]]:
    """Rows that leave for each rank of the axis, and that come from each; the host waits for them."""
    left, came = torch.stack([leaving.sum(1), coming.sum(1)]).tolist()
    return left, came


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


def _inverse(order: Tensor) -> Tensor:
    """The permutation that undoes `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _experts_of(counts: Tensor, *, num_rows: int) -> Tensor:
    """Arrived rows are ordered by rank, then by expert: counts [ranks, experts] -> expert of each row [R]."""
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return experts.repeat_interleave(counts.reshape(-1), output_size=num_rows)


def _has_grouped_mm(weight: Tensor) -> bool:
    """Whether torch multiplies `weight` [experts, in, out] in one call: its rows must be multiples of 16 bytes."""
    if any(size * weight.element_size() % 16 for size in weight.shape[1:]):
        return False
    kind = weight.device.type
    return kind == "cpu" or (kind == "cuda" and torch.cuda.get_device_capability(weight.device) >= (8, 0))


def _log_slow_products(weight: Tensor) -> None:
    """Log once that products of experts have no kernel of their own: the host then reads the ends of their rows."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    major, minor = torch.cuda.get_device_capability(weight.device)
    if dtype != torch.bfloat16 or major not in (9, 10):
        name = str(dtype).removeprefix("torch.")
        log_choice(
            f"experts: a product for each, the host waits for the GPU ({name}, compute capability {major}.{minor})"
        )


def _loop(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_mm` where torch has none; experts without rows take part, for their gradients."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ matrix for part, matrix in zip(rows.split(sizes), weight.unbind(), strict=True)])


def _all_to_all(rows: Tensor, came: list[int], left: list[int], axis: DeviceMesh) -> Tensor:
    """Rows [sum(left), ...] -> [sum(came), ...]: `left[r]` of them to rank r, `came[r]` from it; gradients go back.

    The functional collective: "selective" recomputation keeps its result.
    """
    exchanged = collectives.all_to_all_single_autograd(rows.contiguous(), came, left, axis.get_group())
    return collectives.wait_tensor(exchanged)

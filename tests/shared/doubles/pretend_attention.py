"""Attention on the pretend CUDA device: the rules of its fused kernels, and `varlen_attn` with values of the CPU."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from doubles.pretend_record import Record
from doubles.pretend_tensor import PretendTensor

_HALF = (torch.float16, torch.bfloat16)


def check_fused(
    record: Record,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """Count a call of scaled_dot_product_attention with these arguments if CUDA has no fused kernel for it.

    Flash attention takes half precision, head dims up to 256 and no mask; the memory-efficient kernel takes masks and
    float32, but no grouped heads (`sdp_utils.cpp` of torch 2.13). None takes float64.
    """
    flash = attn_mask is None and query.dtype in _HALF and query.shape[-1] <= 256
    efficient = query.dtype != torch.float64 and (not enable_gqa or key.shape[1] == query.shape[1])
    if isinstance(query, PretendTensor) and not flash and not efficient:
        shape = f"{list(query.shape)} {query.dtype}".replace("torch.", "")
        record.count(record.math_attention, f"{'masked' if attn_mask is not None else 'causal'} {shape}, grouped")


def varlen_attention(
    record: Record,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Stand in for `torch.nn.attention.varlen.varlen_attn`, whose kernel needs CUDA; computes in float32.

    The last query of a sequence attends to its last key (`flash_fwd_kernel.h`: bottom right). Raises RuntimeError for
    arguments that the kernel refuses.
    """
    record.count(record.varlen, "varlen_attn")
    given = (query, key, value, cu_seq_q, cu_seq_k)
    if not all(isinstance(tensor, PretendTensor) for tensor in given):
        record.count(record.mismatches, "varlen_attn")
    half = query.dtype in _HALF and query.dtype == key.dtype == value.dtype
    width = query.shape[-1]
    if not half or width % 8 or width > 256 or key.shape[-1] != width or value.shape[-1] != width:
        raise RuntimeError(f"varlen_attn: {[(tensor.dtype, list(tensor.shape)) for tensor in given[:3]]}")
    ends = [tensor.held.tolist() if isinstance(tensor, PretendTensor) else tensor.tolist() for tensor in given[3:]]
    most = [max(end - start for start, end in pairwise(each)) for each in ends]
    integers = cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    if not integers or most != [max_q, max_k] or [each[-1] for each in ends] != [len(query), len(key)]:
        raise RuntimeError(
            f"varlen_attn: ends {ends}, longest {max_q} and {max_k}, of {len(query)} and {len(key)} rows"
        )
    assert enable_gqa and window_size[1] == 0, "causal attention, grouped heads allowed"
    outputs = []
    with torch.autocast("cuda", enabled=False):
        for (q0, q1), (k0, k1) in zip(*map(pairwise, ends)):
            outputs.append(_one(query[q0:q1], key[k0:k1], value[k0:k1], scale=scale, before=window_size[0]))
    return torch.cat(outputs).to(query.dtype)


def _one(query: Tensor, key: Tensor, value: Tensor, *, scale: float, before: int) -> Tensor:
    """query [n, heads, D], key and value [m, kv_heads, D] of one sequence -> [n, heads, D] float32."""
    group = query.shape[1] // key.shape[1]
    query = query.float().transpose(0, 1)
    key, value = (x.float().repeat_interleave(group, dim=1).transpose(0, 1) for x in (key, value))
    last = torch.arange(query.shape[1], device=query.device)[:, None] + (key.shape[1] - query.shape[1])
    place = torch.arange(key.shape[1], device=query.device)
    hidden = (place > last) | (place < last - before if before >= 0 else place < 0)
    scores = (scale * query @ key.transpose(1, 2)).masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, dim=-1) @ value).transpose(0, 1)

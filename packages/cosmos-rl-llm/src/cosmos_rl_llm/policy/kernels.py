"""Attention on CUDA: a kernel for each layer, so that none falls to torch's math kernel with its scores [heads, L, L].

    flash        torch                  half precision, head dims up to 256; windows; sinks as keys, without a window
    flash_attn   package flash-attn     half precision, head dims up to 256; windows and soft caps
    flex         compiled by Triton     everything
    efficient    torch                  all but soft caps; a window is a mask [L, L], key-value heads are repeated
    plain        torch                  everything, with scores [heads, L, L]: only where nothing else is installed

A sink is a further term of the softmax's sum: with it, outputs are multiplied by sigmoid(logsumexp(scores) - sink).
CPUs use `attention.causal_attention`.

flash and flash_attn take the sequences of a packed row in one call without padding (`Ragged`), except with sinks; the
other kernels take padded blocks of them.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from cosmos_rl_core.hardware_log import log_choice
from cosmos_rl_llm.policy.attention import Scoring, causal_attention, two_way_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Kernel = Literal["flash", "flash_attn", "flex", "efficient", "plain"]

_HALF = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256
"""Of the flash kernels."""
_ALIGNED = 8
"""Head dims of fused kernels on CUDA are multiples of this; others are padded with zeros."""
_FLEX_VERSIONS = 64
"""Compiled versions of flex_attention: by window, soft cap, sinks, dtype, gradients, and whether lengths vary."""
_TILE = 128
"""Rows and columns of a block of a block mask."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Sequences in one row without padding, for kernels that take the ends of each.

    The queries of a sequence are the rows that it does not share with the sequences before it, one behind the other;
    its keys are all of its rows.
    """

    query_ends: Tensor
    """[n + 1] int32: first row of each sequence's queries, and the number of rows."""
    key_ends: Tensor
    """[n + 1] int32: the same among the keys."""
    rows: Tensor | None
    """[keys] int64: row of each key; None where no rows are shared, so that keys are the rows."""
    most_queries: int
    longest: int
    """Most keys of a sequence."""

    @classmethod
    def of(cls, lengths: Sequence[int], rows: np.ndarray) -> Ragged | None:
        """Lay out sequences of `lengths`; rows [sum(lengths)]: of their tokens. None where queries do not ascend."""
        # A token is its sequence's own if its row is beyond all rows so far. Kernels align the last query with the last
        # key, so that own tokens must be the end of their sequence, and their rows must count up without gaps.
        sizes = np.array(lengths)
        starts = np.cumsum(sizes) - sizes
        own = np.diff(np.maximum.accumulate(rows), prepend=-1) > 0
        queries = np.add.reduceat(own, starts, dtype=np.int64)
        place = np.arange(len(rows)) - np.repeat(starts, sizes)
        if not np.array_equal(own, place >= np.repeat(sizes - queries, sizes)):
            return None  # shared rows are not a prefix
        if not np.array_equal(rows[own], np.arange(queries.sum())):
            return None
        query_ends, key_ends = (torch.from_numpy(_ends(counts)) for counts in (queries, sizes))
        shared = None if len(rows) == queries.sum() else torch.from_numpy(rows)
        return cls(query_ends, key_ends, shared, int(queries.max()), int(sizes.max()))


def _ends(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def attend(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """query [B, heads, L, D], key [B, kv_heads, L, D], value [B, kv_heads, L, D'] -> [B, heads, L, D'], causal."""
    if not query.is_cuda:
        return causal_attention(query, key, value, scoring)
    query, key, value = _cast(query, key, value)
    scoring = _within(scoring, query.shape[2])
    kernel = choose(scoring, dtype=query.dtype, head_dim=query.shape[-1], available=available(query.device))
    return RUN[kernel](query, key, value, scoring)


def attend_ragged(query: Tensor, key: Tensor, value: Tensor, ragged: Ragged, scoring: Scoring) -> Tensor | None:
    """Attend in one call of a kernel; None where the kernel of the layer takes only sequences of one length.

    query [L, heads, D], key [L, kv_heads, D], value [L, kv_heads, D'] -> [L, heads, D'], causal.
    """
    if not query.is_cuda or scoring.sinks is not None:
        return None
    query, key, value = _cast(query, key, value)
    scoring = _within(scoring, ragged.longest)
    kernel = choose(scoring, dtype=query.dtype, head_dim=query.shape[-1], available=available(query.device))
    if kernel not in RUN_RAGGED:
        return None
    if ragged.rows is not None:
        key, value = (x.index_select(0, ragged.rows) for x in (key, value))
    width = value.shape[-1]
    query, key, value = _same_width(query, key, value)
    return RUN_RAGGED[kernel](query, key, value, ragged, scoring)[..., :width]


def attend_two_way(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """`two_way_attention`, on CUDA with repeated key-value heads: no fused kernel takes grouped heads and a mask."""
    if not query.is_cuda:
        return two_way_attention(query, key, value, scoring)
    query, key, value = _cast(query, key, value)
    group, width = query.shape[1] // key.shape[1], value.shape[-1]
    key, value = (x if group == 1 else x.repeat_interleave(group, dim=1) for x in (key, value))
    query, key, value = _same_width(query, key, value)
    return two_way_attention(query, key, value, scoring)[..., :width]


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to autocast's dtype, as autocast does for torch's own attention only."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype("cuda")) for tensor in tensors)


def _within(scoring: Scoring, length: int) -> Scoring:
    """Drop a window that hides nothing of `length` tokens."""
    return replace(scoring, window=None) if scoring.window is not None and scoring.window >= length else scoring


def choose(scoring: Scoring, *, dtype: torch.dtype, head_dim: int, available: Collection[str]) -> Kernel:
    """Return the kernel for a layer whose heads are `head_dim` wide, out of those of its device."""
    # From the fastest to the one that always works. Sinks as keys widen a head by `_ALIGNED`, and a window would hide
    # the sink's key from later queries of the flash kernel, which takes no mask.
    sinks = scoring.sinks is not None
    half = dtype in _HALF and head_dim + (_ALIGNED if sinks else 0) <= _MAX_HEAD_DIM
    if scoring.softcap is None:
        if half and "flash" in available and not (sinks and scoring.window):
            return "flash"
        if scoring.window is None:
            return "efficient"
    if half and "flash_attn" in available and not sinks:
        return "flash_attn"
    if "flex" in available:
        return "flex"
    return "efficient" if scoring.softcap is None else "plain"


@cache
def available(device: torch.device) -> frozenset[str]:
    """The kernels of a CUDA device that depend on its generation or on what is installed."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return frozenset()
    compiler = any(shutil.which(name) for name in (os.environ.get("CC", "gcc"), "clang"))  # as Triton searches for it
    installed = {
        "flash": True,
        "flash_attn": find_spec("flash_attn") is not None,
        "flex": find_spec("triton") is not None and compiler,
    }
    return frozenset(name for name, is_installed in installed.items() if is_installed)


def describe(model: PreTrainedModel, *, device: torch.device, dtype: torch.dtype) -> str:
    """One line: the kernels of the layers of `model` on a GPU, where attention computes in `dtype`."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sinks = torch.empty(0) if any(name.endswith("sinks") for name, _ in model.named_parameters()) else None
    softcap, window = getattr(config, "attn_logit_softcapping", None), getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    used: Counter[str] = Counter()
    for kind in kinds:
        slides = window if kind == "sliding_attention" else None
        scoring = Scoring(scale=1.0, window=slides, softcap=softcap, sinks=sinks)
        kernel = choose(scoring, dtype=dtype, head_dim=head_dim, available=available(device))
        features = {f"window {slides}": slides, f"soft cap {softcap}": softcap, "sinks": sinks is not None}
        used[", ".join([kernel, *(name for name, has in features.items() if has)])] += 1
    layers = "; ".join(f"{kernel}: {count} layers" for kernel, count in used.items())
    slow = "; plain keeps scores [heads, L, L]: install flash-attn, or Triton" if "plain" in layers else ""
    return f"attention: {layers} ({device}, {str(dtype).removeprefix('torch.')}, head dim {head_dim}){slow}"


def log_kernels(model: PreTrainedModel, *, device: torch.device, dtype: torch.dtype) -> None:
    """Log `describe` for a GPU, once for each text."""
    if device.type == "cuda":
        log_choice(describe(model, device=device, dtype=dtype))


def _flash(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Windows by the kernel for sequences of different lengths, the only one of torch's that has them."""
    if scoring.window is None:
        return causal_attention(query, key, value, scoring)
    rows, _, length, _ = query.shape
    ends = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=query.device)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in _same_width(query, key, value))
    output = _flash_ragged(q, k, v, Ragged(ends, ends, None, length, length), scoring)
    return output.unflatten(0, (rows, length)).transpose(1, 2)[..., : value.shape[-1]]


def _flash_ragged(query: Tensor, key: Tensor, value: Tensor, ragged: Ragged, scoring: Scoring) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        query,
        key,
        value,
        ragged.query_ends,
        ragged.key_ends,
        ragged.most_queries,
        ragged.longest,
        scale=scoring.scale,
        window_size=_before(scoring.window),
        enable_gqa=True,
    )
    assert isinstance(output, Tensor)
    return output


def _before(window: int | None) -> tuple[int, int]:
    """The window as tokens before and behind the last key of a query; -1: all."""
    return (-1 if window is None else window - 1, 0)


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]

    q, k, v = (x.transpose(1, 2) for x in _same_width(query, key, value))
    window, softcap = _before(scoring.window), scoring.softcap or 0.0
    output = flash_attn_func(q, k, v, softmax_scale=scoring.scale, causal=True, window_size=window, softcap=softcap)
    return output.transpose(1, 2)[..., : value.shape[-1]]


def _flash_attn_ragged(query: Tensor, key: Tensor, value: Tensor, ragged: Ragged, scoring: Scoring) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    return flash_attn_varlen_func(
        query,
        key,
        value,
        ragged.query_ends,
        ragged.key_ends,
        ragged.most_queries,
        ragged.longest,
        softmax_scale=scoring.scale,
        causal=True,
        window_size=_before(scoring.window),
        softcap=scoring.softcap or 0.0,
    )


def _flex(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest

    options: dict[str, Any] = {"return_aux": AuxRequest(lse=True)} if scoring.sinks is not None else {}
    output = _flex_attention()(
        query,
        key,
        value,
        score_mod=None if scoring.softcap is None else _soft_cap(scoring.softcap),
        block_mask=block_mask(query.shape[2], scoring.window, query.device),
        scale=scoring.scale,
        enable_gqa=True,
        **options,
    )
    if scoring.sinks is None:
        return output
    # softmax with a sink = softmax * sum / (sum + exp(sink)), and sum = exp(lse): a sigmoid of the difference.
    output, rest = output
    return output * torch.sigmoid(rest.lse - scoring.sinks.float()[:, None]).unsqueeze(-1).to(output.dtype)


def _efficient(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    # With grouped heads and a mask torch falls to its math kernel, so that the heads are repeated.
    group = query.shape[1] // key.shape[1]
    key, value = (x if group == 1 else x.repeat_interleave(group, dim=1) for x in (key, value))
    width = value.shape[-1]
    query, key, value = _same_width(query, key, value)
    return causal_attention(query, key, value, scoring)[..., :width]


RUN: Mapping[Kernel, Callable[[Tensor, Tensor, Tensor, Scoring], Tensor]] = {
    "flash": _flash,
    "flash_attn": _flash_attn,
    "flex": _flex,
    "efficient": _efficient,
    "plain": causal_attention,
}
RUN_RAGGED: Mapping[Kernel, Callable[[Tensor, Tensor, Tensor, Ragged, Scoring], Tensor]] = {
    "flash": _flash_ragged,
    "flash_attn": _flash_attn_ragged,
}


def _same_width(*tensors: Tensor) -> list[Tensor]:
    """Pad heads with zeros to one width that fused kernels take; narrower values occur in MLA."""
    width = -(-max(tensor.shape[-1] for tensor in tensors) // _ALIGNED) * _ALIGNED
    return [tensor if tensor.shape[-1] == width else F.pad(tensor, (0, width - tensor.shape[-1])) for tensor in tensors]


@cache
def _flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Past the limit, or with a break in its graph, it would run uncompiled with its scores [heads, L, L]: an error.
    return cast(Any, torch.compile)(flex_attention, fullgraph=True, recompile_limit=_FLEX_VERSIONS)


@cache
def _soft_cap(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@lru_cache(maxsize=64)
def block_mask(length: int, window: int | None, device: torch.device) -> BlockMask:
    """The causal block mask of `length` positions, by the numbers of its blocks: there is no mask [L, L]."""
    from torch.nn.attention.flex_attention import BlockMask

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        before = query >= key
        return before if window is None else before & (query - key < window)

    # Blocks are decided by the distance of their first rows: a block has some visible pairs if its nearest pair is
    # visible, and is full if its farthest pair is. A full block is computed without the mask; a block of queries that
    # the end of the sequence cuts never counts as full.
    number = torch.arange(-(-length // _TILE), device=device)
    apart = (number[:, None] - number[None, :]) * _TILE  # of the first rows of query and key blocks
    some, every = apart >= 0, (apart > 0) & (number[:, None] < length // _TILE)
    if window is not None:  # the nearest pair of two blocks, the farthest pair
        some, every = some & (apart - (_TILE - 1) < window), every & (apart + (_TILE - 1) < window)
    # `BlockMask.from_kv_blocks` would find the transposes through an index in host memory, which the host waits for.
    partial = some & ~every
    by_query, by_key = (*_in_order(partial), *_in_order(every)), (*_in_order(partial.T), *_in_order(every.T))
    return BlockMask((length, length), *by_query, *by_key, BLOCK_SIZE=(_TILE, _TILE), mask_mod=seen)


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [rows, columns] of blocks -> number of blocks of each row [1, 1, rows], and those first, int32."""
    chosen = blocks.to(torch.int32)[None, None]
    return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).to(torch.int32)

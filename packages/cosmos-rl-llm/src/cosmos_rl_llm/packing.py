"""Attention of this package: one function installed into a model, told by a layout which tokens see which.

    model row      | prompt 0 | response 0 | prompt 1 | response 1 | ...      [1, L], sequences end to end
    padded blocks  [sequences, heads, longest, head_dim]                      causal, right-padded: pads are never seen

A right-padded causal block needs no mask, so a packed row costs one gather, one fused attention per block of
similar lengths, and one scatter. Everything else in the network runs on the L real tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from cosmos_rl_core.interfaces import UserError

ATTENTION = "cosmos_rl"
"""Name under which `install_attention` registers `layout_attention` with transformers."""

_MAX_PADDING = 1.3
"""A block is closed when its padded length exceeds this multiple of its next sequence's length."""
_BLOCK_SLACK = 32
"""Tokens of padding a sequence that are always accepted: below that a further block costs more than it saves."""


class Layout(Protocol):
    """What a forward pass hands to every attention layer as the keyword `layout`."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        """query [B, heads, Q, D], key and value [B, kv_heads, K, D] -> [B, Q, heads, D]."""
        ...


def layout_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as `layout` says; the signature is the one transformers calls (`AttentionInterface`)."""
    assert layout is not None, "the model was called without `layout`; go through CausalLMPolicy or TorchEngine"
    assert attention_mask is None, "layouts replace masks"
    if softcap is not None or s_aux is not None or dropout:
        raise UserError(
            f"{type(module).__name__} uses attention soft-capping, sinks or dropout, which packed attention does not do; "
            "set [model] path to a model without them"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layout.attend(query, key, value, scaling=scale, window=sliding_window), None


def install_attention(model: PreTrainedModel) -> None:
    """Make `model` use `layout_attention`. Raises UserError for a model with its own attention code."""
    AttentionInterface.register(ATTENTION, layout_attention)
    if not model._can_set_attn_implementation():
        raise UserError(
            f"{type(model).__name__} does not use transformers' AttentionInterface; set [model] path to one that does"
        )
    model.set_attn_implementation(ATTENTION)


@dataclass(frozen=True, slots=True)
class _Block:
    """Sequences of similar length, right-padded to the longest."""

    source: Tensor
    """[rows * longest] int64: index in the packed row of each padded place; pads repeat the sequence's first token."""
    rows: int
    longest: int


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Sequences laid end to end in one row, each causal and blind to the others."""

    blocks: tuple[_Block, ...]
    restore: Tensor
    """[L] int64: place of each token of the packed row in the concatenated padded blocks."""

    @classmethod
    def of(cls, lengths: Sequence[int], *, device: torch.device | str = "cpu") -> PackedLayout:
        """Lay out sequences of `lengths` (all positive), in packed order."""
        starts = torch.tensor([0, *lengths]).cumsum(0)
        restore = torch.empty(int(starts[-1]), dtype=torch.int64)
        blocks = []
        offset = 0
        for members in _similar(lengths):
            longest = lengths[members[0]]
            first = starts[members][:, None]
            place = torch.arange(longest)[None, :]
            real = place < torch.tensor([lengths[m] for m in members])[:, None]
            source = torch.where(real, first + place, first)
            padded = offset + torch.arange(source.numel()).view_as(source)
            restore[source[real]] = padded[real]
            offset += source.numel()
            blocks.append(_Block(source.flatten().to(device), len(members), longest))
        return cls(tuple(blocks), restore.to(device))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        rows = [x[0].transpose(0, 1) for x in (query, key, value)]  # [L, heads, D]
        outputs = [_attend_block(block, *rows, scaling=scaling, window=window) for block in self.blocks]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.index_select(0, self.restore).unsqueeze(0)


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Group indices by length, longest first, so that padding stays a small part of each group."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[groups[-1][0]] <= _MAX_PADDING * lengths[index] + _BLOCK_SLACK:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _attend_block(
    block: _Block, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
) -> Tensor:
    """Causal attention of one block: packed rows [L, heads, D] in, [rows * longest, heads, D] out."""
    q, k, v = (
        x.index_select(0, block.source).view(block.rows, block.longest, *x.shape[1:]).transpose(1, 2)
        for x in (query, key, value)
    )
    mask = None if window is None or window >= block.longest else _band(block.longest, window, q.device)
    output = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    return output.transpose(1, 2).reshape(-1, *query.shape[1:])


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """[length, length] bool: place i sees places i - window + 1 .. i."""
    allowed = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return allowed.triu(1 - window)

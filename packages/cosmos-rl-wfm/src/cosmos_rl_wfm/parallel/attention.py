"""Attention over a whole video whose tokens are cut over the ranks of `cp`; heads are cut instead while it runs.

    video [B, heads, l, D]      text [B, heads, S, D], the same on every rank
       |  all-to-all               |  this rank's heads
    [B, heads/cp, L + S, D]     attention, as torch computes it
       |  all-to-all               |  every rank's heads to all
    video [B, heads, l, D]      text [B, heads, S, D]

l = ceil(L / cp) tokens of a rank; the last ranks are padded with rows that no attention reads. Text takes part in
joint attention (SD3); cross-attention is per token and exchanges nothing. Each rank has a partial gradient of the text;
the sum over cp is the whole.
Source: DeepSpeed-Ulysses, Jacobs et al., arXiv:2309.14509.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from cosmos_rl_core.parallel.axes.context import heads_to_rows, rows_to_heads


class WholeAttention(TorchFunctionMode):
    """Within the context, `scaled_dot_product_attention` of this rank's tokens attends over all tokens.

    A mode reaches every processor of diffusers that calls torch, without a processor of our own for each class.
    """

    def __init__(self, axis: DeviceMesh, *, rows: int, num_tokens: int) -> None:
        """rows: video tokens of this rank, which precede text. num_tokens: video tokens of all ranks."""
        super().__init__()
        self.calls = 0
        self._axis = axis
        self._rows = rows
        self._num_tokens = num_tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """[B, heads, l + S, D] each -> [B, heads, l + S, D]."""
        assert attn_mask is None, "a mask over video tokens is not supported"
        assert query.shape == key.shape == value.shape, "self-attention has as many keys as queries"
        heads = self._own_heads(torch.cat([_by_row(states) for states in (query, key, value)], dim=2))
        batch = len(query)
        query, key, value = (_by_sample(states, batch=batch) for states in heads.chunk(3, dim=2))
        output = F.scaled_dot_product_attention(query, key, value, **options)  # [B, heads/cp, L + S, D]
        return _by_sample(self._own_rows(_by_row(output)), batch=batch)

    def _own_heads(self, states: Tensor) -> Tensor:
        """[l + S, heads, width] -> [L + S, heads/cp, width]."""
        video, text = states[: self._rows], states[self._rows :]
        video = rows_to_heads(video, self._axis)[: self._num_tokens]
        return torch.cat([video, text.chunk(self._axis.size(), dim=1)[self._axis.get_local_rank()]])

    def _own_rows(self, states: Tensor) -> Tensor:
        """[L + S, heads/cp, width] -> [l + S, heads, width]: each rank receives its tokens and all text."""
        video, text = states[: self._num_tokens], states[self._num_tokens :]
        size = self._axis.size()
        filled = F.pad(video, (0, 0, 0, 0, 0, size * self._rows - self._num_tokens))
        by_rank = torch.cat([filled.unflatten(0, (size, self._rows)), text.expand(size, *text.shape)], dim=1)
        return heads_to_rows(by_rank.flatten(0, 1), self._axis)


def _by_row(states: Tensor) -> Tensor:
    """[B, heads, rows, D] -> [rows, heads, B D]."""
    return states.permute(2, 1, 0, 3).flatten(2)


def _by_sample(states: Tensor, *, batch: int) -> Tensor:
    """[rows, heads, B D] -> [B, heads, rows, D]."""
    return states.unflatten(2, (batch, -1)).permute(2, 1, 0, 3)

"""Causal attention of sequences of one length, with soft caps, windows and sinks; in a fused kernel if possible.

    s = scale * q . k        s = softcap * tanh(s / softcap)        weight_j = exp(s_j) / (sum_i exp(s_i) + exp(sink))

A sink is a score per head that takes weight and has no value. Fused kernels have no sinks; they are expressed as keys:

    queries  [ 0 | sink/scale ]  one query, dropped                 keys  [ 0 | 1 ]  the sink
             [ q | sink/scale ]  the real ones                            [ k | 0 ]  the real ones

so that scale * q' . k' is the sink for the first key and scale * q . k for the others. All queries see the first key.

Tokens of one picture may attend to each other in both directions (`two_way_attention`): Gemma 3, arXiv:2503.19786.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

_ALIGNED = 8
"""Columns added to a head for its sink: fused kernels prefer head dims that are multiples of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Parameters of an attention layer that turn dot products into weights."""

    scale: float
    window: int | None = None
    """A token attends to itself and the `window` - 1 before it; None: to all before it."""
    softcap: float | None = None
    """Gemma 2, arXiv:2408.00118, section 2."""
    sinks: Tensor | None = None
    """[heads]: gpt-oss, arXiv:2508.10925; StreamingLLM, arXiv:2309.17453."""

    def weights(self, scores: Tensor, mask: Tensor) -> Tensor:
        """scores [B, kv_heads, group, ..., K], overwritten; mask of 0 and -inf that broadcasts -> weights alike."""
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        # The mask comes after the cap: tanh would make -inf finite.
        scores = scores.add_(mask)
        if self.sinks is None:
            return torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
        sinks = self.sinks.view(*scores.shape[1:3], *[1] * (scores.dim() - 3)).to(scores.dtype)
        # The sink is one more column of the softmax, dropped afterwards: the others then sum to less than 1.
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
        return torch.softmax(scores, -1, dtype=torch.float32)[..., :-1].to(scores.dtype)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """query [B, heads, L, D], key [B, kv_heads, L, D], value [B, kv_heads, L, D'] -> [B, heads, L, D'].

    Soft-capped scores need all [L, L] of them in memory; everything else goes through torch's fused kernels.
    """
    if scoring.softcap is not None:
        return _plain_attention(query, key, value, scoring, _seen(query.shape[2], scoring.window, query.device))
    if scoring.sinks is None:
        return _fused_attention(query, key, value, _band(query, scoring.window), scoring.scale)
    # Fused kernels have no sinks. The module's docstring shows the two additions: one element of the heads, 1 in the
    # added first key and 0 in all others, and the sink divided by the scale in every query.
    column = (scoring.sinks / scoring.scale).view(1, -1, 1, 1).to(query.dtype)
    column = column.expand(query.shape[0], -1, query.shape[2] + 1, 1)
    query = F.pad(torch.cat([F.pad(query, (0, 0, 1, 0)), column], dim=-1), (0, _ALIGNED - 1))
    key = F.pad(key, (0, _ALIGNED, 1, 0))
    key[:, :, 0, -_ALIGNED] = 1
    mask = _band(query, scoring.window)
    if mask is not None:
        mask[:, 0] = True  # the sink is seen from inside of every window
    return _fused_attention(query, key, F.pad(value, (0, 0, 1, 0)), mask, scoring.scale)[:, :, 1:]


def two_way_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """query [B, heads, n, D], key [B, kv_heads, m, D], value [B, kv_heads, m, D'] -> [B, heads, n, D'].

    The queries are the last n of m tokens. Each attends to the tokens before it that the window leaves, and to all
    tokens behind it.
    """
    shown, total, window = query.shape[2], key.shape[2], scoring.window
    if window is not None:
        # No query sees further back than the first one's window: keys before it are left out.
        total = min(total, shown + window - 1)
        key, value = key[:, :, -total:], value[:, :, -total:]
    hides = window is not None and window < total
    if scoring.softcap is None and scoring.sinks is None and not hides:
        return _fused_attention(query, key, value, None, scoring.scale, causal=False)
    # Query i is token total - shown + i. Below the diagonal of triu the window ends; above it all is seen.
    last = total if window is None else window
    seen = torch.ones(shown, total, dtype=torch.bool, device=query.device).triu(total - shown - last + 1)
    if scoring.softcap is None and scoring.sinks is None:
        return _fused_attention(query, key, value, seen, scoring.scale)
    return _plain_attention(query, key, value, scoring, seen)


def continued_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """query [B, heads, n, D], key [B, kv_heads, m, D], value [B, kv_heads, m, D'] -> [B, heads, n, D'].

    The queries are the last n of m tokens. Each attends to itself and the tokens before it that the window leaves.
    """
    new, total = query.shape[2], key.shape[2]
    # Query i is token total - new + i: the diagonal of the mask is moved to the right by the earlier tokens.
    seen = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
    if scoring.window is not None:
        seen = seen.triu(total - new + 1 - scoring.window)
    if scoring.softcap is None and scoring.sinks is None:
        return _fused_attention(query, key, value, seen, scoring.scale)
    return _plain_attention(query, key, value, scoring, seen)


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, *, causal: bool = True
) -> Tensor:
    """Without a mask: causal, or all. Fused kernels take values as wide as keys; narrower ones (MLA) are padded."""
    width = value.shape[-1]
    output = F.scaled_dot_product_attention(
        query,
        key,
        F.pad(value, (0, max(0, key.shape[-1] - width))),
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[..., :width]


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, seen: Tensor) -> Tensor:
    """seen [Q, K] bool: whether a query attends to a key."""
    batch, heads, length, _ = query.shape
    grouped = query.view(batch, key.shape[1], -1, *query.shape[2:]) * scoring.scale
    mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, float("-inf"))
    weights = scoring.weights(grouped @ key[:, :, None].transpose(-1, -2), mask)
    return (weights @ value[:, :, None]).view(batch, heads, length, -1)


def _band(query: Tensor, window: int | None) -> Tensor | None:
    """[L, L] bool, or None if the window hides nothing."""
    length = query.shape[2]
    return None if window is None or window >= length else _seen(length, window, query.device)


def _seen(length: int, window: int | None, device: torch.device) -> Tensor:
    """[length, length] bool: position i attends to positions i - window + 1 .. i."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - (window or length))

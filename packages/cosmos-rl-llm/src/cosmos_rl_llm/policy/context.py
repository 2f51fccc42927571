"""Context parallelism of a packed row over `cp`: the tokens and terms of a rank, and its attention.

row   | 0 .. l-1 | l .. 2l-1 | ...      rank r has rows r*l .. (r+1)*l - 1, and the terms predicted there
attention over the whole row by heads/cp heads (`parallel.context`): sequences, shared prefixes, windows and sinks
are those of the row before the cut

With a vision tower the row is cut at the decoder's entrance:

    tokens [1, L] -> embedding [1, L, H], pictures in their places      whole on every rank of cp and tp
                  -> decoder(own rows [1, l, H])                        over cp, and over tp with sequence_parallel

A picture may lie across the border of two parts. The row is therefore whole until its pictures are in it, and the tower
runs on every rank of cp and tp. Over cp each rank has the gradient of its own rows, which FSDP sums; over tp all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.axes.context import heads_to_rows, place_terms, rows_to_heads
from cosmos_rl_core.parallel.axes.tensor import TensorAxis
from cosmos_rl_llm.policy.attention import Scoring
from cosmos_rl_llm.policy.packing import PackedLayout


@dataclass(frozen=True, slots=True)
class ContextLayout:
    """Attention of a rank's rows [L/cp] to the whole row."""

    layout: PackedLayout
    """Layout of all L rows."""
    axis: DeviceMesh

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query [1, heads, L/cp, D], key [1, kv_heads, L/cp, D], value alike -> [1, L/cp, heads, D']."""
        query, key, value = self._own_heads(query), self._own_heads(key), self._own_heads(value)
        output = self.layout.attend(query, key, value, self._own_scoring(scoring))  # [1, L, heads/cp, D']
        return heads_to_rows(output[0], self.axis).unsqueeze(0)

    def _own_heads(self, states: Tensor) -> Tensor:
        """[1, heads, L/cp, D] -> [1, heads/cp, L, D]; fewer than cp heads are repeated, gradients add up."""
        rows = states[0].transpose(0, 1)
        heads = rows.shape[1]
        times = math.lcm(heads, self.axis.size()) // heads
        rows = rows if times == 1 else rows.repeat_interleave(times, dim=1)
        return rows_to_heads(rows, self.axis).transpose(0, 1).unsqueeze(0)

    def _own_scoring(self, scoring: Scoring) -> Scoring:
        if scoring.sinks is None:
            return scoring
        return replace(scoring, sinks=scoring.sinks.chunk(self.axis.size())[self.axis.get_local_rank()])


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPart:
    """One rank's part of a row of L tokens and T terms: l = L / cp tokens and t terms."""

    tokens: Tensor
    """[1, l] int64."""
    positions: Tensor
    """[1, l] int64, or [3, 1, l]."""
    layout: ContextLayout
    rows: slice
    """Indices of this part among the L rows."""
    term_rows: Tensor
    """[t] int64: index among the l rows of the hidden state that predicts a term."""
    labels: Tensor
    """[t] int64."""
    terms: Tensor
    """[t] int64: indices among the T terms."""
    num_terms: int
    """T."""

    def all_terms(self, values: Tensor) -> Tensor:
        """Gather values of terms [t, ...] into [T, ...] on every rank. Differentiable; collective over the axis."""
        return place_terms(values, self.terms, self.num_terms, self.layout.axis)


def cut(
    *, tokens: Tensor, positions: Tensor, layout: PackedLayout, term_rows: Tensor, labels: Tensor, axis: DeviceMesh
) -> ContextPart:
    """Return this rank's part of a packed row, without communication.

    Args:
        tokens: [L] int64; cp divides L.
        positions: [L] int64, or [3, L].
        layout: of all L rows.
        term_rows: [T] int64: index in the row of the hidden state that predicts a term.
        labels: [T] int64.
        axis: the ranks along cp.
    """
    length, rest = divmod(len(tokens), axis.size())
    assert rest == 0, f"{len(tokens)} rows over {axis.size()} ranks"
    start = length * axis.get_local_rank()
    rows = slice(start, start + length)
    terms = torch.nonzero((term_rows >= rows.start) & (term_rows < rows.stop)).squeeze(1)
    return ContextPart(
        tokens=tokens[None, rows],
        positions=positions[..., None, rows],
        layout=ContextLayout(layout, axis),
        rows=rows,
        term_rows=term_rows[terms] - start,
        labels=labels[terms],
        terms=terms,
        num_terms=len(term_rows),
    )


def cut_at_entrance(decoder: nn.Module, axis: TensorAxis | None) -> None:
    """Let `decoder` take the whole row and keep this rank's part, in place.

    Its forward pass takes a further keyword: `own_rows`, a slice of the L rows over cp; None: the input is cut already.

    Args:
        decoder: a module from `inputs_embeds` [1, L, H] to hidden states; `visual_pos_masks` [1, L] and
            `deepstack_visual_embeds` [n, H] are those of DeepStack (Qwen3-VL).
        axis: ranks along tp; rows are cut over them with sequence parallelism.
    """
    inner = decoder.forward

    def forward(*args: Any, own_rows: slice | None = None, **kwargs: Any) -> Any:
        if own_rows is None:
            return inner(*args, **kwargs)
        kwargs["inputs_embeds"] = _own(kwargs["inputs_embeds"], own_rows, axis)
        if kwargs.get("visual_pos_masks") is not None:
            kwargs |= _own_features(kwargs["visual_pos_masks"], kwargs["deepstack_visual_embeds"], own_rows, axis)
        return inner(*args, **kwargs)

    decoder.forward = forward


def _own(hidden: Tensor, rows: slice, axis: TensorAxis | None) -> Tensor:
    """[1, L, H] -> this rank's rows [1, l, H]."""
    part = hidden[:, rows]
    return axis.cut(part) if axis is not None and axis.sequence else part


def _own_features(mask: Tensor, features: Sequence[Tensor], rows: slice, axis: TensorAxis | None) -> dict[str, Any]:
    """The rows that show pictures [1, L], and what each of the first layers adds to them [n, H]: this rank's part."""
    mine = _own(mask[..., None].float(), rows, axis)[..., 0] > 0
    parts = []
    for feature in features:
        spread = feature.new_zeros(*mask.shape, feature.shape[-1]).masked_scatter(mask[..., None], feature)
        parts.append(_own(spread, rows, axis)[mine])
    return {"visual_pos_masks": mine, "deepstack_visual_embeds": parts}


def check_heads(config: PreTrainedConfig, *, tp: int, cp: int) -> None:
    """Raise UserError if tp x cp does not divide the query heads."""
    if tp * cp == 1:
        return  # a family without attention has none
    heads = config.get_text_config().num_attention_heads
    if heads % (tp * cp):
        raise UserError(
            f"[policy.parallel] tp x cp = {tp} x {cp} = {tp * cp} does not divide the model's {heads} attention heads: "
            "each rank needs the same number of them; lower cp or tp"
        )

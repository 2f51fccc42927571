"""Context parallelism of a packed row over `cp`: the tokens and terms of a rank, and its attention.

row   | 0 .. l-1 | l .. 2l-1 | ...      rank r has rows r*l .. (r+1)*l - 1, and the terms predicted there
attention over the whole row by heads/cp heads (`parallel.context`): sequences, shared prefixes, windows and sinks
are those of the row before the cut
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.axes.context import heads_to_rows, place_terms, rows_to_heads
from cosmos_rl_llm.policy.attention import Scoring
from cosmos_rl_llm.policy.packing import PackedLayout


@dataclass(frozen=True, slots=True)
class ContextLayout:
    """Attention of a rank's rows [L/cp] to the whole row."""

    whole: PackedLayout
    """Layout of all L rows."""
    axis: DeviceMesh

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query [1, heads, L/cp, D], key [1, kv_heads, L/cp, D], value alike -> [1, L/cp, heads, D']."""
        query, key, value = self._own_heads(query), self._own_heads(key), self._own_heads(value)
        output = self.whole.attend(query, key, value, self._own_scoring(scoring))  # [1, L, heads/cp, D']
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
    """[1, l] int64."""
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
        """Gather values of terms [t] into [T] on every rank. Differentiable; collective over the axis."""
        return place_terms(values, self.terms, self.num_terms, self.layout.axis)


def cut(
    *, tokens: Tensor, positions: Tensor, layout: PackedLayout, term_rows: Tensor, labels: Tensor, axis: DeviceMesh
) -> ContextPart:
    """Return this rank's part of a packed row, without communication.

    Args:
        tokens: [L] int64; cp divides L.
        positions: [L] int64.
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
        positions=positions[None, rows],
        layout=ContextLayout(layout, axis),
        rows=rows,
        term_rows=term_rows[terms] - start,
        labels=labels[terms],
        terms=terms,
        num_terms=len(term_rows),
    )


def check_heads(config: PreTrainedConfig, *, tp: int, cp: int) -> None:
    """Raise UserError if tp x cp does not divide the query heads."""
    heads = config.get_text_config().num_attention_heads
    if heads % (tp * cp):
        raise UserError(
            f"[policy.parallel] tp x cp = {tp} x {cp} = {tp * cp} does not divide the model's {heads} attention heads: "
            "each rank needs the same number of them; lower cp or tp"
        )

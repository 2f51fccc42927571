"""A packed row of a microbatch, and context parallelism over `cp`: the tokens and terms of a rank, and its attention.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.axes.context import heads_to_rows, place_terms, rows_to_heads
from cosmos_rl_core.parallel.axes.tensor import TensorAxis
from cosmos_rl_llm.policy.attention import Scoring
from cosmos_rl_llm.policy.packing import PackedLayout, SequenceLayout
from cosmos_rl_llm.policy.truncation import Repeats


@dataclass(frozen=True, slots=True)
class ContextLayout(SequenceLayout):
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
        # With more ranks than key-value heads each head is repeated for the ranks whose queries need it: the lowest
        # common multiple is the fewest heads that cp divides, in the order in which queries are dealt.
        rows = states[0].transpose(0, 1)
        heads = rows.shape[1]
        times = math.lcm(heads, self.axis.size()) // heads
        rows = rows if times == 1 else rows.repeat_interleave(times, dim=1)
        return rows_to_heads(rows, self.axis).transpose(0, 1).unsqueeze(0)

    def _own_scoring(self, scoring: Scoring) -> Scoring:
        if scoring.sinks is None:
            return scoring
        return replace(scoring, sinks=scoring.sinks.chunk(self.axis.size())[self.axis.get_local_rank()])


@dataclass(frozen=True, slots=True)
class OwnTerms:
    """The terms of a row that one rank along cp computes: those predicted from its rows."""

    places: Tensor
    """[t] int64: indices among the T terms, ascending."""
    num_terms: int
    """T."""
    axis: DeviceMesh

    def gather(self, values: Tensor) -> Tensor:
        """Gather values of terms [t, ...] into [T, ...] on every rank. Differentiable; collective over the axis."""
        return place_terms(values, self.places, self.num_terms, self.axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShard:
    """One rank's part of a microbatch: l of its tokens, t of its T terms."""

    tokens: Tensor
    """[1, l] int64; [1, L] with `own_rows`."""
    positions: Tensor
    """[1, l] int64; [3, 1, l] where a family counts along time, height and width."""
    layout: SequenceLayout
    """Attention layout of the tokens."""
    term_rows: Tensor
    """[t] int64: index among the l tokens of the hidden state that predicts a term."""
    labels: Tensor
    """[t] int64: the terms' tokens."""
    routes: Tensor | None = None
    """[l, layers, k] int64: replayed experts, if the microbatch has any."""
    own_terms: OwnTerms | None = None
    """With cp: gathers the terms of all ranks."""
    media: Mapping[str, Tensor] | None = None
    """Keywords of the model's forward pass with the pictures of the row."""
    own_rows: slice | None = None
    """This rank's part of a row that is cut at the decoder's entrance, after its pictures are in it."""
    sampled: bool = True
    """Whether an engine sampled the terms; those of supervised rows are among all tokens."""
    repeats: Repeats | None = None
    """With a repetition penalty: the tokens before each of the t terms."""
    lengths: Tensor | None = None
    """[1, l] int64: see `SequenceRope.lengths`."""
    teacher: Mapping[str, Tensor] = field(default_factory=dict)
    """[t, ...]: outputs of the teacher for the terms, if there are any."""

    @property
    def seen(self) -> dict[str, Any]:
        """Keywords of the model's forward pass."""
        return {**(self.media or {}), **({} if self.own_rows is None else {"own_rows": self.own_rows})}


def cut(row: TokenShard, axis: DeviceMesh) -> TokenShard:
    """Return this rank's part of a packed row over cp, which divides its L tokens. Nothing is sent.

    Terms go with the row of the hidden state that predicts them, so that ranks have different numbers of terms. Tokens
    and `media` stay whole where the row is cut at the decoder's entrance.
    """
    assert isinstance(row.layout, PackedLayout)
    length, rest = divmod(row.positions.shape[-1], axis.size())
    assert rest == 0, f"{row.positions.shape[-1]} rows over {axis.size()} ranks"
    start = length * axis.get_local_rank()
    rows = slice(start, start + length)
    # A term belongs to the rank with the hidden state that predicts it, which may not be the one with its token.
    terms = torch.nonzero((row.term_rows >= rows.start) & (row.term_rows < rows.stop)).squeeze(1)
    return replace(
        row,
        tokens=row.tokens[:, rows] if row.own_rows is None else row.tokens,
        positions=row.positions[..., rows],
        layout=ContextLayout(row.layout, axis),
        term_rows=row.term_rows[terms] - start,
        labels=row.labels[terms],
        teacher={name: values[terms] for name, values in row.teacher.items()},
        routes=None if row.routes is None else row.routes[rows],
        repeats=None if row.repeats is None else row.repeats.of_terms(terms),
        lengths=None if row.lengths is None else row.lengths[:, rows],
        own_terms=OwnTerms(terms, len(row.term_rows), axis),
        own_rows=None if row.own_rows is None else rows,
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
        # The features have no row of their own: spread them over the whole row, cut, and take what is left.
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

"""Attention of packed sequences: one function, installed into a model, that follows a layout of the row.

    packed row     | prompt 0 | response 0 | prompt 1 | response 1 | ...   [1, L]
    padded blocks  [sequences, heads, longest, head_dim]                   causal, right padding is never attended to

A right-padded causal block needs no mask, so a packed row costs one gather, one fused attention per block of
similar lengths, and one scatter. Kernels that take the ends of sequences need one call, without padding, and a gather
of the keys where prompts are shared (`kernels.Ragged`). Everything else in the network runs on the L real tokens
only, and on the prompt of a group once (`share_prefixes`).

Where tokens of a picture attend to each other in both directions, the outputs of these rows are computed a second time
(`PictureSpan`) and replace those of the causal pass: pictures are few and short beside the row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import to_device
from cosmos_rl_llm.model.tower import read_grids_on_host
from cosmos_rl_llm.policy.attention import Scoring
from cosmos_rl_llm.policy.kernels import Ragged, attend, attend_ragged, attend_two_way

ATTENTION = "cosmos_rl"
"""Name under which `install_attention` registers `layout_attention` with transformers."""

_UNSAID: Any = object()
_NOT_DONE = ("position_bias", "indices", "block_indices")
"""Keywords by which families change scores (Inkling) or choose tokens (DeepSeek-V3.2, MiniMax-M3)."""

_MAX_PADDING = 1.3
"""A block's longest sequence is at most this multiple of its shortest, plus `_MAX_PADDING_TERMS`."""
_MAX_PADDING_TERMS = 32
"""Padding a sequence that is always accepted: below that a further block costs more than it saves."""


class SequenceLayout(ABC):
    """The keyword `layout` of a forward pass, passed to every attention layer."""

    __slots__ = ()

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query [B, heads, Q, D], key [B, kv_heads, K, D], value [B, kv_heads, K, D'] -> [B, Q, heads, D']."""


def layout_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: SequenceLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = _UNSAID,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend according to `layout`, without dropout; transformers calls this through its `AttentionInterface`.

    Raises UserError for a layer with a feature that layouts do not support.
    """
    extras = [name for name in _NOT_DONE if others.get(name) is not None]
    if extras or layout is None or attention_mask is not None:
        why = f"needs {extras[0]}" if extras else "uses its own mask" if layout else "does not pass keywords on"
        raise UserError(
            f"model.path: {type(module).__name__} {why}, so that packed sequences cannot be separated; choose another"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = _configured_window(module) if sliding_window is _UNSAID else sliding_window
    scoring = Scoring(scale=scale, window=window, softcap=softcap, sinks=s_aux)
    return layout.attend(query, key, value, scoring), None


def _configured_window(module: nn.Module) -> int | None:
    """The window of a layer whose family encodes it only in the mask: PhiMoE, Qwen2-MoE."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or layer is None or kinds[layer] == "sliding_attention"
    return getattr(config, "sliding_window", None) if slides else None


def install_attention(model: PreTrainedModel, *, traced: bool = True) -> None:
    """Make `model` use `layout_attention`. Raises UserError for a model with its own attention code.

    `traced` = False excludes it from torch.compile, which would recompile for each new layout.
    """
    name = ATTENTION if traced else f"{ATTENTION}_untraced"
    AttentionInterface.register(name, layout_attention if traced else torch.compiler.disable(layout_attention))
    config = model.config.get_text_config()
    is_text_model = config is model.config
    read_grids_on_host(model)
    model.set_attn_implementation(name if is_text_model else {"text_config": name, "vision_config": "sdpa"})
    if config._attn_implementation != name:
        raise UserError(
            f"model.path: {type(model).__name__} does not go through transformers' AttentionInterface; "
            "choose a model that does"
        )


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences of similar length, right-padded to the longest."""

    source: Tensor
    """[rows * longest] int64: index in the packed row; padding repeats the sequence's first token."""
    rows: int
    longest: int

    def gather(self, packed: Tensor) -> Tensor:
        """[1, L, ...] of a packed row -> [rows, longest, ...]."""
        return packed[0].index_select(0, self.source).view(self.rows, self.longest, *packed.shape[2:])


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """Tokens of one picture, which attend to each other in both directions."""

    queries: Tensor
    """[n] int64: rows of the tokens."""
    keys: Tensor
    """[m] int64: rows of the sequence up to the last of these tokens."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Packed rows [L, heads, D] -> [n, heads, D']."""
        q, k, v = (
            x.index_select(0, rows).transpose(0, 1).unsqueeze(0)
            for x, rows in ((query, self.queries), (key, self.keys), (value, self.keys))
        )
        return attend_two_way(q, k, v, scoring)[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class PackedLayout(SequenceLayout):
    """Sequences in one row, causal and isolated from one another; they may share the rows of a common prefix."""

    blocks: tuple[Block, ...]
    restore: Tensor
    """[L] int64: index of each token of the packed row in the concatenated padded blocks."""
    ragged: Ragged | None = None
    """The sequences without padding."""
    spans: tuple[PictureSpan, ...] = ()
    """Pictures whose tokens attend to each other in both directions."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        *,
        rows: np.ndarray | None = None,
        padding: bool = True,
        shown: np.ndarray | None = None,
        device: torch.device | str = "cpu",
    ) -> PackedLayout:
        """Lay out sequences of `lengths` (all positive), in packed order.

        Args:
            rows: [sum(lengths)] int64: index in the packed row of each sequence's tokens; None: end to end.
            padding: False lets only sequences of equal length share a block, so that a sequence's result does
                not depend on the others in the row, to the last bit.
            shown: [sum(lengths)] int64: number of the picture of each token, -1 for text, where tokens of a picture
                attend to each other in both directions; None: all attention is causal.
        """
        rows = np.arange(sum(lengths)) if rows is None else rows
        ends = np.cumsum(lengths)
        # `restore` is the inverse of all gathers: the place of each packed row in the blocks laid end to end.
        restore = np.empty(rows.max() + 1, dtype=np.int64)
        blocks = []
        offset = 0
        for members in _similar(lengths, padding=padding):
            longest = lengths[members[0]]  # members are sorted by length
            size = np.array([lengths[m] for m in members])[:, None]
            place = np.arange(longest)[None, :]
            # Row i of the block reads the rows of sequence members[i]. Padding reads its first token, which exists, and
            # real queries never attend to it: it is to their right.
            source = rows[ends[members][:, None] - size + np.where(place < size, place, 0)]
            padded = offset + np.arange(source.size).reshape(source.shape)
            # A row that several sequences share is computed in each of them with the same result; the last one stays.
            restore[source[place < size]] = padded[place < size]
            offset += source.size
            blocks.append(Block(torch.from_numpy(source.ravel()), len(members), longest))
        ragged = Ragged.of(lengths, rows) if padding else None  # kernels may split a sequence by the longest in the row
        spans = () if shown is None else _spans(lengths, rows, shown)
        return to_device(cls(tuple(blocks), torch.from_numpy(restore), ragged, spans), torch.device(device))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [L, heads, D]
        # One call without padding where a kernel takes it; else a call for each block of similar lengths.
        output = None if self.ragged is None else attend_ragged(query, key, value, self.ragged, scoring)
        if output is None:
            outputs = [_attend_block(block, query, key, value, scoring) for block in self.blocks]
            output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
            output = output.index_select(0, self.restore)
        # The causal pass has computed these rows too, with too few keys: a second pass replaces them.
        if self.spans:
            replaced = torch.cat([span.attend(query, key, value, scoring) for span in self.spans])
            output = output.index_copy(0, torch.cat([span.queries for span in self.spans]), replaced.to(output.dtype))
        return output.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class CausalRows(SequenceLayout):
    """One sequence per row, right-padded: sufficient for causal layers, such as recurrent ones."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        return attend(query, key, value, scoring).transpose(1, 2)


def share_prefixes(given: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Return the row [sum(lengths)] int64 of each token when sequences reuse their neighbour's rows.

    A hidden state depends only on the inputs up to its own token, so a sequence reuses the rows of the prefix that
    it shares with the previous sequence: the prompt of a group is computed once, with the same result.

    Args:
        given: [sum(lengths), n]: each token, and all other inputs that determine its hidden state.
        lengths: of the sequences, laid end to end.
    """
    # Sequences of a group are neighbours, so that comparing each with the one before it finds the common prompt.
    rows = np.empty(len(given), dtype=np.int64)
    used = start = previous = 0  # rows so far; begin of this sequence and of the one before it, among all tokens
    for length in lengths:
        end = start + length
        common = _common_prefix(given[previous:start], given[start:end])
        rows[start : start + common] = rows[previous : previous + common]
        rows[start + common : end] = np.arange(used, used + length - common)
        used += length - common
        previous, start = start, end
    return rows


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    size = min(len(left), len(right))
    different = np.flatnonzero((left[:size] != right[:size]).any(axis=1))
    return int(different[0]) if len(different) else size


def _spans(lengths: Sequence[int], rows: np.ndarray, shown: np.ndarray) -> tuple[PictureSpan, ...]:
    """The runs of tokens of one picture in each sequence; those in rows that sequences share are found once."""
    ends = np.cumsum(lengths)
    spans: dict[int, PictureSpan] = {}
    for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True):
        # A run, of text (-1) or of one picture, is between two changes of the picture's number.
        changes = np.flatnonzero(np.diff(shown[start:end])) + start + 1
        for first, last in zip([start, *changes], [*changes, end], strict=True):
            if shown[first] >= 0 and int(rows[first]) not in spans:
                keys = torch.from_numpy(rows[start:last])
                spans[int(rows[first])] = PictureSpan(keys[first - start :], keys)
    return tuple(spans.values())


def _similar(lengths: Sequence[int], *, padding: bool) -> list[list[int]]:
    """Group indices by length, longest first, so that padding is a small part of each group, or none."""
    stretch, extra = (_MAX_PADDING, _MAX_PADDING_TERMS) if padding else (1, 0)
    # From the longest down: a sequence joins the current group unless that group's first one would pad it too much.
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[groups[-1][0]] <= stretch * lengths[index] + extra:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _attend_block(block: Block, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Causal attention of one block: packed rows [L, heads, D] in, [rows * longest, heads, D'] out."""
    q, k, v = (
        x.index_select(0, block.source).view(block.rows, block.longest, *x.shape[1:]).transpose(1, 2)
        for x in (query, key, value)
    )
    return attend(q, k, v, scoring).transpose(1, 2).flatten(0, 1)

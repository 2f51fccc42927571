"""Keys and values of running sequences: one slot per sequence, slots 0 .. n-1 in use.

    keys[layer]   [slots, kv_heads, capacity, head_dim]      values alike
    prefill       a packed row of prompts; each prompt's rows are copied to the slots of all its samples
    continuation  a packed row of new tokens, which attend to the slot's earlier ones too
    decode step   row i writes at (i, place[i]) and attends to (i, 0 .. place[i])

The last slot in use replaces a finished sequence, so a step computes only running ones. Slots and capacity grow by
powers of two within a limit: memory follows the requests, not the model's context length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from cosmos_rl_llm.policy.attention import Scoring, continued_attention
from cosmos_rl_llm.policy.packing import SequenceLayout

_VECTORS = 32
"""Positions that fill whole vectors of any CPU."""
_FEWEST_PRODUCTS = 400
"""Below this torch multiplies batches of matrices on the CPU in its own loop (`bmm_out_or_baddbmm_`)."""


@dataclass(frozen=True, slots=True)
class KeptTerms:
    """Keys and values of a sequence outside of the slots."""

    layers: list[tuple[Tensor, Tensor] | None]
    """[kv_heads, length, head_dim] each; None for a layer that caches none."""
    length: int

    @property
    def num_bytes(self) -> int:
        return sum(states.nbytes for pair in self.layers for states in pair or ())


class WaitingTerms:
    """Keys and values of histories between two turns, within a limit of memory. Used by the event loop alone."""

    def __init__(self, limit: int) -> None:
        """limit: bytes; 0 keeps nothing."""
        self.limit = limit
        self._kept: dict[object, KeptTerms] = {}
        """In the order of their last turns."""
        self._bytes = 0

    def put(self, history: object, kept: KeptTerms) -> None:
        """Keep those of a history, in place of others that have waited longest."""
        self._kept[history] = kept
        self._bytes += kept.num_bytes
        while self._bytes > self.limit:
            self.take(next(iter(self._kept)))

    def take(self, history: object) -> KeptTerms | None:
        """Return those of a history, if they are still there, and keep them no longer."""
        kept = self._kept.pop(history, None)
        if kept is not None:
            self._bytes -= kept.num_bytes
        return kept

    def free(self) -> None:
        self._kept.clear()
        self._bytes = 0


class SlotCache(Cache):
    """The key-value cache of the engine. Call `begin_prefill` or `begin_decode` before each forward pass."""

    def __init__(self, num_layers: int, *, limit: int) -> None:
        """`limit`: maximum slots * capacity to allocate."""
        super().__init__(layers=[])
        self._limit = limit
        self.slots = 0
        self.capacity = 0
        self._stores: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self._source: Tensor | None = None
        self._continues = False
        self._slot = self._place = torch.empty(0, dtype=torch.int64)
        self._span = 0
        self._targets: dict[int, Tensor] = {}

    def reserve(self, *, slots: int, capacity: int) -> None:
        """Reserve `slots` sequences of `capacity` tokens (whole spans); the contents of the first `slots` are kept."""
        if slots <= self.slots and capacity <= self.capacity:
            return
        # Powers of two make growth rare. Where both would exceed the limit, exactly what is asked for is reserved.
        generous = max(self.slots, _power_of_two(slots)), max(self.capacity, _power_of_two(capacity))
        self.slots, self.capacity = generous if math.prod(generous) <= self._limit else (slots, capacity)
        assert self.slots * self.capacity <= self._limit, "admission checks the limit"
        for layer, pair in enumerate(self._stores):  # one at a time: only that layer is held twice
            self._stores[layer] = pair and (self._grown(pair[0]), self._grown(pair[1]))

    def free(self) -> None:
        """Free the memory of all slots."""
        self.slots = self.capacity = 0
        self._stores = [None] * len(self._stores)
        self._targets.clear()

    def begin_prefill(self, source: Tensor, slot: Tensor, place: Tensor) -> None:
        """Copy packed rows `source` [m] of the next pass to (`slot` [m], `place` [m])."""
        self._source, self._slot, self._place, self._continues = source, slot, place, False
        self._targets.clear()

    def begin_continuation(self, source: Tensor, slot: Tensor, place: Tensor) -> None:
        """As `begin_prefill`, for rows that attend to their slots, which have the keys and values of earlier tokens."""
        self.begin_prefill(source, slot, place)
        self._continues = True

    def begin_decode(self, place: Tensor, *, span: int) -> None:
        """Row i of the next pass is written to slot i at position `place` [n]; `span` positions are read."""
        self._continues = False
        self._source, self._slot, self._place = None, torch.arange(len(place), device=place.device), place
        self._span = span
        self._targets.clear()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, kv_heads, Q, head_dim]; return those for the layer's attention."""
        stores = self._stores[layer_idx]
        if stores is None:
            stores = (self._empty(key_states), self._empty(value_states))
            self._stores[layer_idx] = stores
        for store, states in zip(stores, (key_states, value_states)):
            self._write(store, states)
        if self._continues:
            return stores
        if self._source is not None:  # a prefill attends to its own packed row, not to the slots
            return key_states, value_states
        rows = key_states.shape[0]
        return stores[0][:rows, :, : self._span], stores[1][:rows, :, : self._span]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are always given."""
        return 0

    def move(self, *, source: int, target: int) -> None:
        """Copy one slot over another."""
        for pair in self._stores:
            for store in pair or ():
                store[target] = store[source]

    def take(self, slot: int, *, length: int) -> KeptTerms:
        """Return a copy of the first `length` keys and values of a slot."""
        layers = [
            pair and (pair[0][slot, :, :length].clone(), pair[1][slot, :, :length].clone()) for pair in self._stores
        ]
        return KeptTerms(layers, length)

    def put(self, slot: int, kept: KeptTerms) -> None:
        """Copy keys and values to the beginning of a slot."""
        for layer, pair in enumerate(kept.layers):
            if pair is None:
                continue
            stores = self._stores[layer] or (self._empty(pair[0][None]), self._empty(pair[1][None]))
            self._stores[layer] = stores  # new ones, if the memory was freed since
            for store, states in zip(stores, pair):
                store[slot, :, : kept.length] = states

    def _write(self, store: Tensor, states: Tensor) -> None:
        # A prompt's rows go to the slots of all its samples: `_source` repeats them once for each.
        kv_heads, head_dim = store.shape[1], store.shape[3]
        if self._source is None:
            new = states.reshape(-1, head_dim)
        else:
            new = states[0].transpose(0, 1).index_select(0, self._source).reshape(-1, head_dim)
        store.view(-1, head_dim).index_copy_(0, self._target(kv_heads), new)

    def _target(self, kv_heads: int) -> Tensor:
        """[m * kv_heads]: rows of a store viewed as [slots * kv_heads * capacity, head_dim]."""
        if kv_heads not in self._targets:
            heads = torch.arange(kv_heads, device=self._slot.device)
            rows = (self._slot[:, None] * kv_heads + heads) * self.capacity + self._place[:, None]
            self._targets[kv_heads] = rows.flatten()
        return self._targets[kv_heads]

    def _empty(self, states: Tensor) -> Tensor:
        # Zeros, not garbage: masked positions are multiplied by a weight of 0, and 0 * nan is nan.
        return states.new_zeros(self.slots, states.shape[1], self.capacity, states.shape[3])

    def _grown(self, old: Tensor) -> Tensor:
        new = self._empty(old)
        new[: old.shape[0], :, : old.shape[2]] = old[: self.slots, :, : self.capacity]
        return new


@dataclass(frozen=True, slots=True)
class ContinuedLayout(SequenceLayout):
    """New tokens of several sequences in one row; each attends to the earlier ones of its slot up to itself."""

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    """Positions of each sequence's first new token in its slot."""
    lengths: tuple[int, ...]
    """New tokens of each."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        # Few sequences are continued in one pass, each by more than a token: a call for each of them.
        outputs, begin = [], 0
        for slot, start, length in zip(self.slots, self.starts, self.lengths, strict=True):
            keys, values = (store[slot : slot + 1, :, : start + length] for store in (key, value))
            outputs.append(continued_attention(query[:, :, begin : begin + length], keys, values, scoring))
            begin += length
        return torch.cat(outputs, dim=2).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class DecodeLayout(SequenceLayout):
    """One new token per row; it attends to its own slot of a `SlotCache` up to and including itself."""

    place: Tensor
    """[n] int64: position of the new token; it attends to 0 .. place."""
    span: int
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        # One query a row: the heads of a group are the rows of one small matrix product with their shared keys.
        rows, heads, _, head_dim = query.shape
        groups = rows, key.shape[1], heads // key.shape[1]  # no copies of shared heads
        scores = torch.bmm((query * scoring.scale).reshape(-1, groups[2], head_dim), key.flatten(0, 1).transpose(1, 2))
        weights = scoring.weights(scores.view(*groups, self.span), self._mask(scoring.window, query.dtype))
        return torch.bmm(weights.flatten(0, 1), value.flatten(0, 1)).view(rows, 1, heads, -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[n, 1, 1, span]: 0 where visible, -inf elsewhere; computed once per step."""
        if window not in self._masks:
            places = torch.arange(self.span, device=self.place.device)
            hidden = places > self.place[:, None]
            if window is not None:
                hidden |= places <= self.place[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[window]


def bytes_per_term(model: PreTrainedModel) -> int:
    """Cache bytes of one token over all layers: keys and values, or the latent that MLA expands to both."""
    config = model.config.get_text_config()
    latent = getattr(config, "kv_lora_rank", None)
    if latent is not None:
        return config.num_hidden_layers * (latent + config.qk_rope_head_dim) * model.dtype.itemsize
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * _head_dim(config) * model.dtype.itemsize


def span_unit(model: PreTrainedModel) -> int:
    """Decode steps read a multiple of this many positions.

    This gives recurring shapes and one kernel for all of them, so that a sequence's result does not depend on the
    length of the longest sequence in the batch.
    """
    config = model.config.get_text_config()
    narrowest = getattr(config, "v_head_dim", None) or _head_dim(config)
    return _VECTORS * math.ceil(_FEWEST_PRODUCTS / (_VECTORS * narrowest))


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _power_of_two(n: int) -> int:
    """The smallest that is at least n."""
    return 1 << (n - 1).bit_length()

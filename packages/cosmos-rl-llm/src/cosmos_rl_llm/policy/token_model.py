"""A causal language model as a module from a packed row to the log-probabilities of its terms.

    Microbatch.inputs -> Row       the input: shared prefixes once, split over cp        (on the CPU, then one copy)
    tokens [1, l] -> decoder -> hidden [1, l, H] -> hidden[term_rows] [t] -> log-probabilities [t]     (one forward)
                                                                          -> over cp -> [T]

Layers with a state across tokens (recurrent, linear attention, convolutions) would carry it from one
sequence of a packed row into the next. Families with such layers run *unpacked*:

    tokens [1, L] -> blocks [sequences, longest], right-padded -> decoder, one pass per block -> hidden [1, L, H]

Everything is in one `forward`, so that a fully sharded root gathers the output head when it is used. A stage of a
pipeline is the same module: the first stage takes tokens, all but the last return hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from cosmos_rl_core.parallel.axes.tensor import TensorAxis, own_part, own_slice
from cosmos_rl_core.parallel.device import memory_of, to_device
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.plan.estimate import logits_budget
from cosmos_rl_core.types import PolicyOutputs
from cosmos_rl_llm.media.item import VisionFamily
from cosmos_rl_llm.media.packed import add_blanks, digests, items_of, two_way_items
from cosmos_rl_llm.model.causal_lm import decoder_layers, language_model, score_layer
from cosmos_rl_llm.model.output_head import OutputHead, Vocabulary
from cosmos_rl_llm.model.rope import SequenceRope
from cosmos_rl_llm.model.tower import media_to_device
from cosmos_rl_llm.policy.context import TokenShard, cut, cut_at_entrance
from cosmos_rl_llm.policy.logprobs import term_logprobs
from cosmos_rl_llm.policy.packing import (
    Block,
    CausalRows,
    PackedLayout,
    SequenceLayout,
    install_attention,
    share_prefixes,
)
from cosmos_rl_llm.policy.routing import check_replay, install_replay
from cosmos_rl_llm.policy.truncation import SUPERVISED, Truncation

Compare = Callable[[Tensor, OutputHead, TokenShard], Mapping[str, Tensor]]
"""Hidden states [t, H] and head of the policy, with gradient, and the row -> outputs [t] by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermOptions:
    """The distribution that a policy computes, and the memory that this may take."""

    temperature: float = 1.0
    """Log-probabilities are of softmax(logits / temperature); 0 (greedy) counts as 1."""
    truncation: Truncation | None = None
    """Top-k, top-p and repetition penalty of the rollouts: log-probabilities are of what is sampled."""
    compute_dtype: torch.dtype | None = None
    """Dtype of matrix products while the weights keep theirs: by autocast in one process, by `fully_shard` with a mesh.
    None: that of the weights."""
    logits_bytes: int | None = None
    """Maximum memory for logits at a time; more terms are split into chunks. None: by the memory of the device."""
    vision: VisionFamily | None = None
    """Family of a vision-language model; None: rows have text alone."""


PLAIN = TermOptions()
"""The distribution of the model itself."""


class TermModel(nn.Module):
    """Contains the parts of a `PreTrainedModel`, under their own names, and runs them from tokens to terms."""

    def __init__(
        self,
        model: PreTrainedModel,
        options: TermOptions = PLAIN,
        *,
        mesh: ReplicaMesh | None = None,
        sequence_parallel: bool = False,
        unpacked: bool = False,
        first: bool = True,
        last: bool = True,
    ) -> None:
        """Take over `model`, or a stage of it: its attention is replaced, and it stays in eval mode.

        Args:
            mesh: the ranks for this module; `parallelize` does the sharding.
            sequence_parallel: with tp, activations are sharded along the sequence between matrix products.
            unpacked: one sequence per row of the decoder's input, and no shared prefixes.
            first: whether inputs are tokens, not hidden states.
            last: whether outputs are log-probabilities, not hidden states.
        """
        super().__init__()
        decoder_layers(model)
        install_attention(model)
        install_replay(model)
        self._rope = SequenceRope(model)
        for name, child in model.named_children():
            self.add_module(name, child)
        self._causal_lm = (model,)  # in a tuple: only its parts are registered, so that names have no prefix
        self.mesh, self.compute_dtype = mesh, options.compute_dtype
        tp, self._cp = (None, None) if mesh is None else (mesh.axis("tp"), mesh.axis("cp"))
        self.axis = None if tp is None else TensorAxis(tp, sequence_parallel)
        self._num_parts = 1 if self._cp is None else self._cp.size()
        """Ranks that share a row, each with as many of its tokens."""
        if self.axis is not None and self.axis.sequence:
            self._num_parts *= self.axis.size
        self.unpacked, self.vision = unpacked, options.vision
        self.first, self.last = first, last
        self.logits_bytes = options.logits_bytes or logits_budget(memory_of(self.device))
        self.banned = () if self.vision is None else tuple(self.vision.token_ids.values())
        """Placeholders of pictures, which are never sampled."""
        self.autocast = options.compute_dtype if mesh is None else None
        """Dtype of matrix products where the weights have another one; None: that of the weights."""
        trained = any(parameter.requires_grad for parameter in language_model(model).parameters())
        self._needs_tower = self.vision is not None and not trained  # a row of text would have no gradient
        if self.vision is not None and mesh is not None:
            cut_at_entrance(language_model(model), self.axis)
        self.temperature, self.truncation = options.temperature or 1.0, options.truncation
        self.returns_hidden = False
        """Return hidden states of terms [t, H], not log-probabilities."""
        self.compare: Compare | None = None
        """Further outputs for the terms of rows with outputs of a teacher."""
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode: a term's log-probability must be that of the generating model.

        Dropout of every kind, also `functional.dropout(training=self.training)`, and the noise of routers are off.
        Recomputation in the backward pass (`parallel.remat`) does not depend on training mode.
        """
        return super().train(False)

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model with the same parameters."""
        return self._causal_lm[0]

    @property
    def config(self) -> PreTrainedConfig:
        return self.causal_lm.config

    @property
    def device(self) -> torch.device:
        """Device of the inputs."""
        return self.causal_lm.device if self.mesh is None else self.mesh.device

    @property
    def blocks(self) -> list[nn.Module]:
        """The local decoder layers, in order."""
        layers = decoder_layers(self.causal_lm)
        return [layer for layer in layers if any(True for _ in layer.parameters())]

    def row(self, inputs: Mapping[str, Tensor], *, teacher: Mapping[str, Tensor] | None = None) -> TokenShard:
        """Lay out `Microbatch.inputs` (see `CausalLMPolicy`): prefixes once, and this rank's part of them over cp.

        teacher: `TermBatch.teacher`.

        The inputs are on the CPU, where the row is laid out; one copy takes it to `device`. Ranks along tp, cp and pp
        pass the same inputs; nothing is sent, except the number of blocks if the model runs unpacked.
        """
        if "routes" in inputs:
            check_replay(self.causal_lm)
        row = self._unpacked_row(inputs) if self.unpacked else self._packed_row(inputs)
        supervised = SUPERVISED in inputs
        truncation = None if supervised else self.truncation
        repeats = None if truncation is None else truncation.repeats(inputs, _lengths(inputs))
        row = replace(row, teacher=teacher or {}, sampled=not supervised, repeats=repeats)
        row = row if self._cp is None else cut(row, self._cp)
        media = None if row.media is None else media_to_device(row.media, self.device)
        return replace(to_device(replace(row, media=None), self.device), media=media)

    def _packed_row(self, inputs: Mapping[str, Tensor]) -> TokenShard:
        if self.vision is not None and (self.mesh is not None or self._needs_tower):
            inputs = add_blanks(inputs, self.vision, always=self._needs_tower)
        lengths = _lengths(inputs)
        keys = [inputs["tokens"][:, None], *([inputs["routes"].flatten(1)] if "routes" in inputs else [])]
        keys += [digests(inputs)[:, None]] if "item_index" in inputs else []
        rotary = self._rope.lengths(np.repeat(lengths, lengths))
        keys += [] if rotary is None else [rotary[:, None]]
        rows = share_prefixes(torch.cat(keys, dim=1).numpy(), lengths)
        kept = np.unique(rows, return_index=True)[1]
        term_rows = torch.from_numpy(rows)[inputs["logit_index"]]
        if missing := -len(kept) % self._num_parts:
            # An additional sequence as padding: its tokens are the first of text, its outputs are not used.
            lengths, rows = [*lengths, missing], np.concatenate([rows, np.arange(missing) + len(kept)])
            text = int((inputs["item_index"] < 0).int().argmax()) if "item_index" in inputs else 0
            kept = np.append(kept, [text] * missing)
        taken, vision = torch.from_numpy(kept), self.vision if self.first else None
        return TokenShard(
            tokens=inputs["tokens"][None, taken],
            positions=inputs["positions"][..., None, taken],
            layout=PackedLayout.of(lengths, rows=rows, shown=two_way_items(inputs, self.vision, length=len(rows))),
            term_rows=term_rows,
            labels=inputs["labels"],
            routes=inputs["routes"][taken] if "routes" in inputs else None,
            lengths=None if rotary is None else rotary[None, taken],
            media=vision.inputs(items_of(inputs, taken)) if vision is not None and "item_index" in inputs else None,
            own_rows=slice(None) if vision is not None and self.mesh is not None else None,
        )

    def _unpacked_row(self, inputs: Mapping[str, Tensor]) -> TokenShard:
        lengths = _lengths(inputs)
        layout, rotary = PackedLayout.of(lengths), self._rope.lengths(np.repeat(lengths, lengths))
        # All ranks that gather parameters together run the same number of passes; additional ones run one token.
        passes = len(layout.blocks) if self.mesh is None else self.mesh.most_over_shards(len(layout.blocks))
        spare = Block(torch.zeros(1, dtype=torch.int64), rows=1, longest=1)
        return TokenShard(
            tokens=inputs["tokens"][None],
            positions=inputs["positions"][None],
            layout=replace(layout, blocks=(*layout.blocks, *[spare] * (passes - len(layout.blocks)))),
            term_rows=inputs["logit_index"],
            labels=inputs["labels"],
            routes=inputs.get("routes"),
            lengths=None if rotary is None else rotary[None],
        )

    def forward(
        self, hidden: Tensor | None, row: TokenShard, with_entropy: bool = False
    ) -> Tensor | tuple[Tensor, Tensor | None, Mapping[str, Tensor]]:
        """Run the stage.

        Args:
            hidden: [1, l, H] of the previous stage, None on the first. l is the local length: sharded over cp, and over
                tp with sequence_parallel.

        Returns:
            Hidden states [1, l, H]; of the last stage log-probabilities [T] float32, entropies [T] if asked for, and
            the results of `compare`, or with `returns_hidden` the terms' hidden states [t, H].
        """
        hidden = self._decode(hidden, row)
        if not self.last:
            return hidden
        if self.axis is not None:
            hidden = self.axis.enter(hidden)
        terms = hidden[0, row.term_rows].to(self.autocast or hidden.dtype)
        if self.returns_hidden:
            return terms
        if (layer := score_layer(self.causal_lm)) is not None:
            values = _scores(terms, layer, self.axis)
            return values if row.own_terms is None else row.own_terms.gather(values), None, {}
        head, vocabulary = self._own_head()
        logprobs, entropy = term_logprobs(
            terms,
            head,
            row.labels,
            temperature=self.temperature,
            truncation=self.truncation if row.sampled else None,
            repeats=row.repeats,
            with_entropy=with_entropy,
            logits_bytes=self.logits_bytes,
            vocabulary=vocabulary,
        )
        compared = self.compare(terms, head, row) if self.compare and row.teacher else {}
        if row.own_terms is None:
            return logprobs, entropy, compared
        gather = row.own_terms.gather
        compared = {name: gather(values) for name, values in compared.items()}
        return gather(logprobs), None if entropy is None else gather(entropy), compared

    def _decode(self, hidden: Tensor | None, row: TokenShard) -> Tensor:
        """Tokens, or hidden states [1, l, H] of the previous stage -> hidden states [1, l, H]."""
        given = row.tokens if self.first else hidden
        assert given is not None
        if not self.unpacked:
            seen = row.seen if self.first else None  # a rank's stages share a row
            with self._rope.of(row.lengths):
                return self._pass(given, row.positions, row.layout, row.routes, seen)
        assert isinstance(row.layout, PackedLayout)
        outputs = []
        for block in row.layout.blocks:
            routes = None if row.routes is None else row.routes[block.source]
            with self._rope.of(None if row.lengths is None else block.gather(row.lengths)):
                output = self._pass(block.gather(given), block.gather(row.positions), CausalRows(), routes)
            outputs.append(output.flatten(0, 1))
        return torch.cat(outputs).unsqueeze(0).index_select(1, row.layout.restore)

    def _pass(
        self,
        given: Tensor,
        positions: Tensor,
        layout: SequenceLayout,
        routes: Tensor | None,
        seen: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """One pass of the decoder: tokens [B, l], or hidden states [B, l, H] -> hidden states [B, l, H]."""
        replayed = {} if routes is None else {"routes": routes}
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            output = self.causal_lm.base_model(
                input_ids=given if self.first else None,
                inputs_embeds=None if self.first else given,
                position_ids=positions,
                use_cache=False,
                layout=layout,
                **replayed,
                **(seen or {}),
            )
        return output.last_hidden_state

    def head(self) -> OutputHead:
        """Return the output head with its parameters as they are sharded now."""
        return OutputHead.of(self.causal_lm).without(self.banned)

    def _own_head(self) -> tuple[OutputHead, Vocabulary | None]:
        """The output head: this rank's part of it over tp, and the vocabulary of that part."""
        head = OutputHead.of(self.causal_lm)
        if self.axis is None:
            return head.without(self.banned).cast(self.autocast), None
        assert isinstance(head.weight, DTensor) and isinstance(head.bias, DTensor | None)
        bias = None if head.bias is None else own_slice(self.axis)(head.bias)
        own = replace(head, weight=own_part(head.weight), bias=bias)
        vocabulary = Vocabulary.part(head.weight.shape[0], self.axis)
        return own.without([token - vocabulary.start for token in self.banned]), vocabulary


def _scores(terms: Tensor, layer: nn.Linear, axis: TensorAxis | None) -> Tensor:
    """Hidden states [t, H] -> scores [t] of a reward model; over tp each rank multiplies its part of H."""
    if axis is None:
        return layer(terms).squeeze(-1).to(torch.promote_types(terms.dtype, torch.float32))
    assert isinstance(layer.weight, DTensor)
    start, end = axis.bounds(terms.shape[-1])
    part = F.linear(terms[:, start:end], own_part(layer.weight)).to(torch.float32)
    summed = DTensor.from_local(part, axis.mesh, [Partial()]).redistribute(placements=[Replicate()])
    assert isinstance(summed, DTensor)
    return summed.to_local().squeeze(-1)


def outputs_of(passed: Any) -> PolicyOutputs:
    """The results of a last stage's pass."""
    logprobs, entropy, compared = passed
    tensors = {name: values for name, values in compared.items() if name == "teacher"}
    metrics = {name: values for name, values in compared.items() if name != "teacher"}
    return PolicyOutputs(logprobs=logprobs, entropy=entropy, tensors=tensors, metrics=metrics)


def _lengths(inputs: Mapping[str, Tensor]) -> list[int]:
    """Lengths of the sequences in a packed row."""
    return torch.unique_consecutive(inputs["sequence_index"], return_counts=True)[1].tolist()

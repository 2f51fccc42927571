"""Repetition penalty, top-k and top-p: the distribution that an engine samples from, computed by the policy.

    z'_v          = z_v / penalty if z_v > 0, else z_v * penalty, for each token v of the sequence so far
    kept(context) = the top_k most likely tokens and, of their renormalised mass, the fewest that reach top_p

Engines that renormalise over the kept tokens sample from another distribution than softmax(logits). The policy gradient
is of that distribution, and the first ratio is 1, if the policy penalises and renormalises over the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_llm.model.output_head import Vocabulary

if TYPE_CHECKING:
    from cosmos_rl_core.types import Sampling

ALL = 2**62
"""Top-k that keeps every token."""
SUPERVISED = "supervised"
"""Input of a microbatch whose terms no engine sampled: its log-probabilities are among all tokens."""
CANDIDATES = 256
"""Initial number of most likely tokens for `top_p` of the mass."""


def nucleus(
    logits: Tensor, top_k: Tensor, top_p: Tensor, *, count: int, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, ids and a mask of the kept (bool) of the most likely tokens, each [n, c] in descending order.

    logits: [n, own], the largest of all tokens about 0. top_k: [n, 1] int64, `ALL` if it is off. top_p: [n, 1].
    count: initial number of candidates, at least every top-k below V. vocabulary: the tokens of `logits`.
    """
    size = vocabulary.size
    everything = vocabulary.sum(logits.exp().sum(-1, keepdim=True))
    count = min(count, size)
    while True:
        values, tokens = vocabulary.topk(logits, count)
        mass = values.exp()
        in_k = torch.arange(count, device=logits.device) < top_k
        total = torch.where(top_k < ALL, (mass * in_k).sum(-1, keepdim=True), everything)
        before = (mass.cumsum(-1) - mass) / total
        enough = (top_k <= count) | (before[:, -1:] >= top_p)
        if count == size or bool(enough.all()):
            return values, tokens, in_k & (before < top_p)
        count = min(8 * count, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Top-k, top-p and repetition penalty of a run's rollouts."""

    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    """Applied by `Repeats`."""

    @classmethod
    def of(cls, sampling: Sampling | None) -> Self | None:
        """Return that of sampling parameters; None if log-probabilities are those of the model."""
        if sampling is None:
            return None
        top_k, top_p = (sampling.top_k, sampling.top_p) if sampling.renormalise else (0, 1.0)
        truncation = cls(top_k=top_k, top_p=top_p, repetition_penalty=sampling.repetition_penalty)
        return None if truncation == cls() else truncation

    def repeats(self, inputs: Mapping[str, Tensor], lengths: Sequence[int]) -> Repeats | None:
        """Return what penalises the terms of `Microbatch.inputs`; None without a penalty."""
        penalty = self.repetition_penalty
        return None if penalty == 1 else Repeats.of(inputs, lengths, penalty=penalty)

    def apply(self, logits: Tensor, labels: Tensor, *, vocabulary: Vocabulary) -> Tensor:
        """Set the logits [n, own] of tokens that are not kept to -inf, in place, except those of `labels` [n].

        A label that other weights sampled may be outside of what these keep.
        """
        if not len(logits) or (self.top_p >= 1 and not self.top_k):
            return logits
        labels = labels[:, None]
        chosen = vocabulary.gather(logits, labels)
        largest = vocabulary.largest(logits.amax(-1, keepdim=True))
        top_k = logits.new_full((1, 1), self.top_k if 0 < self.top_k < vocabulary.size else ALL, dtype=torch.int64)
        count = max(CANDIDATES, 0 if top_k.item() == ALL else self.top_k)
        values, tokens, kept = nucleus(
            logits - largest, top_k, logits.new_full((1, 1), self.top_p), count=count, vocabulary=vocabulary
        )
        values = values.add_(largest).masked_fill_(~kept, -torch.inf)
        logits.fill_(-torch.inf)
        vocabulary.put(logits, tokens, values)
        return vocabulary.put(logits, labels, chosen)


@dataclass(frozen=True, slots=True)
class ScaledLogits:
    """Logits that are multiplied by factors."""

    rows: slice
    places: Tensor
    """[m] int64: their columns."""
    factors: Tensor
    """[rows, m]."""


def multiply(values: Tensor, scaled: Sequence[ScaledLogits]) -> None:
    """Multiply values [n, own], in place."""
    for each in scaled:
        rows = values[each.rows]
        rows.index_copy_(1, each.places, rows[:, each.places] * each.factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """The tokens that a packed row of L tokens has before each of its t terms, in the term's sequence."""

    penalty: float
    tokens: Tensor
    """[u] int64: the distinct tokens of each sequence, one sequence after the other."""
    first: Tensor
    """[u] int64: index of each among the L tokens."""
    bounds: np.ndarray
    """[sequences + 1]: the part of `tokens` of each sequence."""
    sequence: np.ndarray
    """[t]: the sequence of each term, ascending."""
    last: Tensor
    """[t] int64: index of the last token before each term."""

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor], lengths: Sequence[int], *, penalty: float) -> Self:
        """Return those of `Microbatch.inputs` with sequences of `lengths`."""
        tokens, ends = inputs["tokens"].numpy(), np.cumsum(lengths)
        distinct = [np.unique(tokens[end - n : end], return_index=True) for end, n in zip(ends, lengths, strict=True)]
        places = [place + end - n for (_, place), end, n in zip(distinct, ends, lengths, strict=True)]
        return cls(
            penalty=penalty,
            tokens=torch.from_numpy(np.concatenate([each for each, _ in distinct])),
            first=torch.from_numpy(np.concatenate(places)),
            bounds=np.cumsum([0, *(len(each) for each in places)]),
            sequence=np.searchsorted(ends, inputs["logit_index"].numpy(), side="right"),
            last=inputs["logit_index"],
        )

    def of_terms(self, terms: Tensor) -> Self:
        """Return those of some of the terms, by their indices in ascending order."""
        return replace(self, sequence=self.sequence[terms.numpy()], last=self.last[terms])

    def apply(self, logits: Tensor, terms: slice, *, vocabulary: Vocabulary) -> Sequence[ScaledLogits]:
        """Penalise the logits [n, own] of n terms in place; return what their gradients are multiplied by."""
        scaled = []
        sequence, last = self.sequence[terms], self.last[terms, None]
        for number in np.unique(sequence):
            rows = slice(*np.searchsorted(sequence, [number, number + 1]))
            part = slice(*self.bounds[number : number + 2])
            place, mine = vocabulary.own(self.tokens[part])
            place, first = place[mine], self.first[part][mine]
            values = logits[rows][:, place]
            factors = torch.where(values > 0, 1 / self.penalty, self.penalty).masked_fill_(first > last[rows], 1.0)
            scaled.append(ScaledLogits(rows, place, factors))
        multiply(logits, scaled)
        return scaled

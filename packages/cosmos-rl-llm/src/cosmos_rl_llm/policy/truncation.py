"""Top-k and top-p: the tokens that an engine samples from, and the policy's log-probabilities among them.

    kept(context) = the top_k most likely tokens and, of their renormalised mass, the fewest that reach top_p

Engines that renormalise over the kept tokens sample from another distribution than softmax(logits). The policy gradient
is of that distribution, and the first ratio is 1, if the policy renormalises over the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cosmos_rl_core.types import Sampling
    from cosmos_rl_llm.policy.logprobs import Vocabulary

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
    """Top-k and top-p of a run's rollouts."""

    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0

    @classmethod
    def of(cls, sampling: Sampling | None) -> Self | None:
        """Return that of sampling parameters; None if log-probabilities are among all tokens."""
        if sampling is None or not sampling.renormalise or (sampling.top_p >= 1 and not sampling.top_k):
            return None
        return cls(top_k=sampling.top_k, top_p=sampling.top_p)

    def apply(self, logits: Tensor, labels: Tensor, *, vocabulary: Vocabulary) -> Tensor:
        """Set the logits [n, own] of tokens that are not kept to -inf, in place, except those of `labels` [n].

        A label that other weights sampled may be outside of what these keep.
        """
        if not len(logits):
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

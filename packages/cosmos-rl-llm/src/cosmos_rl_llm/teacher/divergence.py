"""Divergences of terms between policy and teacher, from hidden states; vocabulary-sized tensors exist in chunks.

    hidden, head            -> p [n, V]   with gradient
    teacher's hidden, head  -> q [n, V]            `Whole`: over the vocabulary
    teacher's top k         -> q [n, k + 1]        `Top`: p over the same tokens, and all others as one

For a divergence D over probabilities P of the classes, tokens or the k + 1 above, with w = P dD/dP:

    d D / d z_v = p_v / P_c (w_c - P_c sum w),   c the class of token v

    reverse   w = P (log P - log Q)          forward   w = -Q
    JSD       w = (1 - beta) P (log P - log M)

Constants that dD/dP leaves out cancel. With the vocabulary sharded over tp each rank has its own tokens of both models;
sums over tokens, and largest logits, are reduced over tp in both passes.

If all terms fit into one chunk, that gradient is kept; otherwise the backward
pass computes both distributions again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cosmos_rl_core.algorithms.distill import divergence, kl_divergence, log_mixture
from cosmos_rl_llm.model.output_head import OutputHead, Vocabulary, scaled_logits
from cosmos_rl_llm.policy.logprobs import HeadGradients, parts

_BUFFERS = 6
"""Vocabulary-sized tensors that exist at a time: both distributions, and temporaries."""


@dataclass(frozen=True, slots=True)
class Whole:
    """Each token is a class: the teacher's distribution is computed chunk by chunk.

    `Top` has the same methods, for the terms of a chunk `part` and the V tokens of this rank that both models have.
    """

    hidden: Tensor
    """[T, teacher's hidden]."""
    head: OutputHead
    """The teacher's, over the V tokens."""
    temperature: float
    vocabulary: Vocabulary

    def pair(self, logprobs: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """The policy's log-probabilities [n, V] -> those of policy and teacher over the classes [n, classes]."""
        logits = scaled_logits(self.head, self.hidden[part], self.temperature)
        return logprobs, self.vocabulary.log_softmax(logits)

    def spread(self, values: Tensor, logprobs: Tensor, own: Tensor, part: slice) -> Tensor:
        """Values of classes [n, classes] -> of tokens [n, V], in proportion to the policy's probabilities.

        logprobs: the policy's, of tokens [n, V]. own: of classes.
        """
        return values

    def most_likely(self, teacher_logprobs: Tensor, part: slice) -> Tensor:
        """The teacher's most likely token of each term [n], from the second result of `pair`."""
        return self.vocabulary.argmax(teacher_logprobs)

    def total(self, values: Tensor) -> Tensor:
        """Sums over this rank's classes -> over all classes, in place."""
        return self.vocabulary.sum(values)


@dataclass(frozen=True, slots=True)
class Top:
    """The teacher's k most likely tokens are classes, and all others together are one."""

    ids: Tensor
    """[T, k] int64, the most likely first."""
    logprobs: Tensor
    """[T, k + 1]: the teacher's, the last of all other tokens together."""
    vocabulary: Vocabulary

    def pair(self, logprobs: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        return with_rest(logprobs, self.ids[part], self.vocabulary), self.logprobs[part].to(logprobs.dtype)

    def spread(self, values: Tensor, logprobs: Tensor, own: Tensor, part: slice) -> Tensor:
        rest = (logprobs - own[:, -1:]).exp_().mul_(values[:, -1:])
        return self.vocabulary.put(rest, self.ids[part], values[:, :-1])

    def most_likely(self, teacher_logprobs: Tensor, part: slice) -> Tensor:
        return self.ids[part, 0]

    def total(self, values: Tensor) -> Tensor:
        return values  # every rank has all classes


Classes = Whole | Top


def with_rest(logprobs: Tensor, ids: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Log-probabilities [n, V] -> those of `ids` [n, k], and of all other tokens together: [n, k + 1]."""
    smallest = torch.finfo(logprobs.dtype).tiny
    rest = vocabulary.sum(vocabulary.put(logprobs.exp(), ids, 0.0).sum(-1, keepdim=True)).clamp_min_(smallest).log_()
    return torch.cat([vocabulary.gather(logprobs, ids), rest], dim=1)


def term_divergence(
    hidden: Tensor, head: OutputHead, classes: Classes, *, beta: float, temperature: float, logits_bytes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each term [T], in float32 or the type of `hidden` if that is wider:

    - the divergence of `algorithms.distill.divergence`, with gradient for `hidden` [T, hidden] and `head`,
    - KL(policy || teacher) over the same classes,
    - 1.0 where both models have the same most likely token, else 0.0.

    Args:
        beta: 0 forward, 1 reverse KL, in between the generalised JSD.
        temperature: the policy's distribution is softmax(logits / temperature).
        logits_bytes: bounds the vocabulary-sized tensors in memory at a time; a chunk has at least one term.
    """
    size = classes.vocabulary.stop - classes.vocabulary.start
    if size < len(head.weight):  # rows that fill up the policy's matrix
        head = replace(head, weight=head.weight[:size], bias=None if head.bias is None else head.bias[:size])
    chunk = max(1, logits_bytes // (_BUFFERS * 4 * classes.vocabulary.widest))
    terms = _Terms(
        softcap=head.softcap, scale=head.scale, temperature=temperature, beta=beta, chunk=chunk, classes=classes
    )
    return _TermDivergence.apply(hidden, head.weight, head.bias, terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """All that decides the divergence of terms beside the tensors of the policy's head, which have gradients."""

    softcap: float | None
    scale: float
    temperature: float
    beta: float
    chunk: int
    """Terms whose distributions are in memory at a time."""
    classes: Classes


class _TermDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, terms: _Terms
    ) -> tuple[Tensor, Tensor, Tensor]:
        head, classes, beta = OutputHead(weight, bias, terms.softcap, terms.scale), terms.classes, terms.beta
        wide = torch.promote_types(hidden.dtype, torch.float32)
        values = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        reverse, agreement = torch.empty_like(values), torch.empty_like(values)
        keep = len(hidden) <= terms.chunk and terms.softcap is None and any(ctx.needs_input_grad)
        kept = None
        for part in parts(len(hidden), terms.chunk):
            logprobs = classes.vocabulary.log_softmax(scaled_logits(head, hidden[part], terms.temperature))
            own, teacher = classes.pair(logprobs, part)
            values[part] = classes.total(divergence(own, teacher, beta=beta))
            reverse[part] = values[part] if beta == 1 else classes.total(kl_divergence(own, teacher))
            likeliest = classes.vocabulary.argmax(logprobs)
            agreement[part] = (likeliest == classes.most_likely(teacher, part)).to(values.dtype)
            if keep:
                kept = _slope(logprobs, own, teacher, beta=beta, classes=classes, part=part)
        ctx.save_for_backward(hidden, weight, bias, kept)
        ctx.terms = terms
        ctx.mark_non_differentiable(reverse, agreement)
        return values, reverse, agreement

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, kept = ctx.saved_tensors
        terms: _Terms = ctx.terms
        head = OutputHead(weight, bias, terms.softcap, terms.scale)
        gradients = HeadGradients(hidden, weight, bias, needs=ctx.needs_input_grad[:3])
        for part in parts(len(hidden), terms.chunk):
            grad = _recomputed(head, hidden, terms, part=part) if kept is None else kept
            grad = grad * (grad_values[part, None] * (terms.scale / terms.temperature))
            gradients.add(grad.to(hidden.dtype), part)
        return *gradients.results(), None


def _recomputed(head: OutputHead, hidden: Tensor, terms: _Terms, *, part: slice) -> Tensor:
    """The gradient of D with respect to the logits [n, V] before soft cap, temperature and scale."""
    classes = terms.classes
    logits = scaled_logits(head, hidden[part], terms.temperature)
    capped = None if head.softcap is None else 1 - (logits * (terms.temperature / head.softcap)).square()
    logprobs = classes.vocabulary.log_softmax(logits)
    own, teacher = classes.pair(logprobs, part)
    slope = _slope(logprobs, own, teacher, beta=terms.beta, classes=classes, part=part)
    return slope if capped is None else slope.mul_(capped)


def _slope(logprobs: Tensor, own: Tensor, teacher: Tensor, *, beta: float, classes: Classes, part: slice) -> Tensor:
    """d D / d z [n, V] from the policy's log-probabilities [n, V], and those of both models over the classes."""
    probabilities = own.exp()
    if beta == 0:
        weights = -teacher.exp()
    elif beta == 1:
        weights = probabilities * (own - teacher)
    else:
        weights = (1 - beta) * probabilities * (own - log_mixture(own, teacher, beta=beta))
    slope = weights.sub_(probabilities.mul_(classes.total(weights.sum(-1, keepdim=True))))
    return classes.spread(slope, logprobs, own, part)

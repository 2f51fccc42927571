"""Log-probability and entropy of terms from hidden states; vocabulary-sized tensors are computed in place, in chunks.

For a term with logits z = head(h) / temperature, p = softmax(z), label y:

    logprob  = z_y - logsumexp(z)            d logprob / dz   = onehot(y) - p
    entropy  = - sum_v p_v log p_v           d entropy / dz_v = -p_v log p_v - p_v entropy

Only one [chunk, V] buffer exists at a time. If all terms fit into the budget, it is kept and becomes the gradient;
otherwise the backward pass recomputes each chunk's logits.

With the head sharded along the vocabulary over tp, each rank computes only the logits of its own tokens. Per term the
forward pass reduces scalars over tp: max_v z_v, sum_v exp(z_v - max), z_y and the entropy. The backward pass sends
nothing, and returns this rank's part of d hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cosmos_rl_llm.model.output_head import OutputHead, Vocabulary, scaled_logits
from cosmos_rl_llm.policy.truncation import Repeats, ScaledLogits, Truncation, multiply


def term_logprobs(
    hidden: Tensor,
    head: OutputHead,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    truncation: Truncation | None = None,
    repeats: Repeats | None = None,
    with_entropy: bool = False,
    logits_bytes: int,
    vocabulary: Vocabulary | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities [T] float32 of `labels` [T], and entropies [T] if asked for, from hidden [T, hidden].

    Args:
        truncation: log-probabilities and entropies are among the tokens that it keeps; None: among all.
        repeats: penalises tokens of the sequence so far; None: no penalty.
        logits_bytes: bounds the float32 logits in memory at a time; a chunk has at least one term.
        vocabulary: the part of it in this rank's `head`; None: all of it. With a part, all ranks along tp call this
            with the same `hidden` and `labels`; results are the same on all, gradients are each rank's part.
    """
    part = vocabulary or Vocabulary.all(head.weight.shape[0])
    terms = _Terms(
        softcap=head.softcap,
        scale=head.scale,
        temperature=temperature,
        with_entropy=with_entropy,
        chunk=max(1, logits_bytes // (4 * part.widest)),
        vocabulary=part,
        truncation=truncation,
        repeats=repeats,
    )
    logprobs, entropy = _TermLogprobs.apply(hidden, head.weight, head.bias, labels, terms)
    return logprobs, entropy if with_entropy else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """All that decides the logits of terms beside the tensors of the head, which may have gradients."""

    softcap: float | None
    scale: float
    temperature: float
    with_entropy: bool
    chunk: int
    """Terms whose logits are in memory at a time."""
    vocabulary: Vocabulary
    truncation: Truncation | None
    repeats: Repeats | None

    def restrict(self, logits: Tensor, labels: Tensor, part: slice) -> Sequence[ScaledLogits]:
        """Penalise and truncate logits [n, own], in place; return what the penalty multiplied."""
        scaled = () if self.repeats is None else self.repeats.apply(logits, part, vocabulary=self.vocabulary)
        if self.truncation is not None:
            self.truncation.apply(logits, labels[part], vocabulary=self.vocabulary)
        return scaled


class _TermLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, terms: _Terms
    ) -> tuple[Tensor, Tensor]:
        head, vocabulary = OutputHead(weight, bias, terms.softcap, terms.scale), terms.vocabulary
        logprobs = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros_like(logprobs)
        largest, total = torch.empty_like(logprobs), torch.empty_like(logprobs)
        probabilities = None
        for part in parts(len(labels), terms.chunk):
            logits = scaled_logits(head, hidden[part], terms.temperature)
            terms.restrict(logits, labels, part)
            # Read the label's logit before the buffer of logits becomes that of probabilities.
            place, mine = vocabulary.own(labels[part])
            chosen = vocabulary.sum(torch.where(mine, logits.gather(1, place[:, None]).squeeze(1), 0.0))
            largest[part] = vocabulary.largest(logits.amax(-1))
            probabilities = logits.sub_(largest[part, None]).exp_()
            total[part] = vocabulary.sum(probabilities.sum(-1))
            probabilities.div_(total[part, None])
            logprobs[part] = chosen - (largest[part] + total[part].log())
            if terms.with_entropy:
                entropy[part] = vocabulary.sum(torch.special.entr(probabilities).sum(-1))
        # A single chunk's probabilities are kept for the backward pass. The slopes of a soft cap and of a penalty need
        # the logits too, which are gone, so that these are computed again.
        fits = len(labels) <= terms.chunk and terms.softcap is None and terms.repeats is None
        kept = probabilities if fits and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden, weight, bias, labels, entropy, largest, total, kept)
        ctx.terms = terms
        ctx.set_materialize_grads(False)  # entropy is often only a metric: then the backward pass skips it
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, entropy, largest, total, kept = ctx.saved_tensors
        terms: _Terms = ctx.terms
        vocabulary, temperature, softcap = terms.vocabulary, terms.temperature, terms.softcap
        grad_logprobs = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs
        head = OutputHead(weight, bias, softcap, terms.scale)
        gradients = HeadGradients(hidden, weight, bias, needs=ctx.needs_input_grad[:3])
        for part in parts(len(labels), terms.chunk):
            slope, scaled, probabilities = None, (), kept
            if probabilities is None:
                logits = scaled_logits(head, hidden[part], temperature)
                # d softcap * tanh(x / softcap) / dx = 1 - tanh^2, and the capped logits are softcap * tanh.
                slope = None if softcap is None else 1 - (logits * (temperature / softcap)).square()
                scaled = terms.restrict(logits, labels, part)
                probabilities = logits.sub_(largest[part, None]).exp_().div_(total[part, None])
            d_entropy = None if grad_entropy is None else grad_entropy[part]
            own = vocabulary.own(labels[part])
            grad = _grad_logits(probabilities, own, grad_logprobs[part], d_entropy, entropy[part])
            # The chain rule backwards through penalty, soft cap, scale and temperature.
            multiply(grad, scaled)
            grad = (grad if slope is None else grad.mul_(slope)).mul_(terms.scale / temperature)
            gradients.add(grad.to(hidden.dtype), part)
        return *gradients.results(contiguous=vocabulary.axis is not None), None, None


@dataclass(slots=True)
class HeadGradients:
    """Gradients of hidden states, weight and bias from those of logits, summed over chunks of terms.

    Sums are in float32, or the type of `hidden` if that is wider.
    """

    hidden: Tensor
    """[T, hidden]."""
    weight: Tensor
    """[own, hidden]."""
    bias: Tensor | None
    needs: Sequence[bool] = field(kw_only=True)
    """Whether the gradient of each of the three is needed."""
    _hidden: Tensor | None = None
    _weight: Tensor | None = None
    _bias: Tensor | None = None

    def add(self, grad: Tensor, part: slice) -> None:
        """Add the gradient [n, own] of a chunk's logits before scale and soft cap."""
        needs_hidden, needs_weight, needs_bias = self.needs
        wide = torch.promote_types(self.hidden.dtype, torch.float32)
        if needs_hidden:
            self._hidden = torch.empty_like(self.hidden) if self._hidden is None else self._hidden
            self._hidden[part] = grad @ self.weight
        if needs_weight:
            of_part = grad.t() @ self.hidden[part]
            self._weight = of_part.to(wide) if self._weight is None else self._weight.add_(of_part)
        if needs_bias:
            of_part = grad.sum(0)
            self._bias = of_part.to(wide) if self._bias is None else self._bias.add_(of_part)

    def results(self, *, contiguous: bool = False) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the three gradients in the dtypes of their tensors; zeros without terms."""
        given, sums = (self.hidden, self.weight, self.bias), (self._hidden, self._weight, self._bias)
        hidden, weight, bias = (
            None if not needed or one is None else torch.zeros_like(one) if total is None else total.to(one.dtype)
            for needed, one, total in zip(self.needs, given, sums, strict=True)
        )
        return hidden, weight.contiguous() if weight is not None and contiguous else weight, bias


def parts(length: int, chunk: int) -> list[slice]:
    """Return the slices of `length` terms, `chunk` at a time."""
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def _grad_logits(
    probabilities: Tensor,
    own: tuple[Tensor, Tensor],
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    entropy: Tensor,
) -> Tensor:
    """Gradient with respect to z [chunk, V], written into `probabilities`; `own` is `Vocabulary.own` of the labels."""
    if d_entropy is None:
        grad = probabilities.mul_(-d_logprobs[:, None])
    else:
        spread = torch.special.entr(probabilities).mul_(d_entropy[:, None])
        grad = probabilities.mul_(-(d_logprobs + d_entropy * entropy)[:, None]).add_(spread)
    place, mine = own
    return grad.scatter_add_(1, place[:, None], (d_logprobs * mine)[:, None])

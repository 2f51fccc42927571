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
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cosmos_rl_core.parallel.axes.tensor import TensorAxis
from cosmos_rl_llm.model.causal_lm import OutputHead


def term_logprobs(
    hidden: Tensor,
    head: OutputHead,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    truncation: Truncates | None = None,
    repeats: Penalises | None = None,
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
    chunk = max(1, logits_bytes // (4 * part.widest))
    logprobs, entropy = _TermLogprobs.apply(
        hidden,
        head.weight,
        head.bias,
        labels,
        head.softcap,
        head.scale,
        temperature,
        with_entropy,
        chunk,
        part,
        truncation,
        repeats,
    )
    return logprobs, entropy if with_entropy else None


class Truncates(Protocol):
    """Top-k and top-p (`Truncation`)."""

    def apply(self, logits: Tensor, labels: Tensor, *, vocabulary: Vocabulary) -> Tensor:
        """Set the logits [n, own] of tokens that are not kept to -inf, in place, except those of `labels` [n]."""
        ...


class Penalises(Protocol):
    """A repetition penalty (`Repeats`)."""

    def apply(self, logits: Tensor, terms: slice, *, vocabulary: Vocabulary) -> Sequence[ScaledLogits]:
        """Penalise the logits [n, own] of n terms in place; return what their gradients are multiplied by."""
        ...


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


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens whose logits this rank computes."""

    start: int
    stop: int
    widest: int
    """The most tokens of a rank, the same on all: it sets the length of chunks, which ranks reduce together."""
    axis: TensorAxis | None
    """None: all tokens are here."""
    size: int
    """Tokens of all ranks."""

    @classmethod
    def all(cls, size: int) -> Vocabulary:
        """All of `size` tokens."""
        return cls(0, size, size, None, size)

    @classmethod
    def part(cls, size: int, axis: TensorAxis) -> Vocabulary:
        """This rank's part of `size` tokens."""
        return cls(*axis.bounds(size), widest=-(-size // axis.size), axis=axis, size=size)

    def largest(self, values: Tensor) -> Tensor:
        """Return the maximum over the ranks, in place."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks, in place."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def own(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """labels [...] -> index of each among this rank's tokens [...], and whether it is one of them [...]."""
        mine = (labels >= self.start) & (labels < self.stop)
        return torch.where(mine, labels - self.start, 0), mine

    def within(self, size: int) -> Vocabulary:
        """The same part of the first `size` tokens alone."""
        return replace(self, start=min(self.start, size), stop=min(self.stop, size), size=size)

    def rows(self, head: OutputHead) -> OutputHead:
        """These tokens' part of a whole output head."""
        bias = None if head.bias is None else head.bias[self.start : self.stop]
        return replace(head, weight=head.weight[self.start : self.stop], bias=bias)

    def logsumexp(self, values: Tensor) -> Tensor:
        """values [n, own] -> over all tokens [n, 1]."""
        largest = self.largest(values.amax(-1, keepdim=True))
        return self.sum((values - largest).exp_().sum(-1, keepdim=True)).log_().add_(largest)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """logits [n, own] -> log-probabilities among all tokens [n, own]."""
        return logits.log_softmax(-1) if self.axis is None else logits - self.logsumexp(logits)

    def argmax(self, values: Tensor) -> Tensor:
        """values [n, own] -> the token with the largest of all [n]."""
        largest, place = values.max(-1)
        tokens = torch.where(largest == self.largest(largest.clone()), place + self.start, torch.iinfo(place.dtype).max)
        return self._reduce(tokens, dist.ReduceOp.MIN)

    def topk(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """values [n, own] -> the largest of all [n, k], and their tokens [n, k]."""
        top = values.topk(min(k, values.shape[1]), dim=-1)
        if self.axis is None:
            return top.values, top.indices
        candidates = values.new_full((self.axis.size, k, len(values)), -torch.inf)
        tokens = torch.zeros_like(candidates, dtype=torch.int64)
        candidates[self.axis.rank, : top.values.shape[1]] = top.values.t()
        tokens[self.axis.rank, : top.values.shape[1]] = top.indices.t() + self.start
        candidates, tokens = self.largest(candidates).flatten(0, 1).t(), self.sum(tokens).flatten(0, 1).t()
        best = candidates.topk(k, dim=-1)
        return best.values, tokens.gather(1, best.indices)

    def gather(self, values: Tensor, ids: Tensor) -> Tensor:
        """Values [n, own] at tokens `ids` [n, k] -> [n, k]."""
        if self.axis is None:
            return values.gather(1, ids)
        place, mine = self.own(ids)
        return self.sum(values.gather(1, place) * mine)

    def put(self, values: Tensor, ids: Tensor, new: Tensor | float) -> Tensor:
        """Set values [n, own] at those tokens of `ids` [n, k] that are here to `new` [n, k] or a number, in place."""
        if self.axis is None:
            return values.scatter_(1, ids, new)
        place, mine = self.own(ids)
        row, column = mine.nonzero(as_tuple=True)
        values[row, place[row, column]] = new[row, column] if isinstance(new, Tensor) else new
        return values

    def _reduce(self, values: Tensor, operation: Any) -> Tensor:
        if self.axis is not None:
            dist.all_reduce(values, op=operation, group=self.axis.mesh.get_group())
        return values


class _TermLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        softcap: float | None,
        scale: float,
        temperature: float,
        with_entropy: bool,
        chunk: int,
        vocabulary: Vocabulary,
        truncation: Truncates | None,
        repeats: Penalises | None,
    ) -> tuple[Tensor, Tensor]:
        head = OutputHead(weight, bias, softcap, scale)
        logprobs = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros_like(logprobs)
        largest, total = torch.empty_like(logprobs), torch.empty_like(logprobs)
        probabilities = None
        for part in parts(len(labels), chunk):
            logits = scaled_logits(head, hidden[part], temperature)
            if repeats is not None:
                repeats.apply(logits, part, vocabulary=vocabulary)
            if truncation is not None:
                truncation.apply(logits, labels[part], vocabulary=vocabulary)
            place, mine = vocabulary.own(labels[part])
            chosen = vocabulary.sum(torch.where(mine, logits.gather(1, place[:, None]).squeeze(1), 0.0))
            largest[part] = vocabulary.largest(logits.amax(-1))
            probabilities = logits.sub_(largest[part, None]).exp_()
            total[part] = vocabulary.sum(probabilities.sum(-1))
            probabilities.div_(total[part, None])
            logprobs[part] = chosen - (largest[part] + total[part].log())
            if with_entropy:
                entropy[part] = vocabulary.sum(torch.special.entr(probabilities).sum(-1))
        keep = len(labels) <= chunk and softcap is None and repeats is None and any(ctx.needs_input_grad)
        kept = probabilities if keep else None
        ctx.save_for_backward(hidden, weight, bias, labels, entropy, largest, total, kept)
        ctx.options = (softcap, scale, temperature, chunk, vocabulary, truncation, repeats)
        ctx.set_materialize_grads(False)  # entropy is often only a metric: then the backward pass skips it
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, entropy, largest, total, kept = ctx.saved_tensors
        softcap, scale, temperature, chunk, vocabulary, truncation, repeats = ctx.options
        grad_logprobs = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs
        head = OutputHead(weight, bias, softcap, scale)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        scaled: Sequence[ScaledLogits] = ()
        for part in parts(len(labels), chunk):
            if kept is None:
                logits = scaled_logits(head, hidden[part], temperature)
                slope = None if softcap is None else 1 - (logits * (temperature / softcap)).square()
                if repeats is not None:
                    scaled = repeats.apply(logits, part, vocabulary=vocabulary)
                if truncation is not None:
                    truncation.apply(logits, labels[part], vocabulary=vocabulary)
                probabilities = logits.sub_(largest[part, None]).exp_().div_(total[part, None])
            else:
                probabilities, slope = kept, None
            d_entropy = None if grad_entropy is None else grad_entropy[part]
            own = vocabulary.own(labels[part])
            grad = _grad_logits(probabilities, own, grad_logprobs[part], d_entropy, entropy[part])
            multiply(grad, scaled)
            grad = (grad if slope is None else grad.mul_(slope)).mul_(scale / temperature).to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[part] = grad @ weight
            if needs_weight:
                of_part = grad.t() @ hidden[part]
                d_weight = of_part.float() if d_weight is None else d_weight.add_(of_part)
            if d_bias is not None:
                d_bias.add_(grad.sum(0))
        if needs_weight:
            d_weight = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)
            d_weight = d_weight if vocabulary.axis is None else d_weight.contiguous()
        d_bias = None if d_bias is None else d_bias.to(weight.dtype)
        return d_hidden, d_weight, d_bias, *[None] * 9


def parts(length: int, chunk: int) -> list[slice]:
    """Return the slices of `length` terms, `chunk` at a time."""
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def scaled_logits(head: OutputHead, hidden: Tensor, temperature: float) -> Tensor:
    """hidden [n, hidden] -> logits / temperature [n, V], a tensor of the caller's own."""
    logits = head.logits(hidden)
    return logits if temperature == 1 else logits.div_(temperature)


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

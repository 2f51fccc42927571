"""Log-probability and entropy of terms from hidden states; vocabulary-sized work is done in place and in chunks.

For a term with logits z = head(h) / temperature, p = softmax(z), label y:

    logprob  = z_y - logsumexp(z)            d logprob / dz   = onehot(y) - p
    entropy  = - sum_v p_v log p_v           d entropy / dz_v = -p_v log p_v - p_v entropy

A [chunk, V] buffer is all that lives at a time. Where all terms fit into the budget, the one buffer is kept
and becomes the gradient; otherwise the backward pass computes each chunk's logits again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cosmos_rl_llm.linear import product
from cosmos_rl_llm.model import Head


def term_logprobs(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    logits_bytes: int,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities [T] float32 of `labels` [T], and entropies [T] if asked for, from hidden [T, hidden].

    `logits_bytes` bounds the float32 logits alive at a time; at least one term is always done.
    """
    chunk = max(1, logits_bytes // (4 * head.weight.shape[0]))
    logprobs, entropy = _TermLogprobs.apply(
        hidden, head.weight, head.bias, labels, head.softcap, temperature, with_entropy, chunk
    )
    return logprobs, entropy if with_entropy else None


class _TermLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        softcap: float | None,
        temperature: float,
        with_entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        head = Head(weight, bias, softcap)
        logprobs = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros_like(logprobs)
        probabilities = None
        for part in _parts(len(labels), chunk):
            logits = _scaled_logits(head, hidden[part], temperature)
            chosen = logits.gather(1, labels[part, None]).squeeze(1)
            probabilities, logsumexp = _softmax_in_place(logits)
            logprobs[part] = chosen - logsumexp
            if with_entropy:
                entropy[part] = torch.special.entr(probabilities).sum(-1)
        keep = len(labels) <= chunk and softcap is None and any(ctx.needs_input_grad)
        ctx.save_for_backward(hidden, weight, bias, labels, entropy, probabilities if keep else None)
        ctx.options = (softcap, temperature, chunk)
        ctx.set_materialize_grads(False)  # entropy is often only looked at: then it costs the backward pass nothing
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, entropy, kept = ctx.saved_tensors
        softcap, temperature, chunk = ctx.options
        grad_logprobs = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs
        head = Head(weight, bias, softcap)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for part in _parts(len(labels), chunk):
            if kept is None:
                logits = _scaled_logits(head, hidden[part], temperature)
                slope = None if softcap is None else 1 - (logits * (temperature / softcap)).square()
                probabilities, _ = _softmax_in_place(logits)
            else:
                probabilities, slope = kept, None
            d_entropy = None if grad_entropy is None else grad_entropy[part]
            grad = _grad_logits(probabilities, labels[part], grad_logprobs[part], d_entropy, entropy[part])
            grad = grad.div_(temperature) if slope is None else grad.mul_(slope).div_(temperature)
            grad = grad.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[part] = product(grad, weight.t())
            if d_weight is not None:
                d_weight += product(grad.t(), hidden[part].t())
            if d_bias is not None:
                d_bias.add_(grad.sum(0))
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(weight.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def _parts(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def _scaled_logits(head: Head, hidden: Tensor, temperature: float) -> Tensor:
    logits = head.logits(hidden)
    return logits if temperature == 1 else logits.div_(temperature)


def _softmax_in_place(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits [n, V] into probabilities; also return logsumexp [n]."""
    largest = logits.amax(-1, keepdim=True)
    probabilities = logits.sub_(largest).exp_()
    total = probabilities.sum(-1, keepdim=True)
    return probabilities.div_(total), (largest + total.log()).squeeze(1)


def _grad_logits(
    probabilities: Tensor, labels: Tensor, d_logprobs: Tensor, d_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """Gradient with respect to z [chunk, V], written into `probabilities`."""
    if d_entropy is None:
        grad = probabilities.mul_(-d_logprobs[:, None])
    else:
        spread = torch.special.entr(probabilities).mul_(d_entropy[:, None])
        grad = probabilities.mul_(-(d_logprobs + d_entropy * entropy)[:, None]).add_(spread)
    return grad.scatter_add_(1, labels[:, None], d_logprobs[:, None])

"""The output head of a language model, and the tokens of it that a rank has.

logits = softcap(scale * (hidden @ weight.T + bias))        weight [V, hidden]; over tp [own, hidden] of each rank
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.axes.tensor import TensorAxis

_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Config keys that logits are multiplied by: Cohere, Falcon-H1, Muse Glimmer."""
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Config keys that logits, or the hidden states before the head, are divided by: Granite and MiniCPM3, Inkling."""
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Config keys of the soft cap of logits: Gemma 2 and others, RecurrentGemma, xLSTM."""

NEVER = -1e4
"""Added to the logit of a token that is never sampled, in policy and engines."""


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The output projection: logits = softcap(scale * (hidden @ weight.T + bias))."""

    weight: Tensor
    """[V, hidden]."""
    bias: Tensor | None
    """[V]."""
    softcap: float | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, model: PreTrainedModel) -> OutputHead:
        """Read the head of a causal LM. Raises UserError if it has no linear output layer."""
        config = model.config.get_text_config()
        linear = model.get_output_embeddings()
        if not isinstance(linear, nn.Linear):
            raise UserError(f"model.path: {type(model).__name__} has no linear output layer; choose another model")
        caps = [cap for key in _SOFTCAPS if (cap := getattr(config, key, None))]
        return cls(linear.weight, linear.bias, softcap=caps[0] if caps else None, scale=_logit_scale(config))

    def without(self, banned: Sequence[int]) -> OutputHead:
        """The head that never samples the tokens `banned`, such as placeholders of pictures; others are left out."""
        rows = [token for token in banned if 0 <= token < len(self.weight)]
        if not rows:
            return self
        penalty = torch.zeros(len(self.weight), dtype=self.weight.dtype, device=self.weight.device)
        for row in rows:  # few; a list of indices would be copied to the GPU, which the host waits for
            penalty[row] = NEVER
        return replace(self, bias=penalty if self.bias is None else self.bias + penalty)

    def cast(self, dtype: torch.dtype | None) -> OutputHead:
        """The same head in another dtype; gradients flow back to the original."""
        if dtype is None:
            return self
        return replace(self, weight=self.weight.to(dtype), bias=None if self.bias is None else self.bias.to(dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden] -> logits [..., V] float32, or float64 of such hidden states."""
        logits = F.linear(hidden, self.weight, self.bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits if self.scale == 1 else logits.mul_(self.scale)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def _logit_scale(config: PreTrainedConfig) -> float:
    """Factor of the logits in a family's forward pass."""
    multipliers, divisors = _MULTIPLIERS, _DIVISORS
    if config.model_type.startswith("hyperclovax"):  # multiplies by the key by which others divide
        multipliers, divisors = ("logits_scaling",), ()
    above = [float(getattr(config, key, None) or 1) for key in multipliers]
    below = [float(getattr(config, key, None) or 1) for key in divisors]
    return math.prod(above) / math.prod(below)


def scaled_logits(head: OutputHead, hidden: Tensor, temperature: float) -> Tensor:
    """hidden [n, hidden] -> logits / temperature [n, V], a tensor of the caller's own."""
    logits = head.logits(hidden)
    return logits if temperature == 1 else logits.div_(temperature)


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

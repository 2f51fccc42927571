"""Samples next tokens: one counter-based random number per token, inverted through the cumulative distribution.

The number depends only on (seed, sample, position), so a rollout does not change with the other sequences of the
batch. Log-probabilities are those of the sampling distribution: after temperature and, if set, after top-k and top-p
(in this order) with the kept tokens renormalised, as the policy's are (`policy/truncation.py`); without
`Sampling.renormalise` both are among all tokens. Greedy rows report theirs under temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cosmos_rl_core.parallel.device import to_device
from cosmos_rl_core.types import Sampling
from cosmos_rl_llm.model.output_head import Vocabulary
from cosmos_rl_llm.policy.truncation import ALL, CANDIDATES, nucleus

_BLOCK = 256
"""Tokens per block of the two-level inversion: V numbers are summed, but only V / 256 + 256 accumulated."""
_VECTOR = 32
"""Vector width of torch's element-wise CPU kernels; the remainder is rounded differently."""


def uniforms(seeds: np.ndarray, samples: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return float64 numbers in (0, 1) [n] from uint64 seeds [n], sample numbers [n] and term positions [n].

    Three rounds of SplitMix64's finaliser (Steele, Lea, Flood 2014), one for each part of the counter.
    """
    state = _mix(seeds.astype(np.uint64))
    state = _mix(state ^ samples.astype(np.uint64))
    state = _mix(state ^ positions.astype(np.uint64))
    return ((state >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Sampler:
    """Sampling parameters of a batch's n rows, prepared once for each change of the batch's members."""

    scale: Tensor
    """[n, 1] float32: 1 / temperature; 1 for greedy rows."""
    greedy: Tensor | None
    """[n] bool, or None if no row is greedy."""
    restricted: Tensor | None
    """[r] int64: rows with top-k or top-p, or None."""
    top_k: Tensor | None
    """[r, 1] int64: `ALL` if top-k is off."""
    top_p: Tensor | None
    """[r, 1] float32."""
    renormalised: Tensor | None
    """[r] bool: whether log-probabilities are among the kept tokens, instead of all."""
    candidates: int
    """Initial number of most likely tokens in restricted rows: at least the largest top-k."""

    @classmethod
    def of(cls, rows: Sequence[Sampling], *, vocab_size: int, device: torch.device | str = "cpu") -> Sampler:
        """Prepare for one `Sampling` per row."""
        greedy = [row.temperature == 0 for row in rows]
        limited = [i for i, row in enumerate(rows) if row.temperature and (0 < row.top_k < vocab_size or row.top_p < 1)]
        top_k = [rows[i].top_k if 0 < rows[i].top_k < vocab_size else ALL for i in limited]
        sampler = cls(
            scale=torch.tensor([[1 / (row.temperature or 1.0)] for row in rows]),
            greedy=torch.tensor(greedy) if any(greedy) else None,
            restricted=torch.tensor(limited) if limited else None,
            top_k=torch.tensor(top_k)[:, None] if limited else None,
            top_p=torch.tensor([rows[i].top_p for i in limited])[:, None] if limited else None,
            renormalised=torch.tensor([rows[i].renormalise for i in limited]) if limited else None,
            candidates=max([CANDIDATES, *(k for k in top_k if k != ALL)]),
        )
        return to_device(sampler, torch.device(device))

    def sample(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [n] int64 and their log-probabilities [n] float32.

        Args:
            logits: [n, V] float32; overwritten.
            uniform: [n] float64 in (0, 1).
        """
        logits = _aligned(logits.mul_(self.scale))
        # The largest logit becomes 0, so that exp neither overflows nor loses the likely tokens.
        logits.sub_(logits.amax(-1, keepdim=True))
        limited = None if self.restricted is None else self._sample_restricted(logits, uniform)
        mass = logits.exp()
        # Every row is sampled from all tokens; greedy and restricted rows are replaced. Branches by row would cost
        # more than their samples, and a wait of the host on a GPU.
        tokens = _invert(mass, uniform)
        if self.greedy is not None:
            tokens = torch.where(self.greedy, logits.argmax(-1), tokens)
        if limited is not None:
            tokens[self.restricted] = limited[0]
        logprobs = logits.gather(1, tokens[:, None]).squeeze(1) - mass.sum(-1).log()
        if limited is not None and self.renormalised is not None:
            logprobs[self.restricted] = torch.where(self.renormalised, limited[1], logprobs[self.restricted])
        return tokens, logprobs

    def _sample_restricted(self, logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Sample the rows with top-k or top-p from their most likely tokens."""
        assert self.restricted is not None and self.top_k is not None and self.top_p is not None
        values, tokens, kept = nucleus(
            logits[self.restricted],
            self.top_k,
            self.top_p,
            count=self.candidates,
            vocabulary=Vocabulary.all(logits.shape[1]),
        )
        mass = values.exp().masked_fill(~kept, 0)
        place = _invert(mass, u[self.restricted])[:, None]
        logprobs = values.gather(1, place) - mass.sum(-1, keepdim=True).log()
        return tokens.gather(1, place).squeeze(1), logprobs.squeeze(1)


def penalise(logits: Tensor, tokens: Sequence[int], penalty: float) -> None:
    """Make the `tokens` of a sequence less likely, in place in its logits [V]. CTRL (arXiv 1909.05858), section 4.1.

    Positive logits are divided by the penalty and negative ones multiplied by it, as in vLLM and transformers.
    """
    places = torch.tensor(tokens, device=logits.device)
    values = logits[places]
    logits[places] = torch.where(values > 0, values / penalty, values * penalty)


def _aligned(logits: Tensor) -> Tensor:
    """Pad rows to whole vectors, so that a row's `exp` does not depend on its position in the batch."""
    return F.pad(logits, (0, -logits.shape[1] % _VECTOR), value=float("-inf"))


def _invert(mass: Tensor, u: Tensor) -> Tensor:
    """Return the index [n] where the cumulative `mass` [n, V] first exceeds u * total; never one of mass 0."""
    rows, size = mass.shape
    if size <= 4 * _BLOCK:
        return _first_above(mass.cumsum(-1, dtype=torch.float64), u)
    # First the block that contains the target, then the token in it: only two short rows are accumulated in float64.
    padded = F.pad(mass, (0, -size % _BLOCK)).view(rows, -1, _BLOCK)
    cumulative = padded.sum(-1).cumsum(-1, dtype=torch.float64)
    block = _first_above(cumulative, u)
    upper = cumulative.gather(1, block[:, None]).squeeze(1)
    lower = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)[:, None]).squeeze(1), 0.0)
    # What of the target is left inside of the block, as a part of the block's mass.
    rest = ((u * cumulative[:, -1] - lower) / (upper - lower)).clamp(0, 1)
    inside = padded[torch.arange(rows, device=mass.device), block].cumsum(-1, dtype=torch.float64)
    return block * _BLOCK + _first_above(inside, rest)


def _first_above(cumulative: Tensor, u: Tensor) -> Tensor:
    """Index [n] of the first entry of `cumulative` [n, m] above u * total, u in [0, 1]."""
    # u may round up to 1; just below the total is the last token with any mass.
    total = cumulative[:, -1]
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)

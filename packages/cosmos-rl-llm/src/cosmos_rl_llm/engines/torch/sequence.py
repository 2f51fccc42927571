"""A request to an engine, and its sequences during generation."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cosmos_rl_core.rollout.engine_thread import EngineRequest
from cosmos_rl_core.types import FinishReason, Rollout, Sampling


@dataclass(eq=False, slots=True, kw_only=True)
class Request(EngineRequest):
    """Samples of one prompt that start together and share one prefill."""

    prompt_tokens: np.ndarray
    """[prompt] int32."""
    num_samples: int
    first_sample: int
    """Number of the first sample within the caller's group: part of the random counter."""
    sampling: Sampling
    seed: int
    sequences: list[RunningSequence] = field(default_factory=list)
    """Its sequences in order of sample number, once admitted."""

    @property
    def num_terms(self) -> int:
        """Maximum cache positions of a sequence of this request."""
        return len(self.prompt_tokens) + self.sampling.max_terms

    @property
    def finished(self) -> bool:
        return bool(self.sequences) and all(s.finish_reason is not None for s in self.sequences)

    def start(self) -> list[RunningSequence]:
        """Create the sequences."""
        numbers = range(self.first_sample, self.first_sample + self.num_samples)
        self.sequences = [RunningSequence(request=self, sample=number) for number in numbers]
        return self.sequences


@dataclass(eq=False, slots=True, kw_only=True)
class RunningSequence:
    """One sample and its terms so far."""

    request: Request
    sample: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)
    """Recorded experts: [tokens, layers, k] of the prompt, then of each input token."""
    finish_reason: FinishReason | None = None

    def rollout(self, text: str) -> Rollout:
        """The finished sample as a `Rollout`."""
        assert self.finish_reason is not None
        arrays = {
            "prompt_tokens": self.request.prompt_tokens,
            "tokens": np.array(self.tokens, dtype=np.int32),
        }
        if self.routes:
            arrays["routes"] = np.concatenate(self.routes)
        return Rollout(
            arrays=arrays,
            rollout_logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            loss_mask=np.ones(len(self.tokens), dtype=bool),
            text=text,
            finish_reason=self.finish_reason,
        )

"""One sample: its vLLM request, and its state during generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_rl_core.types import FinishReason, Rollout, Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput

TOKENS_AN_ANSWER = 16
"""Tokens that vLLM collects per output, unless stop strings require a check of each token."""
_STOP_MARGIN = 4
"""Tokens decoded before those that could contain a stop string: a character may span several."""


def parameters(sampling: Sampling, seed: int, number: int, stop_ids: Sequence[int]) -> SamplingParams:
    """Return the sampling parameters of sample `number` of a group."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_terms,
        seed=int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1),
        stop_token_ids=list(stop_ids),
        ignore_eos=True,  # they are in `stop_ids`
        logprobs=0,  # only of the sampled token
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=1 if sampling.stop else TOKENS_AN_ANSWER,
    )


class Sample:
    """A sequence during generation."""

    def __init__(self, prompt_tokens: np.ndarray, *, decode: Callable[[Sequence[int]], str], stop: tuple[str, ...]):
        self.prompt_tokens = prompt_tokens
        """[prompt] int32."""
        self._decode, self._stop = decode, stop
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._finish_reason: FinishReason | None = None

    def add(self, part: CompletionOutput, *, first_version: int) -> bool:
        """Append the received tokens; return whether one of them completed a stop string.

        first_version: version of tokens sampled before vLLM received any version.
        """
        stopped_before = self._finish_reason is not None
        if not stopped_before:
            self._grow(part)
        if part.finish_reason is not None:
            assert part.weight_versions is not None, "vLLM returned no weight version"
            for span in part.weight_versions:
                version = first_version if span.version == "default" else int(span.version)
                self._versions += [version] * (span.end - span.start)
            if self._finish_reason is None:
                assert part.finish_reason in ("stop", "length"), part.finish_reason
                self._finish_reason = part.finish_reason
        return self._finish_reason == "stop" and not stopped_before and part.finish_reason is None

    def _grow(self, part: CompletionOutput) -> None:
        flat: Any = part.logprobs
        assert flat is not None, "`parameters` requests flat logprobs"
        for token, at in zip(part.token_ids, flat.start_indices, strict=True):
            self._tokens.append(token)
            self._logprobs.append(flat.logprobs[at])
            if self._stop and self._stop_seen():
                self._finish_reason = "stop"
                return

    def _stop_seen(self) -> bool:
        """Whether the last token completed a stop string; a token is at least one byte of it."""
        longest = max(len(text.encode()) for text in self._stop)
        tail = self._decode(self._tokens[-longest - _STOP_MARGIN :])
        return any(text in tail for text in self._stop)

    def rollout(self) -> Rollout:
        """Return the finished sample as a `Rollout`."""
        assert self._finish_reason is not None
        num_terms = len(self._tokens)
        text = self._decode(self._tokens)
        ends = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        return Rollout(
            arrays={"prompt_tokens": self.prompt_tokens, "tokens": np.array(self._tokens, dtype=np.int32)},
            rollout_logprobs=np.array(self._logprobs, dtype=np.float32),
            versions=np.array(self._versions[:num_terms], dtype=np.int32),
            loss_mask=np.ones(num_terms, dtype=bool),
            text=text[: min(ends)] if ends else text,
            finish_reason=self._finish_reason,
        )

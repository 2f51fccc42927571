"""Check that this engine samples from the distribution that transformers computes, on a small model of the family.

miniature -> RunningBatch: two prompts, prefill and decode steps -> tokens with their log-probabilities
miniature -> transformers, untouched: the same tokens, each sequence alone            -> equal, or UserError
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from transformers import PreTrainedModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.axes.linear import MIN_ROWS
from cosmos_rl_core.types import Sampling
from cosmos_rl_llm.engines.torch.batch import RunningBatch
from cosmos_rl_llm.engines.torch.cache import bytes_per_term
from cosmos_rl_llm.engines.torch.sequence import Request
from cosmos_rl_llm.policy.probe import (
    TOLERANCE,
    describe,
    family_miniature,
    first_line,
    plain_logprobs,
    probe_samples,
    runs_unpacked,
)

_CACHE_BYTES = 2**24
_TERMS = 3


def check_generation(model: PreTrainedModel) -> None:
    """Raise UserError for a family that this engine cannot generate with. Does not change `model`."""
    name = type(model).__name__
    if runs_unpacked(model):
        raise UserError(
            f'rollout.engine = "torch" packs prompts and caches only keys and values, while {name} carries more '
            'from token to token; set rollout.engine = "vllm"'
        )
    error = _largest_error(*describe(model), str(model.device))
    if not error <= TOLERANCE:
        raise UserError(
            f'rollout.engine = "torch" generates with log-probabilities {error:.2g} nats off with {name}; set '
            'rollout.engine = "vllm"'
        )


@lru_cache(maxsize=64)
@torch.inference_mode()
def _largest_error(kind: type[PreTrainedModel], config: str, device: str) -> float:
    """Maximum error in nats, over the terms of all sequences."""
    model, reference = (family_miniature(kind, config, device=device) for _ in range(2))
    prompts = [np.concatenate([sample.prompt_tokens, sample.tokens]) for sample in probe_samples()]
    sampling = Sampling(max_terms=_TERMS)
    requests = [
        Request(prompt_tokens=tokens, num_samples=1, first_sample=0, sampling=sampling, seed=seed)
        for seed, tokens in enumerate(prompts)
    ]
    try:
        batch = RunningBatch(
            model,
            decode=lambda _: "",
            stop_ids=(),
            max_sequences=MIN_ROWS,
            cache_terms=_CACHE_BYTES // bytes_per_term(model),
        )
        batch.admit(requests, version=0)
        while batch.sequences:
            batch.step(version=0)
    except Exception as error:  # any, from the family's own code
        raise UserError(
            f'rollout.engine = "torch" cannot generate with {kind.__name__} ({first_line(error)}); '
            'set rollout.engine = "vllm"'
        ) from error
    errors = []
    for sequence in (sequence for request in requests for sequence in request.sequences):
        wanted = plain_logprobs(reference, sequence.request.prompt_tokens, np.array(sequence.tokens, dtype=np.int32))
        errors.append((torch.tensor(sequence.logprobs, device=wanted.device) - wanted).abs().max())
    return float(torch.stack(errors).max())

"""Generation with a Hugging Face model in this process: continuous batching, on CPU or one GPU.

A round of the engine's thread (`rollout/engine_thread.py`): free cancelled sequences -> admit waiting requests -> one
decode step. The thread waits only for new requests and commands, and only when nothing runs.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cosmos_rl_core.episodes.interfaces import Opening
from cosmos_rl_core.errors import PromptError, UserError
from cosmos_rl_core.parallel.device import exact_products
from cosmos_rl_core.parallel.offload.swap import Swap, tensors_of
from cosmos_rl_core.rollout.engine_thread import ThreadedEngine
from cosmos_rl_core.types import Prompt, Rollout, Sampling
from cosmos_rl_llm.config import LLMTorchOptions
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.engines.prompts import StopStrings, check_length, encode, name_of
from cosmos_rl_llm.engines.session import EPISODE, NO_EPISODES, SessionTokens, TokenSession
from cosmos_rl_llm.engines.torch.batch import GenerationRequest, RunningBatch, RunningSequence
from cosmos_rl_llm.engines.torch.cache import WaitingTerms
from cosmos_rl_llm.model.causal_lm import context_length, named_weights, trained_weights
from cosmos_rl_llm.model.rope import original_length
from cosmos_rl_llm.policy.experts import is_experts
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
    with exact_products():
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
    limit = context_length(model) or 2**31  # dynamic NTK changes above it, where no request gets
    prompts = [np.concatenate([sample.prompt_tokens, sample.tokens])[: limit - _TERMS] for sample in probe_samples()]
    sampling = Sampling(max_terms=_TERMS)
    requests = [
        GenerationRequest(prompt_tokens=tokens, num_samples=1, first_sample=0, sampling=sampling, seed=seed)
        for seed, tokens in enumerate(prompts)
    ]
    try:
        batch = RunningBatch(model, LLMTorchOptions(max_sequences=len(requests), cache_bytes=_CACHE_BYTES))
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
        expected = plain_logprobs(reference, sequence.request.prompt_tokens, np.array(sequence.tokens, dtype=np.int32))
        errors.append((torch.tensor(sequence.logprobs, device=expected.device) - expected).abs().max())
    return float(torch.stack(errors).max())


PREFILL_TERMS = 8192
"""Maximum prompt tokens of one prefill pass, unless a single prompt is longer."""


class TorchEngine(ThreadedEngine[GenerationRequest]):
    """`interfaces.RolloutEngine` over any Hugging Face causal LM that uses the AttentionInterface."""

    def __init__(self, model: PreTrainedModel, chat: Chat, options: LLMTorchOptions, *, version: int = 0) -> None:
        """Take over `model`; the engine's thread starts with the first request.

        Args:
            chat: encodes prompts, from any thread; has the tokens that end a response, and the limit of its length.
            version: policy version of the current weights.

        With `options.record_routes` rollouts have `arrays["routes"]` [prompt + T - 1, layers, k]: the experts of each
        input token. Raises UserError for a family that this engine does not support, and for options that it does not.
        """
        check_generation(model)
        if options.batch_invariant and any(is_experts(module) for module in model.modules()):
            raise UserError(
                f"rollout.options.batch_invariant: {type(model).__name__} has experts, whose number of rows depends on "
                "the other sequences; set it to false"
            )
        super().__init__("torch-engine", version=version)
        self._model, self._trained = model, trained_weights(model).keys()
        self._swap = Swap(lambda: tensors_of(model))
        self._chat = chat
        self._max_length = chat.max_length or context_length(model)
        self._one_prompt_a_pass = options.batch_invariant
        vision = None if chat.vision is None else chat.vision.family
        self._batch = RunningBatch(model, options, stop_ids=chat.end_ids, vision=vision)
        self._waiting_terms = WaitingTerms(0 if options.batch_invariant else options.episode_cache_bytes)
        self._records_routes = options.record_routes

    @property
    def progress(self) -> int:
        """Forward passes so far, for heartbeats: stops growing when the engine hangs."""
        return self._batch.passes

    def weights(self) -> dict[str, Tensor]:
        """The live tensors that are trained, by checkpoint name. Written only by an `apply` given to `switch`."""
        return {name: weight for name, weight in named_weights(self._model).items() if name in self._trained}

    async def sleep(self) -> None:
        """Free the keys and values, and move the model to the host's memory."""
        await self._call(self._sleep)

    async def wake(self) -> None:
        await self._call(self._swap.back)

    async def generate(
        self, prompt: Prompt, *, num_samples: int, sampling: Sampling, seed: int
    ) -> tuple[str, list[Rollout]]:
        """Return the rendered prompt and `num_samples` rollouts (see `interfaces.RolloutEngine`).

        `tokens` end with the stop token or with the token that completed a stop string; `text` ends before the
        stop string. Groups that do not fit at once are split into parts with a prefill each.
        """
        encoded = await encode(self._chat, prompt)
        tokens, stops = encoded.tokens, StopStrings(self._chat, sampling.stop)
        at_a_time = self._samples_at_a_time(prompt, tokens, sampling)
        requests = [
            GenerationRequest(
                prompt_tokens=tokens,
                num_samples=min(at_a_time, num_samples - first),
                first_sample=first,
                sampling=sampling,
                seed=seed,
                view=encoded.view,
                stops=stops,
            )
            for first in range(0, num_samples, at_a_time)
        ]
        await asyncio.gather(*(self._ask(request) for request in requests))
        finished = [sequence for request in requests for sequence in request.sequences]
        return self._chat.decode_prompt(tokens.tolist()), [sequence.rollout() for sequence in finished]

    def open(self, opening: Opening) -> TokenSession:
        """Begin a history that grows by turns, whose keys and values are kept between them (`episodes.interfaces`).

        With `options.batch_invariant` they are computed again for each turn: keys and values of a prompt that is read
        at once differ in the last bits from those of tokens that were decoded one by one, and which of them are still
        there would depend on the other episodes.
        """
        if self._records_routes:
            raise UserError(NO_EPISODES)
        return TokenSession(opening, limit=self._max_length, draw=self._draw, forget=self._waiting_terms.take)

    async def _draw(self, history: SessionTokens, sampling: Sampling, seed: int) -> RunningSequence:
        """Sample one sequence after a history, and keep its keys and values for the next. Raises PromptError."""
        self._samples_at_a_time(EPISODE, history.tokens, sampling)
        request = GenerationRequest(
            prompt_tokens=history.tokens,
            num_samples=1,
            first_sample=0,
            sampling=sampling,
            seed=seed,
            view=history.view,
            stops=StopStrings(self._chat, sampling.stop),
            keeps=self._waiting_terms.limit > 0,
            kept=self._waiting_terms.take(history),
        )
        await self._ask(request)
        if request.kept is not None:
            self._waiting_terms.put(history, request.kept)
        return request.sequences[0]

    def _samples_at_a_time(self, prompt: Prompt, tokens: np.ndarray, sampling: Sampling) -> int:
        """Number of concurrent samples of a prompt. Raises PromptError if not even one fits."""
        where, length, most = name_of(prompt), len(tokens), sampling.max_terms
        check_length(prompt, length, sampling, limit=self._max_length)
        self._check_growth(where, length, most)
        at_a_time = self._batch.samples_at_a_time(length + most)
        if at_a_time == 0:
            raise PromptError(
                f"{where}: {length} prompt tokens and up to {most} new ones do not fit into the cache; "
                "raise rollout.options.cache_bytes or lower rollout.sampling.max_tokens"
            )
        return at_a_time

    def _check_growth(self, where: str, length: int, most: int) -> None:
        """Raise PromptError if a response could grow past the length at which the rotary embedding changes."""
        original = original_length(self._model.config.get_text_config())
        if original is not None and length <= original < length + most - 1:  # nothing follows the last token
            raise PromptError(
                f"{where}: the prompt has {length} tokens and with up to {most} new ones exceeds {original}, where the "
                "model's rotary embedding changes (longrope, dynamic NTK); lower rollout.sampling.max_tokens to at "
                f'most {original - length + 1}, or set rollout.engine = "vllm"'
            )

    # The engine thread.

    def _sleep(self) -> None:
        self._batch.free()
        self._waiting_terms.free()
        self._swap.out()

    def _is_busy(self) -> bool:
        return bool(self._batch.sequences)

    @torch.inference_mode()
    def _work(self) -> None:
        for request in dict.fromkeys(sequence.request for sequence in self._batch.sequences):
            if request.done.cancelled():
                self._batch.drop(request)
        self._admit()
        if self._batch.sequences:
            for request in self._batch.step(version=self._version):
                request.finish()

    def _admit(self) -> None:
        """Start waiting requests in order, as long as the next one fits."""
        chosen: list[GenerationRequest] = []
        prefill = 0
        while self._waiting and self._batch.fits([*chosen, self._waiting[0]]):
            prefill += len(self._waiting[0].prompt_tokens) - self._waiting[0].num_kept
            unlike = bool(chosen) and (chosen[0].kept is None) != (self._waiting[0].kept is None)
            if chosen and (self._one_prompt_a_pass or prefill > PREFILL_TERMS or unlike):
                break
            chosen.append(self._waiting.popleft())
        if chosen:
            for request in self._batch.admit(chosen, version=self._version):
                request.finish()

"""Generation with vLLM: continuous batching and prefix caching in separate processes.

    asyncio loop (this file)                  engine core            workers
    generate   one request per sample  ---->  schedules  ----------> forward passes, sampling
               <--- tokens, log-probs, the weight version of each token
    switch     pause at a token boundary, apply, set the version, resume
    subscriber                                                       pull weights during generation

Input and output are tokens; text is decoded here. vLLM itself records the version that sampled each token, so it is
exact at whatever time an output is read. Prompts share keys and values only with prompts of the same version.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import Prompt, Rollout, Sampling
from cosmos_rl_llm.config import ROUTES
from cosmos_rl_llm.data.chat import Chat, Encoded
from cosmos_rl_llm.engines.prompts import Response, StopStrings, check_length, encode, name_of
from cosmos_rl_llm.engines.session import EPISODE, NO_EPISODES, SessionTokens, TokenSession
from cosmos_rl_llm.engines.vllm.media import VllmMedia
from cosmos_rl_llm.engines.vllm.options import ONLY_RENORMALISED
from cosmos_rl_llm.engines.vllm.plugin import ADAPTER_ID, REFUSED
from cosmos_rl_llm.model.output_head import NEVER

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import SamplingParams
    from vllm.inputs.engine import EngineInput
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from cosmos_rl_core.episodes.interfaces import Opening
    from cosmos_rl_core.weight_sync import SyncSection
    from cosmos_rl_core.wire.tls import Tls
    from cosmos_rl_transfer import ReplicaSubscriber


TOKENS_AN_ANSWER = 16
"""Tokens that vLLM collects per output, unless stop strings require a check of each token."""


def parameters(
    sampling: Sampling, seed: int, number: int, stop_ids: Sequence[int], banned: Sequence[int] = ()
) -> SamplingParams:
    """Return the sampling parameters of sample `number` of a group. banned: tokens that are never sampled."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=sampling.max_terms,
        seed=int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1),
        stop_token_ids=list(stop_ids),
        logit_bias=dict.fromkeys(banned, NEVER) or None,
        ignore_eos=True,  # they are in `stop_ids`
        logprobs=0,  # only of the sampled token
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=1 if sampling.stop else TOKENS_AN_ANSWER,
    )


@dataclass(eq=False, slots=True, kw_only=True)
class VllmSequence(Response):
    """A sequence during generation. Its versions, all of which come with its end, may be of more tokens than it has."""

    routes: np.ndarray | None = None
    """[inputs, layers, k], of as many tokens as its versions: the experts, if vLLM records them."""

    def add(self, part: CompletionOutput, *, first_version: int) -> bool:
        """Append the received tokens; return whether one of them completed a stop string.

        first_version: version of tokens sampled before vLLM received any version.
        """
        stopped_before = self.finish_reason is not None
        if not stopped_before:
            self._grow(part)
        if part.finish_reason is not None:
            assert part.weight_versions is not None, "vLLM returned no weight version"
            self.routes = part.routed_experts
            for span in part.weight_versions:
                version = first_version if span.version == "default" else int(span.version)
                self.versions += [version] * (span.end - span.start)
            if self.finish_reason is None:
                assert part.finish_reason in ("stop", "length"), part.finish_reason
                self.finish_reason = part.finish_reason
        return self.finish_reason == "stop" and not stopped_before and part.finish_reason is None

    def routed(self) -> dict[str, np.ndarray]:
        """Return the array `routes` [prompt + T - 1, layers, k]. Raises UserError if vLLM returned fewer."""
        num_inputs = len(self.prompt_tokens) + len(self.tokens) - 1
        if self.routes is None or len(self.routes) < num_inputs:
            given = "no experts" if self.routes is None else f"experts of {len(self.routes)} tokens"
            raise UserError(f"{ROUTES}: vLLM returned {given} for a rollout of {num_inputs}; set it to false")
        routes = self.routes[:num_inputs]
        return {"routes": routes if routes.dtype == np.uint8 else routes.astype(np.int16)}

    def _grow(self, part: CompletionOutput) -> None:
        flat: Any = part.logprobs
        assert flat is not None, "`parameters` requests flat logprobs"
        for token, at in zip(part.token_ids, flat.start_indices, strict=True):
            self.tokens.append(token)
            self.logprobs.append(flat.logprobs[at])
            if self.stops is not None and self.stops.end(self.tokens):
                self.finish_reason = "stop"
                return


T = TypeVar("T")

LOOK_S = 0.5
"""Interval at which a waiting call checks that vLLM is alive; a dead vLLM leaves such calls waiting."""


class VllmEngine:
    """`interfaces.RolloutEngine` over vLLM's AsyncLLM."""

    def __init__(
        self,
        llm: AsyncLLM,
        chat: Chat,
        *,
        recompute_kv: bool = False,
        records_routes: bool = False,
        version: int = -1,
        adapters: Sequence[str] = (),
    ) -> None:
        """Take over `llm`, made by `vllm_start.start`.

        chat: encodes prompts, from any thread, and has the tokens that end a response. recompute_kv: recompute the keys
        and values of running sequences at a switch. records_routes: give rollouts `arrays["routes"]`, as the torch
        engine does; vLLM was started to record them. version: policy version of the current weights; with -1 nothing is
        served before the policy's weights have arrived. adapters: the layers that `llm` has slots for.
        """
        self._adapter: LoRARequest | None = None
        self._layers = adapters
        self._llm, self._chat = llm, chat
        self._media = None if chat.vision is None else VllmMedia(llm, chat.vision.family)
        self._banned = () if self._media is None else self._media.banned
        self._recompute_kv, self._records_routes = recompute_kv, records_routes
        self._first_version = self._version = version
        self._names = count()
        self._progress = 0
        self._switching = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._stopped: BaseException | None = None

    @property
    def version(self) -> int:
        """Policy version of the next sampled term."""
        return self._version

    @property
    def progress(self) -> int:
        """Outputs read from vLLM so far, for heartbeats: stops increasing if the engine hangs."""
        return self._progress

    def weights(self) -> dict[str, Tensor]:
        """Empty: the live weights are in vLLM's workers, updated through `subscriber`."""
        return {}

    async def generate(
        self, prompt: Prompt, *, num_samples: int, sampling: Sampling, seed: int
    ) -> tuple[str, list[Rollout]]:
        """Return the rendered prompt and `num_samples` rollouts (see `interfaces.RolloutEngine`).

        `tokens` end with the stop token or with the token that completed a stop string; `text` ends before the
        stop string. The same seed gives the same rollouts if vLLM's batches give the same bits.
        """
        encoded = await encode(self._chat, prompt)
        samples = await self._sample(
            prompt, encoded, num_samples=num_samples, salt=self._version, sampling=sampling, seed=seed
        )
        rollouts = [sample.as_rollout(sample.routed() if self._records_routes else {}) for sample in samples]
        return self._chat.decode_prompt(encoded.tokens.tolist()), rollouts

    def open(self, opening: Opening) -> TokenSession:
        """Begin a history that grows by turns (`episodes.interfaces`); each turn is a request with all of its tokens.

        vLLM's prefix cache keeps keys and values while an environment answers, as long as it has room. After a switch
        of weights those of earlier turns stay in use, as they do inside of a sequence; with `recompute_kv` they are
        computed again with the new weights.
        """
        if self._records_routes:
            raise UserError(NO_EPISODES)
        return TokenSession(opening, limit=self.max_length, draw=self._draw)

    async def _draw(self, history: SessionTokens, sampling: Sampling, seed: int) -> VllmSequence:
        """Sample one sequence after a history. Raises PromptError."""
        if history.salt is None or self._recompute_kv:
            history.salt = self._version
        encoded = Encoded(text="", tokens=history.tokens, view=history.view)
        (sample,) = await self._sample(EPISODE, encoded, num_samples=1, salt=history.salt, sampling=sampling, seed=seed)
        return sample

    @property
    def max_length(self) -> int:
        """Maximum tokens of a history."""
        return self._llm.model_config.max_model_len

    async def _sample(
        self, prompt: Prompt, encoded: Encoded, *, num_samples: int, salt: int, sampling: Sampling, seed: int
    ) -> list[VllmSequence]:
        """Return finished samples after the tokens of a prompt, whose location `prompt` has for messages."""
        self._check(prompt, encoded, sampling)
        stops, stop_ids = StopStrings(self._chat, sampling.stop), sorted(self._chat.end_ids)
        samples = [
            VllmSequence(prompt_tokens=encoded.tokens, view=encoded.view, stops=stops) for _ in range(num_samples)
        ]
        shown = input_of(encoded, salt=salt, media=self._media)  # once a group: pictures are cast and split by item
        tasks = [
            asyncio.create_task(
                self._generate_one(sample, shown, parameters(sampling, seed, number, stop_ids, self._banned))
            )
            for number, sample in enumerate(samples)
        ]
        self._running.update(tasks)
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            if self._stopped is None or _cancelled():
                raise
            raise RuntimeError("the engine has stopped") from self._stopped
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._running.difference_update(tasks)
        return samples

    async def switch(self, version: int, apply: Callable[[], None]) -> None:
        """Run `apply` in a thread while vLLM is paused between two tokens; running sequences continue afterwards.

        A ConnectionError in `apply` is raised, and vLLM stays paused until the next switch. Any other error, in `apply`
        or of vLLM, leaves the weights in an unknown state and therefore stops the engine.
        """
        async with self._switching:
            with self._stops_on_error("vLLM did not pause"):
                await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
            try:
                with self._stops_on_error("new weights could not be applied"):
                    await asyncio.to_thread(apply)
                    if self._recompute_kv:
                        await self._call(self._llm.reset_encoder_cache())
                        await self._call(self._llm.reset_prefix_cache(reset_running_requests=True))
                    await self._call(self._llm.update_weight_version(str(version)))
            except asyncio.CancelledError as error:
                self._stop(error)
                raise
            self._version = version
            with self._stops_on_error("vLLM did not go on"):
                await self._call(self._llm.resume_generation())

    async def sleep(self) -> None:
        """Drop the keys and values, and move the weights to the host's memory (vLLM's sleep level 1).

        Without a GPU vLLM frees nothing.
        """
        await self._call(self._llm.sleep(level=1))

    async def wake(self) -> None:
        await self._call(self._llm.wake_up())

    async def subscriber(
        self, address: str, *, settings: SyncSection, token: bytes, tls: Tls | None = None
    ) -> ReplicaSubscriber:
        """Make vLLM's workers receive new weights from `address`, all together (see `weight_sync.OwnsSubscriber`).

        Raises UserError for a model that new weights cannot reach.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        from cosmos_rl_transfer import ReplicaSubscriber, published_specs

        if self._layers and self._adapter is None:
            with empty_adapter(self._layers[0]) as self._adapter:
                await self._call(self._llm.add_lora(self._adapter))
        if settings.backend != "transfer":
            raise UserError(f'[sync] backend = {settings.backend!r}: the vllm engine supports only "transfer"')
        timeout_s = settings.timeout_s
        specs = await asyncio.to_thread(published_specs, address, token=token, timeout_s=timeout_s, tls=tls)
        num_ranks = self._llm.vllm_config.parallel_config.world_size
        replica = ReplicaSubscriber(address, token=token, num_ranks=num_ranks, timeout_s=timeout_s, tls=tls)
        connection = {
            "publishers": address,
            "replica": replica.address,
            "token": token,
            "tls": None if tls is None else tls.bundle,
            "specs": [(spec.name, list(spec.shape), spec.dtype) for spec in specs],
            "settings": settings.model_dump(),
        }
        try:
            await self._call(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=connection)))
        except Exception as error:  # any class: vLLM reports its workers' exceptions as text
            await replica.close()
            if (why := refusal(str(error))) is None:
                raise
            raise UserError(f'rollout.engine = "vllm": {why}') from error
        return replica

    async def close(self) -> None:
        """End vLLM's processes. Pending requests get a RuntimeError."""
        self._stop(RuntimeError("the engine was closed"))
        await asyncio.gather(*self._running, return_exceptions=True)
        if (llm := vars(self).pop("_llm", None)) is not None:  # its __del__ fails if it lives until Python exits
            await asyncio.to_thread(llm.shutdown)

    @contextmanager
    def _stops_on_error(self, what: str) -> Iterator[None]:
        """Stop the engine at an error in the block, and raise RuntimeError. what: the failure, for its message.

        vLLM reports its workers' errors as plain Exceptions. A ConnectionError is raised unchanged, without a stop: the
        publisher is lost, and the next switch brings new weights.
        """
        try:
            yield
        except ConnectionError:
            raise
        except Exception as error:
            self._stop(error)
            raise RuntimeError(f"the engine has stopped: {what}") from error

    def _stop(self, error: BaseException) -> None:
        self._stopped = self._stopped or error
        for task in self._running:
            task.cancel()

    def _check(self, prompt: Prompt, encoded: Encoded, sampling: Sampling) -> None:
        """Raise PromptError for an empty or too long prompt, and for a picture of too many tokens."""
        if self._stopped is not None:
            raise RuntimeError("the engine has stopped") from self._stopped
        check_length(prompt, len(encoded.tokens), sampling, limit=self.max_length)
        if not sampling.renormalise:
            raise UserError(f"rollout.sampling.renormalise = false: {ONLY_RENORMALISED}")
        if self._media is not None:
            self._media.check(encoded.view, where=name_of(prompt))

    async def _generate_one(self, sample: VllmSequence, shown: EngineInput, params: Any) -> None:
        """Fill `sample` with vLLM's outputs."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        name = f"sample-{next(self._names)}"
        try:
            running = self._llm.generate(copy.copy(shown), params, name, lora_request=self._adapter)
            async with aclosing(running) as answers:
                async for answer in answers:
                    self._progress += 1
                    if sample.add(answer.outputs[0], first_version=self._first_version):
                        await self._llm.abort(name)  # the next output is then the last
        except (EngineDeadError, EngineGenerateError) as error:
            self._stop(error)
            raise RuntimeError("the engine has stopped") from error

    async def _call(self, work: Awaitable[T]) -> T:
        """Await `work`. Raises RuntimeError if vLLM has died, which leaves its own calls waiting."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=LOOK_S))[0]:
                if self._llm.errored:
                    raise RuntimeError("the engine has stopped") from self._llm.dead_error
            return await task
        finally:
            task.cancel()


def input_of(prompt: Encoded, *, salt: int, media: VllmMedia | None) -> EngineInput:
    """The cache must not share keys and values of other weights: their version `salt` is part of its key."""
    from vllm.inputs.engine import tokens_input

    if not prompt.view.items:
        return tokens_input(prompt.tokens.tolist(), cache_salt=str(salt))
    assert media is not None, "a prompt with pictures for a model of text"
    return media.prompt(prompt.tokens, prompt.view, version=salt)


@contextmanager
def empty_adapter(layer: str) -> Iterator[LoRARequest]:
    """Yield vLLM's request for an adapter with a zero for one layer, whose slot is then written by the subscriber.

    Its files do not stay: vLLM fails if it ever loads the adapter again, which would clear the slot.
    """
    import torch
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    with TemporaryDirectory() as folder:
        config = {"r": 1, "lora_alpha": 1, "target_modules": [], "peft_type": "LORA"}
        Path(folder, "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        zeros = {f"base_model.model.{layer}.lora_{matrix}.weight": torch.zeros(1, 1) for matrix in "AB"}
        save_file(zeros, Path(folder, "adapter_model.safetensors"))
        yield LoRARequest("policy", ADAPTER_ID, folder)


def refusal(report: str) -> str | None:
    """Return the message of a worker that refused the model, from vLLM's report; None if there is none."""
    _, mark, rest = report.partition(REFUSED)
    return mark + rest.partition("', please check the stack trace")[0] if mark else None


def _cancelled() -> bool:
    """Whether the running task itself was cancelled, instead of one that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

"""Generation with a Hugging Face model in this process: continuous batching, on CPU or one GPU.

    asyncio loop                         engine thread (one, so that one team of OpenMP workers is used)
    generate, switch, cancel --post-->   take commands -> admit waiting requests -> one decode step -> again
              <--call_soon_threadsafe--  finished requests, applied switches, errors

Commands posted in one turn of the event loop arrive together and in order, so the same submissions give the
same batches and the same bits. The thread waits only for commands, and only when nothing runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cosmos_rl_core.errors import PromptError
from cosmos_rl_core.types import Prompt, Rollout, Sampling
from cosmos_rl_llm.engines.probe import check_generation
from cosmos_rl_llm.engines.torch.batch import EngineStats, RunningBatch
from cosmos_rl_llm.engines.torch.cache import bytes_per_term
from cosmos_rl_llm.engines.torch.sequence import Request, RunningSequence
from cosmos_rl_llm.model.causal_lm import context_length, named_weights

PREFILL_TERMS = 8192
"""Most prompt tokens of one prefill pass, unless a single prompt is longer."""


class TorchEngine:
    """`interfaces.RolloutEngine` over any Hugging Face causal LM that uses the AttentionInterface."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        encode: Callable[[Prompt], np.ndarray],
        decode: Callable[[Sequence[int]], str],
        decode_prompt: Callable[[Sequence[int]], str] | None = None,
        stop_ids: Collection[int],
        max_sequences: int = 64,
        max_length: int | None = None,
        cache_bytes: int = 4 * 1024**3,
        record_routes: bool = False,
        version: int = 0,
    ) -> None:
        """Take over `model` and start the engine's thread.

        Args:
            encode: a prompt's tokens [prompt] int32, or PromptError.
            decode: text of a response's tokens, for `Rollout.text` and stop strings.
            decode_prompt: text of a prompt's tokens as people should see it; None takes `decode`.
            stop_ids: tokens that end a response (and belong to it).
            max_sequences: most sequences that run at a time; further requests wait in order.
            max_length: most tokens of prompt and response; None takes the model's own context length.
            cache_bytes: most memory for keys and values.
            record_routes: note the experts of each token in `Rollout.arrays["routes"]`
                [prompt + T - 1, layers, k], of all tokens that were fed in; UserError for a model without experts.
            version: policy version of the weights as they are.

        Raises UserError for a family that cannot be generated with.
        """
        check_generation(model)
        self._model = model
        self._encode, self._decode = encode, decode
        self._decode_prompt = decode_prompt or decode
        self._max_length = max_length or context_length(model)
        self._version = version
        self._batch = RunningBatch(
            model,
            decode=decode,
            stop_ids=stop_ids,
            max_sequences=max_sequences,
            cache_terms=cache_bytes // bytes_per_term(model),
            record_routes=record_routes,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: list[Callable[[], None]] = []
        self._waiters: set[asyncio.Future[Any]] = set()
        self._arrived = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        # Below: only the engine thread touches these.
        self._queue: deque[Request] = deque()
        self._promises: dict[Request, asyncio.Future[Any]] = {}
        self._closing = False
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch-engine")
        self._thread = self._executor.submit(self._run)
        self._thread.add_done_callback(self._stopped)

    @property
    def version(self) -> int:
        """Policy version the next term will be drawn with."""
        return self._version

    @property
    def stats(self) -> EngineStats:
        """Live counters; `stats.steps` grows while the engine makes progress."""
        return self._batch.stats

    @property
    def progress(self) -> int:
        """Forward passes so far, for heartbeats: it stands still when the engine hangs."""
        return self._batch.stats.steps

    def weights(self) -> dict[str, Tensor]:
        """The live tensors by checkpoint name. Written only by an `apply` given to `switch`."""
        return named_weights(self._model)

    async def generate(
        self, prompt: Prompt, *, num_samples: int, sampling: Sampling, seed: int
    ) -> tuple[str, list[Rollout]]:
        """Return the prompt as the model saw it and `num_samples` rollouts (see `interfaces.RolloutEngine`).

        `tokens` end with the stop token or with the token that completed a stop string; `text` ends before the
        stop string. Groups larger than fit at a time are cut into parts with a prefill each.
        """
        tokens = np.asarray(self._encode(prompt), dtype=np.int32)
        at_a_time = self._samples_at_a_time(prompt, tokens, sampling)
        requests = [
            Request(
                prompt_tokens=tokens,
                num_samples=min(at_a_time, num_samples - first),
                first_sample=first,
                sampling=sampling,
                seed=seed,
            )
            for first in range(0, num_samples, at_a_time)
        ]
        await asyncio.gather(*(self._ask(request) for request in requests))
        finished = [sequence for request in requests for sequence in request.sequences]
        return self._decode_prompt(tokens.tolist()), [s.rollout(self._text(s)) for s in finished]

    async def switch(self, version: int, apply: Callable[[], None]) -> None:
        """Run `apply` between two terms; running sequences go on with the new weights. Returns when done.

        An error in `apply` leaves the weights in doubt and therefore stops the engine.
        """
        promise = self._promise()
        self._post(partial(self._switch, version, apply, promise))
        await promise

    async def close(self) -> None:
        """Stop after the current term and join the thread. Requests still waiting get a RuntimeError."""
        with self._arrived:
            self._inbox.append(self._close)
            self._arrived.notify()
        await asyncio.to_thread(self._executor.shutdown)

    # The asyncio side.

    def _samples_at_a_time(self, prompt: Prompt, tokens: np.ndarray, sampling: Sampling) -> int:
        """How many samples of a prompt can run together. Raises PromptError if not even one."""
        where = prompt.origin or f"prompt {prompt.sample_id}"
        length, most = len(tokens), sampling.max_terms
        if length == 0:
            raise PromptError(f"{where}: the prompt has no tokens; check its column and the chat template")
        if self._max_length is not None and length + most > self._max_length:
            raise PromptError(
                f"{where}: the prompt has {length} tokens and with up to {most} new ones exceeds the context "
                f"of {self._max_length}; shorten it, lower rollout.sampling.max_tokens or raise model.max_length"
            )
        at_a_time = self._batch.samples_at_a_time(length + most)
        if at_a_time == 0:
            raise PromptError(
                f"{where}: {length} prompt tokens and up to {most} new ones do not fit into the cache; "
                "raise rollout.options.cache_bytes or lower rollout.sampling.max_tokens"
            )
        return at_a_time

    def _text(self, sequence: RunningSequence) -> str:
        text = self._decode(sequence.tokens)
        ends = [place for stop in sequence.request.sampling.stop if (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    async def _ask(self, request: Request) -> None:
        promise = self._promise()
        self._post(partial(self._enqueue, request, promise))
        try:
            await promise
        except asyncio.CancelledError:
            self._post(partial(self._drop, request))
            raise

    def _promise(self) -> asyncio.Future[None]:
        """A future that the engine thread resolves, or fails when it stops."""
        self._loop = asyncio.get_running_loop()  # before the check: `_stopped` must find it
        if self._thread.done():
            raise RuntimeError("the engine has stopped") from self._thread.exception()
        promise = self._loop.create_future()
        self._waiters.add(promise)
        promise.add_done_callback(self._waiters.discard)
        return promise

    def _post(self, command: Callable[[], None]) -> None:
        """Send a command at the end of this turn of the event loop, together with its other commands."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(command)

    def _flush(self) -> None:
        with self._arrived:
            self._inbox.extend(self._outbox)
            self._arrived.notify()
        self._outbox.clear()

    def _fail(self, error: BaseException | None) -> None:
        for promise in [promise for promise in self._waiters if not promise.done()]:
            stopped = RuntimeError("the engine has stopped")
            stopped.__cause__ = error
            promise.set_exception(stopped)

    # The engine thread.

    def _run(self) -> None:
        with torch.inference_mode():
            while self._take_commands():
                self._admit()
                if self._batch.sequences:
                    self._resolve(self._batch.step(version=self._version))

    def _take_commands(self) -> bool:
        """Carry out what was posted; wait for it when there is nothing else to do. False: stop."""
        with self._arrived:
            while not (self._inbox or self._queue or self._batch.sequences):
                self._arrived.wait()
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands:
            command()
        return not self._closing

    def _admit(self) -> None:
        """Start waiting requests in order, as long as the next one fits."""
        chosen: list[Request] = []
        prefill = 0
        while self._queue and self._batch.fits([*chosen, self._queue[0]]):
            prefill += len(self._queue[0].prompt_tokens)
            if chosen and prefill > PREFILL_TERMS:
                break
            chosen.append(self._queue.popleft())
        if chosen:
            self._resolve(self._batch.admit(chosen, version=self._version))

    def _resolve(self, finished: Sequence[Request]) -> None:
        for request in finished:
            _resolve(self._promises.pop(request))

    def _enqueue(self, request: Request, promise: asyncio.Future[None]) -> None:
        self._promises[request] = promise
        self._queue.append(request)

    def _drop(self, request: Request) -> None:
        if self._promises.pop(request, None) is None:
            return
        if request in self._queue:
            self._queue.remove(request)
        else:
            self._batch.drop(request)

    def _switch(self, version: int, apply: Callable[[], None], promise: asyncio.Future[None]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            apply()
        self._version = version
        _resolve(promise)

    def _close(self) -> None:
        self._closing = True

    def _stopped(self, thread: Future[None]) -> None:
        """Tell all waiters that the thread ended, by `close` or by an error."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail, thread.exception())


def _resolve(promise: asyncio.Future[None]) -> None:
    """From the engine thread."""
    promise.get_loop().call_soon_threadsafe(_set_done, promise)


def _set_done(promise: asyncio.Future[None]) -> None:
    if not promise.done():
        promise.set_result(None)

"""The batch of running sequences: prefill of new prompts, one decode step, removal.

admit   prompts packed in one row -> model -> keys and values to each sample's slot, first terms sampled
step    last term of each sequence [n, 1] -> model with the cache -> next terms sampled
both    record the sampled terms and remove finished sequences

On a GPU a pass sends its inputs in one copy from pinned memory, and waits once, for the sampled terms; rows with top-k
or top-p, and recorded routes, wait once more.

The order in which a matrix product sums depends on its number of rows. With `batch_invariant` no number depends on the
other sequences: a prompt is prefilled alone, and a decode step has always `max_sequences` rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cosmos_rl_core.parallel.device import to_device
from cosmos_rl_core.rollout.engine_thread import EngineRequest
from cosmos_rl_core.rollout.kv_cache import cache_argument
from cosmos_rl_core.types import FinishReason, Rollout, Sampling
from cosmos_rl_llm.config import LLMTorchOptions
from cosmos_rl_llm.engines.prompts import Response, StopStrings
from cosmos_rl_llm.engines.torch.cache import (
    ContinuedLayout,
    DecodeLayout,
    KeptTerms,
    SlotCache,
    bytes_per_term,
    span_unit,
)
from cosmos_rl_llm.engines.torch.sampling import Sampler, penalise, uniforms
from cosmos_rl_llm.media.item import EMPTY_VIEW, View, VisionFamily, positions_of
from cosmos_rl_llm.model.output_head import OutputHead
from cosmos_rl_llm.model.rope import SequenceRope
from cosmos_rl_llm.model.tower import media_to_device
from cosmos_rl_llm.policy.packing import PackedLayout, SequenceLayout, install_attention
from cosmos_rl_llm.policy.routing import RouteRecorder


@dataclass(eq=False, slots=True, kw_only=True)
class GenerationRequest(EngineRequest):
    """Samples of one prompt that start together and share one prefill."""

    prompt_tokens: np.ndarray
    """[prompt] int32."""
    num_samples: int
    first_sample: int
    """Number of the first sample within the caller's group: part of the random counter."""
    sampling: Sampling
    seed: int
    view: View = EMPTY_VIEW
    """Pictures and videos of the prompt."""
    stops: StopStrings | None = None
    keeps: bool = False
    """Whether keys and values are kept for a continuation. For one sample alone."""
    kept: KeptTerms | None = None
    """Those of the prompt's first tokens, from an earlier request; at the end those of this one, if it keeps them."""
    sequences: list[RunningSequence] = field(default_factory=list)
    """Its sequences in order of sample number, once admitted."""

    @property
    def num_kept(self) -> int:
        """Tokens of the prompt whose keys and values are known."""
        return 0 if self.kept is None else self.kept.length

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
        self.sequences = [
            RunningSequence(
                request=self, sample=number, prompt_tokens=self.prompt_tokens, view=self.view, stops=self.stops
            )
            for number in numbers
        ]
        return self.sequences


@dataclass(eq=False, slots=True, kw_only=True)
class RunningSequence(Response):
    """One sample of a request."""

    request: GenerationRequest
    sample: int
    routes: list[np.ndarray] = field(default_factory=list)
    """Recorded experts: [tokens, layers, k] of the prompt, then of each input token."""

    def rollout(self) -> Rollout:
        """The finished sample as a `Rollout`."""
        return self.as_rollout({"routes": np.concatenate(self.routes)} if self.routes else {})


class RunningBatch:
    """Owns the model's cache. One thread calls its methods; weights may change between calls."""

    def __init__(
        self,
        model: PreTrainedModel,
        options: LLMTorchOptions,
        *,
        stop_ids: Collection[int] = (),
        vision: VisionFamily | None = None,
    ) -> None:
        install_attention(model)
        self._rope = SequenceRope(model)
        model.eval().requires_grad_(False)
        self.passes = 0
        """Forward passes so far, prefill and decode: grows while the engine works."""
        self.sequences: list[RunningSequence] = []
        self._model, self._vision = model, vision
        self._head = OutputHead.of(model).without(() if vision is None else tuple(vision.token_ids.values()))
        self._stop_ids = frozenset(stop_ids)
        max_sequences = self._max_sequences = options.max_sequences
        self._cache_terms = options.cache_bytes // bytes_per_term(model)
        self._min_rows = max_sequences if options.batch_invariant else 1
        self._span_unit = span_unit(model)
        self._cache_argument = cache_argument(model.base_model)
        self._cache = SlotCache(model.config.get_text_config().num_hidden_layers, limit=self._cache_terms)
        self._recorder = RouteRecorder(model) if options.record_routes else None
        self._sampler: Sampler | None = None
        # One entry per row: token and place of the last term, its position minus the place, and the random counter.
        self._token = np.zeros(max_sequences, dtype=np.int64)
        self._place = np.zeros(max_sequences, dtype=np.int64)
        self._shift = np.zeros(max_sequences, dtype=np.int64)
        self._seed = np.zeros(max_sequences, dtype=np.uint64)
        self._sample = np.zeros(max_sequences, dtype=np.int64)
        self._term = np.zeros(max_sequences, dtype=np.int64)

    def samples_at_a_time(self, num_terms: int) -> int:
        """Maximum number of concurrent sequences of `num_terms`, prompt included; 0 if none fits."""
        room = self._cache_terms // self._whole_spans(num_terms)
        return min(room, self._max_sequences) if room >= self._min_rows else 0

    def fits(self, requests: Sequence[GenerationRequest]) -> bool:
        """Whether `requests` fit next to the running sequences."""
        running = [*requests, *(sequence.request for sequence in self.sequences)]
        rows = len(self.sequences) + sum(request.num_samples for request in requests)
        return rows <= self.samples_at_a_time(max(request.num_terms for request in running))

    def admit(self, requests: Sequence[GenerationRequest], *, version: int) -> list[GenerationRequest]:
        """Prefill the prompts in one pass, sample each sequence's first term, and return finished requests.

        Of prompts whose first tokens are known only the others are computed: either all requests have such, or none.
        Equal prompts are computed once, such as the first of all episodes of a group.
        """
        first = len(self.sequences)
        for request in requests:
            self._add(request)
        self._cache.reserve(
            slots=max(len(self.sequences), self._min_rows),
            capacity=self._whole_spans(max(sequence.request.num_terms for sequence in self.sequences)),
        )
        prompts, prompt_of = _distinct(requests)
        lengths = [len(request.prompt_tokens) - request.num_kept for request in prompts]
        continues = requests[0].kept is not None
        begin = self._cache.begin_continuation if continues else self._cache.begin_prefill
        begin(*self._sent(*_cache_rows(requests, prompt_of, lengths, first)))
        hidden = self._continue(requests, lengths, first) if continues else self._prefill(prompts, lengths)
        new = slice(first, len(self.sequences))
        owner = np.array(prompt_of).repeat([request.num_samples for request in requests])
        readers = [[self.sequences[first + place] for place in np.flatnonzero(owner == n)] for n in range(len(prompts))]
        self._note_routes(lengths, readers)
        last, each, uniform = self._sent(np.cumsum(lengths) - 1, owner, self._uniform(new))
        logits = self._head.logits(hidden[0].index_select(0, last)).index_select(0, each)
        return self._sample_terms(logits, uniform, new, version)

    def step(self, *, version: int) -> list[GenerationRequest]:
        """Sample one term for every running sequence and return finished requests."""
        count = len(self.sequences)
        self._place[count : self._min_rows] = 0  # padding rows write into unused slots
        rows = slice(0, max(count, self._min_rows))
        token, place, position, uniform = self._sent(
            self._token[rows], self._place[rows], self._place[rows] + self._shift[rows], self._uniform(slice(0, count))
        )
        span = self._whole_spans(int(self._place[rows].max()) + 1)
        self._cache.begin_decode(place, span=span)
        layout, lengths = DecodeLayout(place=place, span=span), self._place[rows] + 1
        hidden = self._forward(token[:, None], position[:, None], layout, lengths=lengths[:, None])
        self._note_routes([1] * count, [[sequence] for sequence in self.sequences])
        return self._sample_terms(self._head.logits(hidden[:, 0])[:count], uniform, slice(0, count), version)

    def drop(self, request: GenerationRequest) -> None:
        """Remove the sequences of a request."""
        for sequence in request.sequences:
            sequence.finish_reason = sequence.finish_reason or "cancelled"
        self._compact()

    def free(self) -> None:
        """Drop all sequences, whose requests were cancelled, and free the keys and values."""
        for request in dict.fromkeys(sequence.request for sequence in self.sequences):
            self.drop(request)
        self._cache.free()

    def _whole_spans(self, num_terms: int) -> int:
        return -(-num_terms // self._span_unit) * self._span_unit

    def _add(self, request: GenerationRequest) -> None:
        for sequence in request.start():
            row = len(self.sequences)
            self.sequences.append(sequence)
            self._place[row] = len(request.prompt_tokens) - 1
            self._shift[row] = request.view.shift(len(request.prompt_tokens))
            self._seed[row] = request.seed & 0xFFFF_FFFF_FFFF_FFFF
            self._sample[row] = sequence.sample
            self._term[row] = 0
        self._sampler = None

    def _continue(self, requests: Sequence[GenerationRequest], lengths: Sequence[int], slot: int) -> Tensor:
        """Last hidden states [1, L, hidden] of the requests' tokens whose keys and values are not known."""
        kept = [request.kept for request in requests if request.kept is not None]
        for number, terms in enumerate(kept):
            self._cache.put(slot + number, terms)
        layout = ContinuedLayout(
            slots=tuple(range(slot, slot + len(kept))),
            starts=tuple(terms.length for terms in kept),
            lengths=tuple(lengths),
        )
        totals = [len(request.prompt_tokens) for request in requests]
        tokens, positions = self._sent(*_unknown_tokens(requests))
        return self._forward(tokens, positions, layout, lengths=np.repeat(totals, lengths)[None])

    def _prefill(self, requests: Sequence[GenerationRequest], lengths: Sequence[int]) -> Tensor:
        """Last hidden states [1, L, hidden] of the requests' prompts."""
        tokens = np.concatenate([request.prompt_tokens for request in requests])
        views = [request.view for request in requests]
        items = [item for view in views for item in view.items]
        two_way = bool(items) and self._vision is not None and self._vision.two_way
        shown = np.concatenate([view.index_of(size) for view, size in zip(views, lengths)]) if two_way else None
        row = (
            torch.from_numpy(tokens.astype(np.int64))[None],
            torch.from_numpy(positions_of(views, lengths))[..., None, :],
            PackedLayout.of(lengths, padding=False, shown=shown),
        )
        tokens, positions, layout = to_device(row, self._model.device)
        media = self._vision.inputs(items) if items and self._vision is not None else {}
        media = media_to_device(media, self._model.device)
        return self._forward(tokens, positions, layout, media, lengths=np.repeat(lengths, lengths)[None])

    def _sent(self, *arrays: np.ndarray) -> tuple[Tensor, ...]:
        """Copies of arrays on the model's device, in one transfer."""
        return to_device(tuple(torch.from_numpy(array) for array in arrays), self._model.device)

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: SequenceLayout,
        media: Mapping[str, Tensor] | None = None,
        *,
        lengths: np.ndarray,
    ) -> Tensor:
        """tokens [B, Q], positions [B, Q] or [3, B, Q] -> last hidden states [B, Q, hidden].

        lengths: [B, Q]: of each token's sequence.
        """
        self.passes += 1
        with self._rope.of(self._rope.lengths(lengths)):
            output = self._model.base_model(
                input_ids=tokens,
                position_ids=positions,
                use_cache=True,
                layout=layout,
                **{self._cache_argument: self._cache},
                **(media or {}),
            )
        return output.last_hidden_state

    def _note_routes(self, lengths: Sequence[int], owners: Sequence[Sequence[RunningSequence]]) -> None:
        """Record the experts of the last pass: those of `lengths[i]` tokens for each sequence of `owners[i]`."""
        if self._recorder is None:
            return
        routes = self._recorder.take().cpu().numpy()
        ends = np.cumsum(lengths)
        for start, end, sequences in zip(ends - lengths, ends, owners, strict=True):
            for sequence in sequences:
                sequence.routes.append(routes[start:end])

    def _uniform(self, rows: slice) -> np.ndarray:
        """float64 in (0, 1) [n]: the random numbers of the next terms."""
        return uniforms(self._seed[rows], self._sample[rows], self._term[rows])

    def _sample_terms(self, logits: Tensor, uniform: Tensor, rows: slice, version: int) -> list[GenerationRequest]:
        """Sample from logits [n, V] of `rows`, record, remove finished sequences, return finished requests."""
        sampler = self._sampler_of(rows, vocab_size=logits.shape[1])
        for sequence, own in zip(self.sequences[rows], logits):
            if (penalty := sequence.request.sampling.repetition_penalty) != 1:
                penalise(own, [*sequence.request.prompt_tokens.tolist(), *sequence.tokens], penalty)
        sampled = torch.stack([each.double() for each in sampler.sample(logits, uniform)])  # exact for both types
        tokens, logprobs = sampled.cpu().numpy()
        self._token[rows] = tokens
        self._place[rows] += 1
        self._term[rows] += 1
        numbered = enumerate(self.sequences[rows], start=rows.start)
        for (row, sequence), token, logprob in zip(numbered, self._token[rows].tolist(), logprobs.tolist()):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(version)
            sequence.finish_reason = self._finish_reason(sequence, token)
            if sequence.finish_reason is not None and sequence.request.keeps:
                # The last term was not an input yet: its keys and values come with the continuation.
                sequence.request.kept = self._cache.take(row, length=int(self._place[row]))
        ended = dict.fromkeys(s.request for s in self.sequences[rows] if s.finish_reason is not None)
        self._compact()
        return [request for request in ended if request.finished]

    def _sampler_of(self, rows: slice, *, vocab_size: int) -> Sampler:
        everything = rows.start == 0
        if everything and self._sampler is not None:
            return self._sampler
        sampling = [sequence.request.sampling for sequence in self.sequences[rows]]
        sampler = Sampler.of(sampling, vocab_size=vocab_size, device=self._model.device)
        if everything:
            self._sampler = sampler
        return sampler

    def _finish_reason(self, sequence: RunningSequence, token: int) -> FinishReason | None:
        if token in self._stop_ids or (sequence.stops is not None and sequence.stops.end(sequence.tokens)):
            return "stop"
        return "length" if len(sequence.tokens) >= sequence.request.sampling.max_terms else None

    def _compact(self) -> None:
        """Move the last sequences into the rows of finished ones."""
        for row in reversed(range(len(self.sequences))):
            if self.sequences[row].finish_reason is None:
                continue
            last = len(self.sequences) - 1
            if row != last:
                self.sequences[row] = self.sequences[last]
                self._cache.move(source=last, target=row)
                for column in (self._token, self._place, self._shift, self._seed, self._sample, self._term):
                    column[row] = column[last]
            self.sequences.pop()
            self._sampler = None


def _unknown_tokens(requests: Sequence[GenerationRequest]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [1, L] and positions [1, L] or [3, 1, L] of prompts without the tokens whose keys and values are known."""
    totals = [len(request.prompt_tokens) for request in requests]
    new = np.concatenate([np.arange(total) >= request.num_kept for total, request in zip(totals, requests)])
    tokens = np.concatenate([request.prompt_tokens for request in requests])[new].astype(np.int64)
    positions = positions_of([request.view for request in requests], totals)[..., new]
    return tokens[None], positions[..., None, :]


def _distinct(requests: Sequence[GenerationRequest]) -> tuple[list[GenerationRequest], list[int]]:
    """Return a request for each distinct prompt of text, and the number of that for each request.

    Those whose first tokens are known are all distinct: each has keys and values of its own.
    """
    numbers: dict[object, int] = {}
    prompts: list[GenerationRequest] = []
    prompt_of = []
    for request in requests:
        own = request.kept is not None or bool(request.view.items)
        key = id(request) if own else request.prompt_tokens.tobytes()
        if key not in numbers:
            numbers[key] = len(prompts)
            prompts.append(request)
        prompt_of.append(numbers[key])
    return prompts, prompt_of


def _cache_rows(
    requests: Sequence[GenerationRequest], prompt_of: Sequence[int], lengths: Sequence[int], slot: int
) -> tuple[np.ndarray, ...]:
    """Return where the packed rows of prompts go in the cache: rows, slots and places [m] of all samples.

    prompt_of: number of each request's prompt. lengths: of the packed prompts. slot: of the first sample.
    """
    columns = source, slots, places = [], [], []
    starts = np.cumsum(lengths) - lengths
    for request, number in zip(requests, prompt_of):
        start, length = starts[number], lengths[number]
        source.append(np.tile(np.arange(start, start + length), request.num_samples))
        slots.append(np.repeat(np.arange(slot, slot + request.num_samples), length))
        places.append(np.tile(np.arange(length) + request.num_kept, request.num_samples))
        slot += request.num_samples
    return tuple(np.concatenate(column) for column in columns)

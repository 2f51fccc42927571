"""Rollouts, or rows with target responses, to packed microbatches: sequences concatenated in one row, without padding.

    rollouts     |prompt a|response a|  |prompt b|response b|
    tokens [L]    p p p p r r r          p p r r r r             microbatch 0
    positions     0 1 2 3 4 5 6          0 1 2 3 4 5
    logit_index         3 4 5              8 9 . .               the hidden state before each response token
    labels [T]          r r r              r r r r

Terms that are not trained on, such as what an environment said, are read by the model and no terms of the microbatch:
their logits are never computed. A rollout whose history was rewritten has several sequences, its branches, which count
as one rollout.

A microbatch holds whole rollouts, up to `microbatch_terms` tokens including prompts; a longer rollout is a
microbatch of its own. `balance.deal` assigns them to ranks, identically on every rank.

In supervised training the terms of a row are:

    {"prompt", "response"}   the response and the end of its turn are learnt
    {"messages"}             every turn of the assistant is learnt
    {"prompt", PAIR}         two rollouts beside each other in one microbatch, with one prompt
    {"prompt", "response", LABEL}    the response is a rollout, chosen or rejected
    {"prompt", "response", STEPS}    the last token of each step is a term, whose advantage is the label
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from cosmos_rl_core.errors import PromptError, SampleError, UserError
from cosmos_rl_core.train.balance import deal, time_of
from cosmos_rl_core.types import Microbatch, Prompt, Rollout, RolloutGroup, Share, TermBatch, TrainBatch
from cosmos_rl_llm.config import ROUTES
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.data.items import read_items
from cosmos_rl_llm.data.reading import side_by_side
from cosmos_rl_llm.data.spans import LABEL, MARGIN, PAIR, STEPS
from cosmos_rl_llm.media.item import EMPTY_VIEW, MediaItem, View, positions_of
from cosmos_rl_llm.media.packed import batch_kinds, pack_items
from cosmos_rl_llm.media.source import parts_of
from cosmos_rl_llm.policy.truncation import SUPERVISED


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One prompt with its response, ready to be packed."""

    prompt_tokens: np.ndarray
    """[prompt] int32, at least one: the first response token is predicted from the last of these."""
    tokens: np.ndarray
    """[T] int32."""
    logprobs: np.ndarray
    """[T] float32: under the engine that sampled them; zeros in supervised training."""
    loss_mask: np.ndarray
    """[T] bool."""
    advantage: float | np.ndarray
    """Of all terms, or [T] float32."""
    routes: np.ndarray | None = None
    """[prompt + T - 1, layers, k]: experts chosen by the rollout's router, if they are replayed."""
    view: View = EMPTY_VIEW
    """Pictures and videos among the tokens."""
    pixels: Callable[[], Sequence[MediaItem]] | None = None
    """Returns those of the row with their pixels, where the view has none. Raises UserError."""
    others: tuple[TrainSequence, ...] = ()
    """Further branches of the same rollout, or the rejected answer of a pair."""
    preference: float = 0.0
    """1 for a chosen answer, -1 for a rejected one, else 0."""
    key: int = 0
    """As in `TermBatch.rollout_keys`."""
    margin: float = 0.0
    """Of a pair's answers."""

    @property
    def length(self) -> int:
        """Input tokens: nothing is predicted from the last token."""
        return len(self.prompt_tokens) + len(self.tokens) - 1

    @property
    def branches(self) -> tuple[TrainSequence, ...]:
        return (self, *self.others)

    @property
    def rollouts(self) -> tuple[TrainSequence, ...]:
        """Itself with its branches, or both answers of a pair."""
        return self.branches if self.preference else (self,)

    @property
    def terms(self) -> np.ndarray:
        """Indices of the tokens that are trained on; all of them if none is, so that a pass has a gradient."""
        return np.flatnonzero(self.loss_mask) if self.loss_mask.any() else np.arange(len(self.tokens))


EMPTY = TrainSequence(
    prompt_tokens=np.zeros(1, np.int32),
    tokens=np.zeros(1, np.int32),
    logprobs=np.zeros(1, np.float32),
    loss_mask=np.zeros(1, bool),
    advantage=0.0,
)
"""Padding microbatch of a rank without further sequences while others have some: one pass that trains nothing."""


def collate(groups: Sequence[RolloutGroup], *, microbatch_terms: int, share: Share) -> TrainBatch:
    """Pack the rollouts of groups that have advantages; return the microbatches of `share`.

    A rollout without trained terms is counted in the metrics and left out of the microbatches: it
    would take a forward pass and add nothing to the loss.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    trained = [(place, r) for place, group in enumerate(groups) for r in group.rollouts if r.loss_mask.any()]
    lengths = np.array([r.loss_mask.sum() if r.exchanges else r.num_terms for r in rollouts] or [0])
    metrics = {
        "response_length_mean": float(lengths.mean()),
        "response_length_max": float(lengths.max()),
    }
    return pack_batch(
        [_from_rollout(rollout) for _, rollout in trained],
        groups=[place for place, _ in trained],
        microbatch_terms=microbatch_terms,
        share=share,
        metrics=metrics,
    )


def _from_rollout(rollout: Rollout) -> TrainSequence:
    """The branches of a rollout that have trained terms."""
    arrays, start = rollout.arrays, 0
    sequences: list[TrainSequence] = []
    for place, (prompt_tokens, num_terms) in enumerate(_branches(arrays)):
        part = slice(start, start + num_terms)
        start = part.stop
        sequence = TrainSequence(
            prompt_tokens=prompt_tokens,
            tokens=arrays["tokens"][part],
            logprobs=rollout.rollout_logprobs[part],
            loss_mask=rollout.loss_mask[part],
            advantage=rollout.term_advantages[part],
            routes=arrays.get("routes"),
            view=View.of_arrays(arrays) if place == 0 else EMPTY_VIEW,
        )
        assert len(sequence.prompt_tokens), "a rollout without a prompt token"
        assert len(sequence.tokens) == len(sequence.logprobs) == len(sequence.loss_mask), "terms out of step"
        if sequence.loss_mask.any():
            sequences.append(sequence)
    assert start == len(arrays["tokens"]), "branches out of step"
    return replace(sequences[0], others=tuple(sequences[1:]))


def _branches(arrays: Mapping[str, np.ndarray]) -> list[tuple[np.ndarray, int]]:
    """Of each branch its prompt and the number of terms after it."""
    if "branch_lengths" not in arrays:
        return [(arrays["prompt_tokens"], len(arrays["tokens"]))]
    lengths = arrays["branch_lengths"]
    prompts = np.split(arrays["branch_prompts"], np.cumsum(lengths[1:, 0])[:-1]) if len(lengths) > 1 else []
    return list(zip([arrays["prompt_tokens"], *prompts], lengths[:, 1].tolist(), strict=True))


def pack_batch(
    sequences: Sequence[TrainSequence],
    *,
    groups: Sequence[int] | None = None,
    microbatch_terms: int,
    share: Share,
    metrics: Mapping[str, float],
) -> TrainBatch:
    """Pack the part of `share`; counts and metrics are of the whole batch.

    Adds `packing_fraction`: tokens over the capacity of all microbatches, of all ranks.
    """
    lengths = [sum(branch.length for branch in sequence.branches) for sequence in sequences]
    costs = _costs(sequences, groups)
    dealt = deal(lengths, capacity=microbatch_terms, share=share, costs=costs, groups=groups)
    room = len(dealt) * share.count * microbatch_terms
    _check_routes(sequences)
    routes = sequences[0].routes if sequences else None
    empty = replace(EMPTY, routes=None if routes is None else np.zeros_like(routes[:1]))
    kinds = batch_kinds([item for sequence in sequences for branch in sequence.branches for item in branch.view.items])
    weights = _preference_weights(sequences)
    own = {index: sequences[index] for members in dealt for index in members}
    if any(sample.pixels is not None for sample in own.values()):
        own = dict(zip(own, side_by_side(_with_pixels, list(own.values())), strict=True))
    packed = (_pack([own[index] for index in members] or [empty], weights) for members in dealt)
    return TrainBatch(
        microbatches=tuple(replace(each, inputs={**each.inputs, **kinds}) for each in packed),
        num_terms=sum(int(branch.loss_mask.sum()) for sequence in sequences for branch in sequence.branches),
        num_rollouts=sum(bool(rollout.loss_mask.any()) for sequence in sequences for rollout in sequence.rollouts),
        metrics={**metrics, "packing_fraction": sum(lengths) / room if room else 1.0},
    )


def _check_routes(sequences: Sequence[TrainSequence]) -> None:
    """Raise UserError unless all sequences have routes, of the same layers and experts a token, or none has.

    A rollout that chose other experts than the rest of its batch replays would look like one of another policy.
    """
    branches = [branch for sequence in sequences for branch in sequence.branches]
    shapes = {None if branch.routes is None else (branch.routes.ndim, *branch.routes.shape[1:]) for branch in branches}
    if len(shapes) > 1:
        given = ", ".join(sorted("no experts" if shape is None else f"{list(shape[1:])}" for shape in shapes))
        raise UserError(f"{ROUTES}: rollouts of a step have experts [layers, k] of different shapes: {given}")
    for branch in branches:
        if branch.routes is not None and (branch.routes.ndim != 3 or len(branch.routes) != branch.length):
            given, wanted = list(branch.routes.shape), branch.length
            raise UserError(f"{ROUTES}: a rollout has experts {given} for {wanted} tokens, not [{wanted}, layers, k]")


def _costs(sequences: Sequence[TrainSequence], groups: Sequence[int] | None) -> list[float] | None:
    """The time of each sequence with the tower's, for which a token that shows a picture counts once more.

    Towers differ: by parameters and patches a token, that of Qwen2.5-VL costs 0.9 of the decoder for it at 3B, and 0.4
    at 7B. It runs once for a group's rollouts beside each other. None without pictures.
    """
    shown = [0 if s.view.index is None else int((s.view.index >= 0).sum()) for s in sequences]
    if not any(shown):
        return None
    members = Counter(range(len(sequences)) if groups is None else groups)
    shares = [1 / members[index if groups is None else groups[index]] for index in range(len(sequences))]
    times = [sum(time_of(branch.length) for branch in sequence.branches) for sequence in sequences]
    return [time + tokens * part for time, tokens, part in zip(times, shown, shares, strict=True)]


def _with_pixels(sample: TrainSequence) -> TrainSequence:
    if sample.pixels is None:
        return sample
    items = sample.pixels()

    def shown(sequence: TrainSequence) -> TrainSequence:
        return replace(sequence, view=replace(sequence.view, items=tuple(items[: len(sequence.view.items)])))

    return replace(shown(sample), others=tuple(map(shown, sample.others)))


def _preference_weights(sequences: Sequence[TrainSequence]) -> Mapping[float, float]:
    """The value of `TermBatch.preference` by `TrainSequence.preference`; empty without preferences."""
    counts = Counter(rollout.preference for sequence in sequences for rollout in sequence.rollouts)
    if counts.keys() <= {0.0}:
        return {}
    return {0.0: 0.0} | {sign: sign * counts.total() / count for sign, count in counts.items()}


def _pack(samples: Sequence[TrainSequence], weights: Mapping[float, float]) -> Microbatch:
    sequences = [branch for sample in samples for branch in sample.branches]
    rollouts = [rollout for sample in samples for rollout in sample.rollouts]
    # The answers of a pair are rollouts of one branch, although they are branches of one sample.
    widths = [1 if rollout.preference else len(rollout.branches) for rollout in rollouts]
    owners = np.repeat(np.arange(len(rollouts)), widths)
    lengths = np.array([sequence.length for sequence in sequences])
    terms = [sequence.terms for sequence in sequences]
    # The hidden state at i predicts token i + 1: those for a response start at the prompt's last token.
    starts = np.cumsum(lengths) - [len(sequence.tokens) for sequence in sequences]

    def of_terms(values: Callable[[TrainSequence], np.ndarray]) -> np.ndarray:
        return np.concatenate([values(sequence)[kept] for sequence, kept in zip(sequences, terms, strict=True)])

    inputs = {
        "tokens": np.concatenate([part for s in sequences for part in (s.prompt_tokens, s.tokens[:-1])]),
        "positions": positions_of([s.view for s in sequences], lengths.tolist()),
        "sequence_index": np.repeat(np.arange(len(sequences)), lengths),
        "logit_index": np.concatenate([start + kept for start, kept in zip(starts, terms, strict=True)]),
        "labels": of_terms(lambda sequence: sequence.tokens),
    }
    routes = [sequence.routes for sequence in sequences if sequence.routes is not None]
    if routes:
        inputs["routes"] = np.concatenate(routes)
    items = pack_items([s.view.items for s in sequences], [s.view.index_of(s.length) for s in sequences])
    return Microbatch(
        inputs={**{name: _tensor(values, torch.int64) for name, values in inputs.items()}, **items},
        terms=TermBatch(
            rollout_logprobs=_tensor(of_terms(lambda s: s.logprobs), torch.float32),
            advantages=_tensor(of_terms(lambda s: np.broadcast_to(s.advantage, s.tokens.shape)), torch.float32),
            loss_mask=_tensor(of_terms(lambda s: s.loss_mask), torch.float32),
            rollout_index=_tensor(np.repeat(owners, [len(kept) for kept in terms]), torch.int64),
            num_rollouts=len(rollouts),
            preference=_tensor(np.array([weights[each.preference] for each in rollouts]), torch.float32)
            if weights
            else None,
            rollout_keys=_tensor(np.array([each.key for each in rollouts]), torch.int64) if weights else None,
            margins=_tensor(np.array([each.margin for each in rollouts]), torch.float32) if weights else None,
        ),
    )


def _tensor(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A copy as a tensor: arrays received over the network may be read-only."""
    return torch.tensor(values, dtype=dtype)


def collate_sft(prompts: Sequence[Prompt], *, chat: Chat, microbatch_terms: int, share: Share) -> TrainBatch:
    """Pack rows with target responses; return the microbatches of `share`. All ranks of a replica call this together.

    A row that cannot be learnt is dropped: its pictures cannot be read or make it too long, the chat template rejects
    it, nothing in it is an answer. `chat.overlong` determines the treatment of other rows above `chat.max_length`
    tokens; a row that would be cut before its first answer is dropped, and so is a pair of which one answer is.

    Raises:
        UserError: no row has answers, one is too long where that is an error, or most cannot be learnt (`Faults`).
    """
    chat.faults.want(len(prompts))
    readable: list[tuple[Prompt, TrainSequence]] = []
    for prompt, read in zip(prompts, read_items(prompts, chat), strict=True):
        try:
            if read.unreadable:
                raise SampleError(read.unreadable)
            sample = _encode(prompt, chat=chat, items=read.items)
            readable.append((prompt, replace(sample, pixels=read.pixels)))
        except SampleError as error:
            chat.faults.add(prompt.origin or prompt.sample_id, error.reason)
    samples: list[TrainSequence] = []
    kept: list[Prompt] = []
    too_long: list[str] = []
    num_cut = 0
    for prompt, sequence in readable:
        fitted = _fit(sequence, prompt.row, chat=chat)
        if fitted is None:
            length = max(len(each.prompt_tokens) + len(each.tokens) for each in sequence.branches)
            reason = f"a row of {length} tokens, more than {chat.max_length}; it begins {_beginning(prompt.row)}"
            if chat.overlong == "error":
                chat.faults.add(prompt.origin or prompt.sample_id, f"{prompt.origin or 'a row'}: {reason}")
            else:
                too_long.append(reason)
        else:
            samples.append(fitted)
            kept.append(prompt)
            num_cut += fitted is not sequence
    lengths = np.array([int(each.loss_mask.sum()) for sample in samples for each in sample.branches] or [0])
    metrics = {"response_length_mean": float(lengths.mean()), "response_length_max": float(lengths.max())}
    if chat.overlong != "error":
        metrics["rows_truncated"] = float(num_cut)
    metrics["rows_dropped"] = float(len(prompts) - len(samples))
    batch = pack_batch(samples, microbatch_terms=microbatch_terms, share=share, metrics=metrics)
    mismatched: tuple[Microbatch, ...] = ()
    if others := _mismatched(kept, samples, chat=chat):
        mismatched = _supervised(pack_batch(others, microbatch_terms=microbatch_terms, share=share, metrics={}))
    dropped = (*chat.faults.take_new(), *too_long)
    return replace(batch, microbatches=_supervised(batch), mismatched=mismatched, rows_dropped=dropped)


def _supervised(batch: TrainBatch) -> tuple[Microbatch, ...]:
    of_rows = {SUPERVISED: torch.ones(1, dtype=torch.int64)}
    return tuple(replace(each, inputs={**each.inputs, **of_rows}) for each in batch.microbatches)


def _encode(prompt: Prompt, *, chat: Chat, items: Sequence[MediaItem] | None) -> TrainSequence:
    """A row as `encode_row` returns it; of a pair the chosen answer, with the rejected one among its `others`."""
    row, where = prompt.row, prompt.origin
    if PAIR not in row:
        sample = encode_row(row, chat=chat, items=items, where=where)
        return _judged(sample, good=row[LABEL], where=where) if LABEL in row else sample
    plain = {name: value for name, value in row.items() if name not in (PAIR, MARGIN)}
    chosen, rejected = (
        _judged(encode_row({**plain, "response": answer}, chat=chat, items=items, where=where), good=good, where=where)
        for answer, good in zip(row[PAIR], (True, False), strict=True)
    )
    margin = row.get(MARGIN, 0.0)
    return replace(chosen, others=(replace(rejected, margin=margin),), margin=margin)


def _judged(sample: TrainSequence, *, good: bool, where: str) -> TrainSequence:
    parts = (where.encode(), *(each.tobytes() for each in (sample.prompt_tokens, sample.tokens, sample.loss_mask)))
    digest = hashlib.blake2b(b"\0".join(parts), digest_size=8).digest()
    return replace(sample, preference=1.0 if good else -1.0, key=int.from_bytes(digest, "big", signed=True))


def _mismatched(prompts: Sequence[Prompt], samples: Sequence[TrainSequence], *, chat: Chat) -> list[TrainSequence]:
    """Each judged row's prompt with the response of the row before it; the first one's with that of the last."""
    others = []
    for place, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        if LABEL in prompt.row and len(prompts) > 1:
            row = {**prompt.row, "response": prompts[place - 1].row["response"]}
            other = encode_row(row, chat=chat, items=sample.view.items, where=prompt.origin)
            limit = chat.max_length or other.length + 1
            others.append(replace(_cut(other, limit - len(other.prompt_tokens)), pixels=sample.pixels))
    return others


def encode_row(
    row: Mapping[str, Any], *, chat: Chat, items: Sequence[MediaItem] | None = None, where: str = ""
) -> TrainSequence:
    """Return a row as prompt and response; the mask excludes other roles' messages between the assistant's turns.

    items: the row's pictures and videos; None: they are read.

    Raises SampleError for a row that cannot be learnt, and UserError if rows have no target responses at all.
    """
    if "response" not in row and "messages" not in row:
        raise UserError(
            "supervised training needs target responses: name their column in data.response_column, or that of whole "
            "chats in data.messages_column"
        )
    if STEPS in row:
        return _encode_steps(row, chat=chat, where=where)
    encoded = chat.encode_answers(row, items=items, where=where)
    tokens, mask = encoded.tokens, encoded.learnt
    if chat.scores:  # the hidden state at the last token is that of one term, whose token is not read
        tokens, mask = np.append(tokens, tokens[-1:]), np.arange(len(tokens) + 1) == len(tokens)
    learnt = np.flatnonzero(mask[1:]) + 1  # the first token is predicted from nothing
    if not len(learnt):
        raise PromptError(f"{where or 'a row'}: there is no assistant token to learn; it begins {_beginning(row)}")
    first, end = learnt[0], learnt[-1] + 1
    return TrainSequence(
        prompt_tokens=tokens[:first],
        tokens=tokens[first:end],
        logprobs=np.zeros(end - first, dtype=np.float32),
        loss_mask=mask[first:end],
        advantage=1.0,
        view=encoded.view.first(end - 1),
    )


def _encode_steps(row: Mapping[str, Any], *, chat: Chat, where: str) -> TrainSequence:
    """The hidden state at the end of a step is that of one term, whose token is not read."""
    tokens, ends = chat.encode_steps(row, where=where)
    tokens = np.append(tokens, tokens[-1:])
    first, places = ends[0] + 1, ends - ends[0]
    labels = np.zeros(len(tokens) - first, np.float32)
    labels[places] = [1.0 if is_right else -1.0 for _, is_right in row[STEPS]]
    return TrainSequence(
        prompt_tokens=tokens[:first],
        tokens=tokens[first:],
        logprobs=np.zeros(len(labels), np.float32),
        loss_mask=labels != 0,
        advantage=labels,
    )


def _fit(sample: TrainSequence, row: Mapping[str, Any], *, chat: Chat) -> TrainSequence | None:
    """The sample cut to the context; None if it is dropped."""
    length = max(len(branch.prompt_tokens) + len(branch.tokens) for branch in sample.branches)
    if chat.max_length is None or length <= chat.max_length:
        return sample
    if chat.overlong == "error" and sample.view.items:
        return None  # no check before the start knows the tokens of pictures
    if chat.overlong == "error":
        raise UserError(
            f"a row of {length} tokens is longer than the context of {chat.max_length}: raise model.max_length, remove "
            f'the row that begins {_beginning(row)}, or set data.overlong to "truncate" or "drop"'
        )
    room = chat.max_length - len(sample.prompt_tokens)
    if chat.overlong == "drop" or not all(branch.loss_mask[: max(0, room)].any() for branch in sample.branches):
        return None
    first, *others = (_cut(branch, room) for branch in sample.branches)
    if any(np.array_equal(first.tokens, other.tokens) for other in others):
        return None  # the answers of a pair differ after the cut alone
    return replace(first, others=tuple(others))


def _cut(sample: TrainSequence, room: int) -> TrainSequence:
    """The sample with at most `room` tokens of its answers, up to the last that is learnt."""
    if len(sample.tokens) <= room:
        return sample
    # What follows the last learnt token trains nothing, and may be a part of a picture.
    end = int(np.flatnonzero(sample.loss_mask[:room])[-1]) + 1
    return replace(
        sample,
        tokens=sample.tokens[:end],
        logprobs=sample.logprobs[:end],
        loss_mask=sample.loss_mask[:end],
        advantage=np.broadcast_to(sample.advantage, sample.tokens.shape)[:end],
        view=sample.view.first(len(sample.prompt_tokens) + end - 1),
    )


def _beginning(row: Mapping[str, Any]) -> str:
    """The start of a row's text, for messages."""
    content = row["prompt"] if PAIR in row or "response" in row else row["messages"]
    if isinstance(content, str):
        return repr(content[:80])
    parts = (part for message in content for part in parts_of(message["content"]))
    return repr(" ".join(part["text"] for part in parts if part["type"] == "text")[:80])

"""Rollouts to packed microbatches: sequences laid end to end in one row, without padding.

    rollouts     |prompt a|response a|  |prompt b|response b|
    tokens [L]    p p p p r r r          p p r r r r             microbatch 0
    positions     0 1 2 3 4 5 6          0 1 2 3 4 5
    logit_index         3 4 5              8 9 . .               the hidden state before each response token
    labels [T]          r r r              r r r r

A microbatch holds whole rollouts, in the order they came, up to `microbatch_terms` tokens with the prompts; a
rollout longer than that is a microbatch of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cosmos_rl_core.interfaces import PromptError, UserError
from cosmos_rl_core.types import Microbatch, Rollout, RolloutGroup, TermBatch, TrainBatch
from cosmos_rl_llm.chat import Chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt with its response, ready to be packed."""

    prompt_tokens: np.ndarray
    """[prompt] int32, at least one: the first response token is predicted from the last of these."""
    tokens: np.ndarray
    """[T] int32."""
    logprobs: np.ndarray
    """[T] float32: under the engine that drew them; zeros in supervised training."""
    loss_mask: np.ndarray
    """[T] bool."""
    advantage: float

    @property
    def length(self) -> int:
        """Tokens that are fed in: nothing is predicted from the last."""
        return len(self.prompt_tokens) + len(self.tokens) - 1


def collate(groups: Sequence[RolloutGroup], *, microbatch_terms: int) -> TrainBatch:
    """Pack the rollouts of groups that have advantages.

    A rollout without a single term to train on is counted in the metrics and left out of the microbatches: it
    would cost a forward pass and add nothing to the loss.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sequences = [_from_rollout(rollout) for rollout in rollouts if rollout.loss_mask.any()]
    lengths = np.array([rollout.num_terms for rollout in rollouts] or [0])
    truncated = [rollout.finish_reason == "length" for rollout in rollouts]
    metrics = {
        "response_length_mean": float(lengths.mean()),
        "response_length_max": float(lengths.max()),
        "truncated_fraction": float(np.mean(truncated or [False])),
    }
    return _pack_batch(sequences, microbatch_terms=microbatch_terms, metrics=metrics)


def collate_sft(
    rows: Sequence[Mapping[str, Any]],
    *,
    chat: Chat,
    microbatch_terms: int,
) -> TrainBatch:
    """Pack rows with a prompt and the wanted response; the loss covers the response and the end of its turn.

    Raises:
        UserError: a row without a response, or longer than the context of `chat.max_length` tokens.
    """
    sequences = [_from_row(row, chat=chat) for row in rows]
    lengths = np.array([len(sequence.tokens) for sequence in sequences] or [0])
    metrics = {"response_length_mean": float(lengths.mean()), "response_length_max": float(lengths.max())}
    return _pack_batch(sequences, microbatch_terms=microbatch_terms, metrics=metrics)


def _from_rollout(rollout: Rollout) -> Sample:
    sequence = Sample(
        prompt_tokens=rollout.arrays["prompt_tokens"],
        tokens=rollout.arrays["tokens"],
        logprobs=rollout.rollout_logprobs,
        loss_mask=rollout.loss_mask,
        advantage=rollout.advantage,
    )
    assert len(sequence.prompt_tokens), "a rollout without a prompt token"
    assert len(sequence.tokens) == len(sequence.logprobs) == len(sequence.loss_mask), "terms out of step"
    return sequence


def _from_row(row: Mapping[str, Any], *, chat: Chat) -> Sample:
    if "response" not in row:
        raise UserError("supervised training needs the wanted responses: name their column in data.response_column")
    try:
        prompt_text, prompt_tokens = chat.encode_prompt(row)
        tokens = chat.encode_response(row, prompt_text=prompt_text)
    except PromptError as error:
        raise UserError(error.reason) from error
    length = len(prompt_tokens) + len(tokens)
    if chat.max_length is not None and length > chat.max_length:
        raise UserError(
            f"a row of {length} tokens is longer than the context of {chat.max_length}: raise "
            f"model.max_length or remove the row that begins {prompt_text[:80]!r}"
        )
    return Sample(
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        loss_mask=np.ones(len(tokens), dtype=bool),
        advantage=1.0,
    )


def _pack_batch(sequences: Sequence[Sample], *, microbatch_terms: int, metrics: Mapping[str, float]) -> TrainBatch:
    return TrainBatch(
        microbatches=tuple(_pack(bin) for bin in _fill(sequences, microbatch_terms)),
        num_terms=sum(int(sequence.loss_mask.sum()) for sequence in sequences),
        num_rollouts=len(sequences),
        metrics=metrics,
    )


def _fill(sequences: Sequence[Sample], capacity: int) -> Iterator[list[Sample]]:
    """Cut the sequences, in order, into bins of at most `capacity` tokens or one sequence."""
    bin: list[Sample] = []
    used = 0
    for sequence in sequences:
        if bin and used + sequence.length > capacity:
            yield bin
            bin, used = [], 0
        bin.append(sequence)
        used += sequence.length
    if bin:
        yield bin


def _pack(sequences: Sequence[Sample]) -> Microbatch:
    lengths = np.array([sequence.length for sequence in sequences])
    num_terms = np.array([len(sequence.tokens) for sequence in sequences])
    ends = np.cumsum(lengths)
    starts = ends - lengths  # [B] first token of each sequence in the row
    labels = np.concatenate([sequence.tokens for sequence in sequences])
    # The hidden state at i predicts token i + 1: those for a response start at the prompt's last token.
    logit_index = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, num_terms)])
    inputs = {
        "tokens": np.concatenate([part for s in sequences for part in (s.prompt_tokens, s.tokens[:-1])]),
        "positions": np.arange(ends[-1]) - np.repeat(starts, lengths),
        "sequence_index": np.repeat(np.arange(len(sequences)), lengths),
        "logit_index": logit_index,
        "labels": labels,
    }
    return Microbatch(
        inputs={name: _tensor(values, torch.int64) for name, values in inputs.items()},
        terms=TermBatch(
            rollout_logprobs=_tensor(np.concatenate([s.logprobs for s in sequences]), torch.float32),
            advantages=_tensor(np.repeat([s.advantage for s in sequences], num_terms), torch.float32),
            loss_mask=_tensor(np.concatenate([s.loss_mask for s in sequences]), torch.float32),
            rollout_index=_tensor(np.repeat(np.arange(len(sequences)), num_terms), torch.int64),
            num_rollouts=len(sequences),
        ),
    )


def _tensor(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of its own memory: arrays read off the wire may be read-only."""
    return torch.tensor(values, dtype=dtype)

"""Dataset rows with target responses to packed microbatches.

{"prompt", "response"}   the response and the end of its turn are learnt
{"messages"}             every turn of the assistant is learnt
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cosmos_rl_core.errors import PromptError, UserError
from cosmos_rl_core.types import Share, TrainBatch
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.data.collate import Sample, pack_batch
from cosmos_rl_llm.data.turns import encode_turns


def collate_sft(rows: Sequence[Mapping[str, Any]], *, chat: Chat, microbatch_terms: int, share: Share) -> TrainBatch:
    """Pack rows with target responses; return the microbatches of `share`.

    `chat.overlong` determines the treatment of rows above `chat.max_length` tokens; a row that would be cut before its
    first answer is dropped.

    Raises:
        UserError: a row without an answer, or too long where that is an error.
    """
    whole = [encode_row(row, chat=chat) for row in rows]
    fitted = [_fit(sample, row, chat=chat) for sample, row in zip(whole, rows, strict=True)]
    samples = [sample for sample in fitted if sample is not None]
    dropped = tuple(
        f"a row of {len(sample.prompt_tokens) + len(sample.tokens)} tokens, more than {chat.max_length}; it begins "
        f"{_beginning(row)}"
        for sample, after, row in zip(whole, fitted, rows, strict=True)
        if after is None
    )
    lengths = np.array([int(sample.loss_mask.sum()) for sample in samples] or [0])
    metrics = {"response_length_mean": float(lengths.mean()), "response_length_max": float(lengths.max())}
    if chat.overlong != "error":
        cut = sum(after is not None and after is not before for before, after in zip(whole, fitted, strict=True))
        metrics |= {"rows_truncated": float(cut), "rows_dropped": float(len(dropped))}
    batch = pack_batch(samples, microbatch_terms=microbatch_terms, share=share, metrics=metrics)
    return replace(batch, rows_dropped=dropped)


def encode_row(row: Mapping[str, Any], *, chat: Chat) -> Sample:
    """Return a row as prompt and response; the mask excludes other roles' messages between the assistant's turns."""
    try:
        if "response" in row:
            prompt_text, prompt = chat.encode_prompt(row)
            tokens = chat.encode_response(row, prompt_text=prompt_text)
            return _sample(prompt, tokens, np.ones(len(tokens), dtype=bool))
        if "messages" not in row:
            raise UserError(
                "supervised training needs target responses: name their column in data.response_column, or that of "
                "whole chats in data.messages_column"
            )
        tokens, mask = encode_turns(chat, row["messages"])
    except PromptError as error:
        raise UserError(error.reason) from error
    learnt = np.flatnonzero(mask[1:]) + 1  # the first token is predicted from nothing
    if not len(learnt):
        raise UserError(f"a row has no assistant token to learn; it begins {_beginning(row)}")
    first, end = learnt[0], learnt[-1] + 1
    return _sample(tokens[:first], tokens[first:end], mask[first:end])


def _sample(prompt: np.ndarray, tokens: np.ndarray, mask: np.ndarray) -> Sample:
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    return Sample(prompt_tokens=prompt, tokens=tokens, logprobs=logprobs, loss_mask=mask, advantage=1.0)


def _fit(sample: Sample, row: Mapping[str, Any], *, chat: Chat) -> Sample | None:
    """The sample cut to the context; None if it is dropped."""
    length = len(sample.prompt_tokens) + len(sample.tokens)
    if chat.max_length is None or length <= chat.max_length:
        return sample
    if chat.overlong == "error":
        raise UserError(
            f"a row of {length} tokens is longer than the context of {chat.max_length}: raise model.max_length, remove "
            f'the row that begins {_beginning(row)}, or set data.overlong to "truncate" or "drop"'
        )
    room = chat.max_length - len(sample.prompt_tokens)
    if chat.overlong == "drop" or room <= 0 or not sample.loss_mask[:room].any():
        return None
    return replace(
        sample,
        tokens=sample.tokens[:room],
        logprobs=sample.logprobs[:room],
        loss_mask=sample.loss_mask[:room],
    )


def _beginning(row: Mapping[str, Any]) -> str:
    """The start of a row's text, for messages."""
    content = row["prompt"] if "response" in row else row["messages"]
    text = content if isinstance(content, str) else " ".join(str(message["content"]) for message in content)
    return repr(text[:80])

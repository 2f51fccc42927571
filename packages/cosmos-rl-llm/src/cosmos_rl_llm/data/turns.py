"""Chats of several turns to tokens, and which of them the assistant wrote.

    <user>hi<end><assistant>hello<end> <user>bye<end><assistant>ciao<end>
                            ^^^^^^^^^^                           ^^^^^^^^^     learnt

A template that marks the assistant's words itself ({% generation %}) is believed. Otherwise a turn is what a rendered
chat has more than the chat before it with the opening of that turn, which is checked to be its beginning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cosmos_rl_core.errors import PromptError
from cosmos_rl_llm.data.chat import Chat

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message = Mapping[str, Any]


def encode_turns(chat: Chat, messages: Sequence[Message], *, where: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens [L] int32 of a whole chat and the mask [L] bool of those that are learnt.

    Without marks in the template each turn is tokenised apart, exactly as it meets the chat before it in generation,
    and is learnt up to its last end token.

    Raises:
        PromptError: the template rejects the messages, or writes earlier turns anew as the chat goes on.
    """
    template = chat.tokenizer.chat_template
    if isinstance(template, str) and _MARKER.search(template):
        return _encode_marked(chat, messages, where=where)
    tokens: list[int] = []
    mask: list[bool] = []
    for text, learnt in _spans(chat, messages, where=where):
        ids = list(chat.tokenizer(text, add_special_tokens=False)["input_ids"])
        ends = [place for place, token in enumerate(ids, start=1) if token in chat.end_ids]
        until = 0 if not learnt else ends[-1] if ends else len(ids)
        tokens += ids
        mask += [place < until for place in range(len(ids))]
    if messages[-1]["role"] == "assistant" and tokens and tokens[-1] not in chat.end_ids and mask[-1]:
        tokens.append(chat.closing_id)
        mask.append(True)
    return np.asarray(tokens, dtype=np.int32), np.asarray(mask, dtype=bool)


def _encode_marked(chat: Chat, messages: Sequence[Message], *, where: str) -> tuple[np.ndarray, np.ndarray]:
    encoded = chat.apply_template(
        messages, where=where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return np.asarray(encoded["input_ids"], dtype=np.int32), np.asarray(encoded["assistant_masks"], dtype=bool)


def _spans(chat: Chat, messages: Sequence[Message], *, where: str) -> list[tuple[str, bool]]:
    """The rendered chat in pieces: what the assistant wrote (True) and what lies between."""
    spans: list[tuple[str, bool]] = []
    done = ""
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = chat.render(messages[:place], where=where, add_generation_prompt=True) if place else ""
        after = chat.render(messages[: place + 1], where=where, add_generation_prompt=False)
        spans += [(_added(before, done, where=where), False), (_added(after, before, where=where), True)]
        done = after
    whole = chat.render(messages, where=where, add_generation_prompt=False)
    spans.append((_added(whole, done, where=where), False))
    return [(text, learnt) for text, learnt in spans if text]


def _added(text: str, earlier: str, *, where: str) -> str:
    """What `text` has after `earlier`."""
    if text.startswith(earlier):
        return text[len(earlier) :]
    raise PromptError(
        f"{where or 'a row'}: the chat template writes earlier turns differently as the chat goes on, so that the "
        "assistant's words cannot be found; give data.chat_template one with {% generation %} marks around them, or "
        "make a row of each answer with data.prompt_column and data.response_column"
    )

"""Chats of several turns to tokens, with a mask of the assistant's tokens.

    <user>hi<end><assistant>hello<end> <user>bye<end><assistant>ciao<end>
                            ^^^^^^^^^^                           ^^^^^^^^^     learnt

If the template marks the assistant's text ({% generation %}), those marks are used. Otherwise a turn is the suffix that
it adds to the rendered earlier chat with the opening of that turn; that prefix is verified.
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
    """Return the tokens [L] int32 of a whole chat and the mask [L] bool of the learnt ones.

    Without marks in the template each turn is tokenised separately from the chat before it, as in generation,
    and is learnt up to its last end token.

    Raises:
        PromptError: the template rejects the messages, or changes earlier turns as the chat goes on.
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
    """The rendered chat in pieces: the assistant's text (True) and the text between."""
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
    """The part of `text` after the prefix `earlier`."""
    if text.startswith(earlier):
        return text[len(earlier) :]
    raise PromptError(
        f"{where or 'a row'}: the chat template writes earlier turns differently as the chat goes on, so that the "
        "assistant's text cannot be found; set data.chat_template to one with {% generation %} marks around it, or "
        "make each answer a row with data.prompt_column and data.response_column"
    )

"""A whole chat to tokens, with a mask of the assistant's.

    <user>hi<end><assistant>hello<end> <user>bye<end><assistant>ciao<end>
                            ^^^^^^^^^^                           ^^^^^^^^^     learnt

If the template marks the assistant's text ({% generation %}), those marks are used. Otherwise a turn is the suffix that
it adds to the rendered earlier chat with the opening of that turn; that prefix is verified. Pictures and videos may
stand in any message but the assistant's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from cosmos_rl_core.errors import PromptError
from cosmos_rl_llm.data.chat import Chat, Message
from cosmos_rl_llm.media.item import View
from cosmos_rl_llm.media.source import parts_of

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[str, bool]
"""A piece of a rendered chat, and whether it is learnt."""


def encode_turns(chat: Chat, messages: Sequence[Message], *, where: str = "") -> tuple[np.ndarray, np.ndarray, View]:
    """Return the tokens [L] int32 of a whole chat, the mask [L] bool of the learnt ones, and its pictures and videos.

    Without marks in the template each turn is tokenised separately from the chat before it, as in generation,
    and is learnt up to its last end token.

    Raises:
        PromptError: the template rejects the messages, or changes earlier turns as the chat goes on.
        MediaError: a picture or video cannot be read, or does not fit the chat.
    """
    for message in messages:
        if message["role"] == "assistant" and any(part["type"] != "text" for part in parts_of(message["content"])):
            raise PromptError(f"{where or 'a row'}: a picture or video in a message of the assistant cannot be learnt")
    items = chat.items(messages, where=where)
    template = chat.tokenizer.chat_template
    marked = isinstance(template, str) and _MARKER.search(template) is not None
    spans = (_marked_spans if marked else _spans)(chat, messages, where=where)
    texts = chat.expand([text for text, _ in spans], items, where=where)
    expanded = [(text, learnt) for text, (_, learnt) in zip(texts, spans, strict=True)]
    ids, learnt = _encode_whole(chat, expanded) if marked else _encode_each(chat, expanded)
    if not marked and messages[-1]["role"] == "assistant" and ids and ids[-1] not in chat.end_ids and learnt[-1]:
        ids, learnt = [*ids, chat.closing_id], [*learnt, True]
    tokens = np.asarray(ids, dtype=np.int32)
    return tokens, np.asarray(learnt, dtype=bool), chat.view(tokens, items, where=where)


def _encode_each(chat: Chat, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
    """Tokens and mask of spans that are tokenised separately."""
    tokens: list[int] = []
    mask: list[bool] = []
    for text, learnt in spans:
        ids = list(chat.tokenizer(text, add_special_tokens=False)["input_ids"])
        ends = [place for place, token in enumerate(ids, start=1) if token in chat.end_ids]
        until = 0 if not learnt else ends[-1] if ends else len(ids)
        tokens += ids
        mask += [place < until for place in range(len(ids))]
    return tokens, mask


def _encode_whole(chat: Chat, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
    """Tokens and mask of spans that are tokenised together: a token is learnt if characters of it are."""
    encoded = chat.tokenizer("".join(text for text, _ in spans), add_special_tokens=False)
    tokens = list(encoded["input_ids"])
    mask = [False] * len(tokens)
    at = 0
    for text, learnt in spans:
        first = encoded.char_to_token(at) if learnt and text else None
        if first is not None:
            last = encoded.char_to_token(at + len(text) - 1)
            until = len(tokens) if last is None else last + 1
            mask[first:until] = [True] * (until - first)
        at += len(text)
    return tokens, mask


def _marked_spans(chat: Chat, messages: Sequence[Message], *, where: str) -> list[Span]:
    text, marks = chat.render_marked(messages, where=where)
    spans: list[Span] = []
    done = 0
    for start, end in marks:
        spans += [(text[done:start], False), (text[start:end], True)]
        done = end
    return [*spans, (text[done:], False)]


def _spans(chat: Chat, messages: Sequence[Message], *, where: str) -> list[Span]:
    """The rendered chat in pieces: the assistant's text (True) and the text between."""
    spans: list[Span] = []
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

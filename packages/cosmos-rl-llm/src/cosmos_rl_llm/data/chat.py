"""Rows to tokens and tokens to text, through the tokenizer's chat template or as plain text.

    encode_prompt(row)      |prompt|                what an engine gets
    encode_answers(row)     |prompt|answer|...      what supervised training gets

Both encode the same spans, and a span's tokens do not depend on later ones: the prompt of a generation is a prefix of
the tokens that are trained. Tokens sampled by an engine are kept and never encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_rl_core.data.source import Faults
from cosmos_rl_core.errors import PromptError, UserError
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_llm.config import PLAIN_TEXT, Overlong
from cosmos_rl_llm.data.reading import Ahead
from cosmos_rl_llm.data.spans import (
    PAIR,
    SHOWS_NONE,
    STEPS,
    ChatSpan,
    Message,
    Template,
    encode_pieces,
    shows_messages,
)
from cosmos_rl_llm.media.item import EMPTY_VIEW, MediaItem, View
from cosmos_rl_llm.media.source import parts_of
from cosmos_rl_llm.media.vision import Vision
from cosmos_rl_llm.model.checkpoint import template_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A prompt, or a row of supervised training, as the model gets it."""

    text: str
    """The rendered chat, with the placeholders of the chat template."""
    tokens: np.ndarray
    """[L] int32, with a token for each output of the vision tower."""
    learnt: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """[L] bool: the tokens of answers."""
    view: View = EMPTY_VIEW
    """Its pictures and videos."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Conversion between the rows of one dataset and the tokens of one model."""

    tokenizer: PreTrainedTokenizerBase
    """Has the chat template, if prompts are messages."""
    end_ids: frozenset[int]
    """Tokens that end a response and are part of it."""
    max_length: int | None = None
    """Maximum tokens of prompt and response together; None: no limit."""
    overlong: Overlong = "error"
    """Treatment of longer rows in supervised training."""
    scores: bool = False
    """Whether the model scores whole texts at their last token."""
    vision: Vision | None = None
    """Reads pictures and videos; None for a model of text."""
    faults: Faults = field(default_factory=lambda: Faults("cannot be learnt"), compare=False)
    """Rows of supervised training that cannot be learnt."""
    ranks: Callable[[], RankGroup] = field(default=RankGroup, compare=False)
    """Returns the ranks that read the pictures and videos of supervised rows together."""
    ahead: Ahead = field(default_factory=Ahead, compare=False)
    """Supervised rows that are read before their batch."""

    def encode_prompt(self, row: Mapping[str, Any], *, where: str = "") -> Encoded:
        """Return the model's prompt.

        Messages are followed by the opening of the assistant's turn. Plain text gets the tokens that the tokenizer
        writes before a text, such as BOS, if it has none of its own; a template writes its own.

        Raises:
            PromptError: the template rejects the messages, or no token is left.
            MediaError: a picture or video cannot be read, or does not fit the chat.
        """
        where, prompt = where or "a row", row["prompt"]
        if isinstance(prompt, str):
            encoded = self._encode_text([ChatSpan(text=prompt)], where=where)
        elif not prompt:
            raise PromptError(f"{where}: the chat begins with its only answer; nothing asks for it")
        else:
            spans = self._template(row, where=where).prompt(prompt)
            encoded = self._encode_spans([replace(span, written=False) for span in spans], row, prompt, where=where)
        if not len(encoded.tokens):
            raise PromptError(f"{where}: the prompt has no tokens")
        return encoded

    def encode_answers(
        self, row: Mapping[str, Any], *, items: Sequence[MediaItem] | None = None, where: str = ""
    ) -> Encoded:
        """Return a row of supervised training: its prompt as `encode_prompt` does, and its answers.

        items: the row's pictures and videos; None: they are read.

        Of {"prompt", "response"} the response is learnt, of {"messages"} every answer that has a prompt; each with the
        end of its turn, as the template closes it or else by the tokenizer's end-of-sequence token.

        Raises:
            PromptError: the template rejects the messages, or changes earlier turns as the chat goes on.
            MediaError: a picture or video cannot be read, or does not fit the chat.
        """
        where, messages = where or "a row", learnt_messages(row)
        if isinstance(row.get("prompt"), str) and "response" in row:
            spans = [ChatSpan(text=row["prompt"]), ChatSpan(text=row["response"], written=True)]
            return self._encode_text(spans, where=where)
        for message in messages:
            if message["role"] == "assistant" and any(part["type"] != "text" for part in parts_of(message["content"])):
                raise PromptError(f"{where}: a picture or video in a message of the assistant cannot be learnt")
        spans = self._template(row, where=where).answers(messages, last_alone="response" in row)
        return self._encode_spans(spans, row, messages, items=items, where=where)

    def encode_steps(self, row: Mapping[str, Any], *, where: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens [L] int32 of a prompt with the steps of its answer, and the places [n] of their last ones.

        White space around the answer, which templates remove, is no part of it.

        Raises PromptError: the template rejects the messages or changes the steps, or a step has no token.
        """
        where, prompt, steps = where or "a row", row["prompt"], [text for text, _ in row[STEPS]]
        steps[0] = steps[0].lstrip()
        steps[-1] = steps[-1].rstrip()
        if isinstance(prompt, str):
            before, opening = [prompt], leading_ids(self.tokenizer)
        else:
            chat = [*prompt, {"role": "assistant", "content": "".join(steps)}]
            spans = self._template(row, where=where).answers(chat, last_alone=True)
            answer = next(place for place, span in enumerate(spans) if span.written)
            earlier, unchanged, _ = spans[answer].text.partition("".join(steps))
            if not unchanged:
                raise PromptError(
                    f"{where}: the chat template changes the steps of the answer, and their ends are lost"
                )
            before, opening = [*(span.text for span in spans[:answer]), earlier], []
        pieces = encode_pieces(self.tokenizer, [*before, *steps])
        if not all(pieces[len(before) :]):
            raise PromptError(f"{where}: a step of the answer has no tokens")
        if pieces[0][: len(opening)] != opening:
            pieces[0] = [*opening, *pieces[0]]
        ends = np.cumsum([len(piece) for piece in pieces])[len(before) :] - 1
        return np.concatenate([np.asarray(piece, dtype=np.int32) for piece in pieces]), ends

    def _template(self, row: Mapping[str, Any], *, where: str) -> Template:
        return Template(tokenizer=self.tokenizer, tools=row.get("tools"), where=where)

    def _encode_spans(
        self,
        spans: Sequence[ChatSpan],
        row: Mapping[str, Any],
        messages: Sequence[Message],
        *,
        items: Sequence[MediaItem] | None = None,
        where: str,
    ) -> Encoded:
        """The tokens of a rendered chat with the pictures and videos of its messages."""
        seeing = self.of_row(row)
        items = seeing.items(messages, where=where) if items is None else items
        shown = iter(seeing.expand([span.text for span in spans if not span.written], items, where=where))
        texts = [span.text if span.written else next(shown) for span in spans]
        tokens, learnt = self._join(encode_pieces(self.tokenizer, texts), spans)
        self.view(tokens[learnt], [], where=where)  # an answer shows nothing
        text = "".join(span.text for span in spans)
        return Encoded(text=text, tokens=tokens, learnt=learnt, view=seeing.view(tokens, items, where=where))

    def _encode_text(self, spans: Sequence[ChatSpan], *, where: str) -> Encoded:
        """The tokens of plain text."""
        pieces = encode_pieces(self.tokenizer, [span.text for span in spans])
        opening = leading_ids(self.tokenizer)
        if pieces[0][: len(opening)] != opening:
            pieces[0] = [*opening, *pieces[0]]
        tokens, learnt = self._join(pieces, spans)
        text = "".join(span.text for span in spans)
        return Encoded(text=text, tokens=tokens, learnt=learnt, view=self.view(tokens, [], where=where))

    def _join(self, pieces: Sequence[Sequence[int]], spans: Sequence[ChatSpan]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [L] int32 and mask [L] bool of spans. An answer is learnt up to its last end token.

        One without may end with the first token after it, as GLM's do. At the end of a chat it gets one.
        """
        tokens: list[int] = []
        learnt: list[bool] = []
        is_open = False
        for piece, span in zip(pieces, spans, strict=True):
            ends = [place for place, token in enumerate(piece, start=1) if token in self.end_ids]
            until = 0 if not span.written else ends[-1] if ends else len(piece)
            mask = [place < until for place in range(len(piece))]
            if is_open and piece and not span.written:
                mask[0] = piece[0] in self.end_ids
            if piece or span.written:
                is_open = span.written and not ends
            tokens += piece
            learnt += mask
        if is_open:
            tokens, learnt = [*tokens, self.closing_id], [*learnt, True]
        return np.asarray(tokens, dtype=np.int32), np.asarray(learnt, dtype=bool)

    def of_row(self, row: Mapping[str, Any]) -> Chat:
        """Return the chat with the limits of pictures and videos of the section that the row was loaded from."""
        return self if self.vision is None else replace(self, vision=self.vision.of_row(row))

    def items(self, messages: Iterable[Message], *, where: str) -> list[MediaItem]:
        """Return the pictures and videos of messages, processed. Raises MediaError, or PromptError for a text model."""
        parts = [part for message in messages for part in parts_of(message["content"]) if part["type"] != "text"]
        if parts and self.vision is None:
            raise PromptError(f"{where or 'a row'}: {parts[0]['type']!r} in a chat, and model and engine read text")
        return [] if self.vision is None else [self.vision.item(part, where=where) for part in parts]

    def expand(self, spans: Sequence[str], items: Sequence[MediaItem], *, where: str) -> Sequence[str]:
        """Write the tokens of pictures and videos in place of their placeholders. Raises MediaError."""
        return spans if self.vision is None else self.vision.expand(spans, items, where=where)

    def view(self, tokens: np.ndarray, items: Sequence[MediaItem], *, where: str) -> View:
        """Return the view of the tokens [L] of a chat that shows `items`. Raises MediaError."""
        return EMPTY_VIEW if self.vision is None else self.vision.view(tokens, items, where=where)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens without special ones, for rewards and files."""
        ids = [int(token) for token in tokens]
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def decode_prompt(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of a prompt, special tokens included."""
        text = self.tokenizer.decode([int(token) for token in tokens], clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    @property
    def closing_id(self) -> int:
        """The end token written after a response that no template closes."""
        eos = self.tokenizer.eos_token_id
        return eos if isinstance(eos, int) else min(self.end_ids)


def learnt_messages(row: Mapping[str, Any]) -> Sequence[Message]:
    """Return a row's messages up to its last answer; of a pair, those before its two answers; of plain text, none."""
    if PAIR in row:
        return [] if isinstance(row["prompt"], str) else row["prompt"]
    if "response" in row:
        prompt = row["prompt"]
        return [] if isinstance(prompt, str) else [*prompt, {"role": "assistant", "content": row["response"]}]
    messages = row.get("messages", ())
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: answers[-1] + 1] if answers else messages


def leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that a tokenizer writes before a text; those after it, such as EOS, would end a prompt."""
    alone = list(tokenizer("x", add_special_tokens=False)["input_ids"])
    within = list(tokenizer("x")["input_ids"])
    at = next((at for at in range(len(within)) if within[at : at + len(alone)] == alone), 0)
    return within[:at]


def set_chat_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
    """Set the tokenizer's chat template from `data.chat_template`: Jinja text, a .jinja file, or None for its own.

    Raises:
        UserError: the file is missing, there is no template, or it does not contain the messages.
    """
    if template == PLAIN_TEXT:
        return
    if template is not None:
        tokenizer.chat_template = template_text(template)
    elif tokenizer.chat_template is None:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; "
            'set data.chat_template to one, or to "none" for plain text'
        )
    if not shows_messages(lambda messages: Template(tokenizer=tokenizer).render(messages, opens=True)):
        raise UserError(f"data.chat_template = {template or 'its own'!r}: {SHOWS_NONE}")


def find_end_ids(tokenizer: PreTrainedTokenizerBase, generation_eos: int | Iterable[int] | None) -> frozenset[int]:
    """Return the tokens that end a response: the tokenizer's and those of the model's generation config.

    A chat model often has two: the end of its turn and the end of a text.

    Raises:
        UserError: there is none, so no response could end.
    """
    listed = [generation_eos] if isinstance(generation_eos, int) else generation_eos or []
    end_ids = frozenset(token for token in (tokenizer.eos_token_id, *listed) if isinstance(token, int))
    if not end_ids:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no end-of-sequence token, nor "
            "does generation_config.json; set eos_token in tokenizer_config.json"
        )
    return end_ids

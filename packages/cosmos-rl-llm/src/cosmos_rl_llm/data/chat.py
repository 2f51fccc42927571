"""Rows to tokens and tokens to text, through the tokenizer's chat template or as plain text.

A prompt and its response are tokenised separately, as in generation: the response never changes the prompt's tokens,
and tokens sampled by an engine are kept and never encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_rl_core.data.source import Faults
from cosmos_rl_core.errors import PromptError, UserError
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_llm.config import PLAIN_TEXT, Overlong
from cosmos_rl_llm.data.reading import Ahead
from cosmos_rl_llm.media.item import EMPTY_VIEW, Item, View
from cosmos_rl_llm.media.source import parts_of
from cosmos_rl_llm.media.vision import Vision

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A prompt as the model gets it."""

    text: str
    """The rendered chat, with the placeholders of the chat template."""
    tokens: np.ndarray
    """[prompt] int32, with a token for each output of the vision tower."""
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
    vision: Vision | None = None
    """Reads pictures and videos; None for a model of text."""
    faults: Faults = field(default_factory=lambda: Faults("cannot be read"), compare=False)
    """Rows of supervised training with pictures and videos that cannot be read."""
    ranks: Callable[[], RankGroup] = field(default=RankGroup, compare=False)
    """Returns the ranks that read the pictures and videos of supervised rows together."""
    ahead: Ahead = field(default_factory=Ahead, compare=False)
    """Supervised rows that are read before their batch."""
    given: Sequence[Item] | None = None
    """The pictures and videos of the row in work; None: they are read."""

    def encode_prompt(self, row: Mapping[str, Any], *, where: str = "") -> Encoded:
        """Return the model's prompt.

        Messages are followed by the opening of the assistant's turn. Plain text gets the tokenizer's BOS token, if it
        has one; a template writes its own.

        Raises:
            PromptError: the template rejects the messages, or no token is left.
            MediaError: a picture or video cannot be read, or does not fit the chat.
        """
        prompt = row["prompt"]
        plain = isinstance(prompt, str)
        text = prompt if plain else self.render(prompt, where=where, add_generation_prompt=True)
        items = [] if plain else self.of_row(row).items(prompt, where=where)
        (shown,) = self.expand([text], items, where=where)
        tokens = np.asarray(self.tokenizer(shown, add_special_tokens=plain)["input_ids"], dtype=np.int32)
        if not len(tokens):
            raise PromptError(f"{where or 'a row'}: the prompt has no tokens")
        return Encoded(text=text, tokens=tokens, view=self.view(tokens, items, where=where))

    def of_row(self, row: Mapping[str, Any]) -> Chat:
        """Return the chat with the limits of pictures and videos of the section that the row was loaded from."""
        return self if self.vision is None else replace(self, vision=self.vision.of_row(row))

    def items(self, messages: Iterable[Message], *, where: str) -> list[Item]:
        """Return the pictures and videos of messages, processed. Raises MediaError, or PromptError for a text model."""
        if self.given is not None:
            return list(self.given)
        parts = [part for message in messages for part in parts_of(message["content"]) if part["type"] != "text"]
        if parts and self.vision is None:
            raise PromptError(f"{where or 'a row'}: {parts[0]['type']!r} in a chat, and model and engine read text")
        return [] if self.vision is None else [self.vision.item(part, where=where) for part in parts]

    def expand(self, spans: Sequence[str], items: Sequence[Item], *, where: str) -> Sequence[str]:
        """Write the tokens of pictures and videos in place of their placeholders. Raises MediaError."""
        return spans if self.vision is None else self.vision.expand(spans, items, where=where)

    def view(self, tokens: np.ndarray, items: Sequence[Item], *, where: str) -> View:
        """Return the view of the tokens [L] of a chat that shows `items`. Raises MediaError."""
        return EMPTY_VIEW if self.vision is None else self.vision.view(tokens, items, where=where)

    def encode_response(self, row: Mapping[str, Any], *, prompt_text: str, where: str = "") -> np.ndarray:
        """Return the tokens of row["response"] and of the end of its turn, [T] int32: the training target.

        If the template continues the prompt's text, the turn is closed as the template closes it (up to
        its last end token); otherwise, and for plain text, with the tokenizer's end-of-sequence token.

        Raises:
            PromptError: the template rejects the messages.
            MediaError: it has the token of a picture or video.
        """
        prompt, response = row["prompt"], row["response"]
        text = response
        if not isinstance(prompt, str):
            messages = [*prompt, {"role": "assistant", "content": response}]
            whole = self.render(messages, where=where, add_generation_prompt=False)
            text = whole.removeprefix(prompt_text) if whole.startswith(prompt_text) else response
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        ends = [place for place, token in enumerate(ids) if token in self.end_ids]
        closed = ids[: ends[-1] + 1] if ends else [*ids, self.closing_id]
        tokens = np.asarray(closed, dtype=np.int32)
        self.view(tokens, [], where=where)
        return tokens

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

    def render(self, messages: Iterable[Mapping[str, Any]], *, where: str, add_generation_prompt: bool) -> str:
        """Return messages as the chat template renders them. Raises PromptError if it rejects them."""
        conversation = [dict(message) for message in messages]
        with _template_errors(where):
            text = self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        assert isinstance(text, str)
        return text

    def render_marked(self, messages: Iterable[Message], *, where: str) -> tuple[str, list[tuple[int, int]]]:
        """Return messages as the chat template renders them, and the places (start, end) of its {% generation %} marks.

        Raises PromptError if the template rejects them.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        names: dict[str, Any] = dict(self.tokenizer.special_tokens_map)
        with _template_errors(where):
            texts, marks = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self.tokenizer.get_chat_template(),
                return_assistant_tokens_mask=True,
                **names,
            )
        return texts[0], [(int(start), int(end)) for start, end in marks[0]]


@contextmanager
def _template_errors(where: str) -> Iterator[None]:
    """Raise PromptError for messages that the chat template rejects."""
    from jinja2 import TemplateError

    try:
        yield
    except TemplateError as error:
        raise PromptError(f"{where or 'a row'}: the chat template rejects this prompt: {error}") from error


def set_chat_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
    """Set the tokenizer's chat template from `data.chat_template`: Jinja text, a .jinja file, or None for its own.

    Raises:
        UserError: the file is missing, or there is no template.
    """
    if template == PLAIN_TEXT:
        return
    if template is not None and template.endswith(".jinja"):
        file = Path(template).expanduser()
        if not file.is_file():
            raise UserError(f"data.chat_template = {template!r}: no such file")
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    elif template is not None:
        tokenizer.chat_template = template
    elif tokenizer.chat_template is None:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; "
            'set data.chat_template to one, or to "none" for plain text'
        )


def find_end_ids(tokenizer: PreTrainedTokenizerBase, generation_eos: int | Iterable[int] | None) -> frozenset[int]:
    """Return the tokens that end a response: the tokenizer's and those of the model's generation config.

    A chat model often has two: the end of its turn and the end of a text.

    Raises:
        UserError: there is none, so no response could end.
    """
    listed = [generation_eos] if isinstance(generation_eos, int) else generation_eos or []
    found = frozenset(token for token in (tokenizer.eos_token_id, *listed) if isinstance(token, int))
    if not found:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no end-of-sequence token, nor "
            "does generation_config.json; set eos_token in tokenizer_config.json"
        )
    return found

"""A chat as the template renders it, in spans: what the assistant writes, and what it reads.

    <user>hi<end><assistant> | hello<end> | <user>bye<end><assistant> | ciao<end>
                               written                                  written

An answer begins where the prompt of its generation ends: the rendered earlier chat with the opening of its turn. It is
what the turn adds to that prompt or, if the template has them, what its {% generation %} marks enclose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cosmos_rl_core.errors import PromptError
from cosmos_rl_llm.media.source import parts_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

PAIR = "data.pair"
"""Key of a row with two answers: the chosen one and the rejected one."""
MARGIN = "data.margin"
"""Key of a pair's margin: how much better the chosen answer is."""
LABEL = "data.label"
"""Key of a row whose response is judged: whether it is good."""
STEPS = "data.steps"
"""Key of a row whose response is judged by steps: [text, whether it is right] of each; the texts add up to it."""

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OPEN_THOUGHT = re.compile(r"([<\[◁])((?:think|thinking|thought|reasoning)[>\]▷])\s*\Z", re.IGNORECASE)
"""The end of a prompt that opens a thought, which the answer closes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSpan:
    """A piece of a rendered chat."""

    text: str
    written: bool = False
    """Whether it is an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The chat template of a tokenizer, for the chats of one row."""

    tokenizer: PreTrainedTokenizerBase
    tools: Sequence[Mapping[str, Any]] | None = None
    """Schemas of the functions that the assistant may call."""
    where: str = "a row"
    """Location of the row, for messages."""

    def prompt(self, messages: Sequence[Message]) -> list[ChatSpan]:
        """Return a chat with the opening of the assistant's next turn: what an answer is generated after.

        It is cut where earlier answers begin and end, as `answers` cuts it.

        Raises PromptError if the template rejects the messages.
        """
        return self._spans(messages, opens=True)

    def answers(self, messages: Sequence[Message], *, last_alone: bool) -> list[ChatSpan]:
        """Return a chat that ends with an answer. last_alone: earlier answers are a part of the prompt.

        If the template does not continue the prompt of the only answer, as those that drop thoughts, the prompt is
        followed by the message's own text.

        Raises PromptError if the template rejects the messages, or writes earlier turns differently as the chat goes
        on, and for an answer without the thought that its prompt opens.
        """
        places = [place for place in _answers_of(messages) if place]
        if not places:
            raise PromptError(f"{self.where}: the chat begins with its only answer; nothing asks for it")
        spans = self._spans(messages, opens=False)
        written = [place for place, span in enumerate(spans) if span.written]
        if last_alone or len(places) == 1:
            if not written or any(span.text.strip() for span in spans[written[-1] + 1 :]):
                spans = [*self.prompt(messages[:-1]), self._own_text(messages[-1])]
                written = [len(spans) - 1]
            spans = [replace(span, written=place == written[-1]) for place, span in enumerate(spans)]
            written = written[-1:]
        elif len(written) < len(places):
            raise self._rewritten()
        for place in written:
            text = self._within_thought(spans[place].text, after=spans[place - 1].text if place else "")
            if text != spans[place].text and place != written[-1]:
                raise self._rewritten()
            spans[place] = replace(spans[place], text=text)
        return spans

    def render(self, messages: Sequence[Message], *, opens: bool) -> str:
        """Return messages as the template writes them. opens: followed by the opening of the assistant's turn.

        Raises PromptError if it rejects them.
        """
        if self.tools and "tools" not in str(self.tokenizer.chat_template):
            raise PromptError(f"{self.where}: the row has tools (data.tools_column), and the chat template shows none")
        with self._rejects():
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=_plain(self.tools),
                tokenize=False,
                add_generation_prompt=opens,
            )
        assert isinstance(text, str)
        return text

    def _spans(self, messages: Sequence[Message], *, opens: bool) -> list[ChatSpan]:
        """The rendered chat, cut where answers begin and end. Those that the template rewrites later are not cut."""
        template = self.tokenizer.chat_template
        if isinstance(template, str) and _MARKER.search(template):
            return self._marked_spans(messages, opens=opens)
        text = self.render(messages, opens=opens)
        spans: list[ChatSpan] = []
        done = 0
        for place in _answers_of(messages):
            if not place:
                continue  # nothing is generated without a prompt
            before = self.render(messages[:place], opens=True)
            last = place == len(messages) - 1 and not opens
            after = text if last else self.render(messages[: place + 1], opens=False)
            if after.startswith(before) and text.startswith(after) and len(before) >= done:
                spans += [ChatSpan(text=text[done : len(before)]), ChatSpan(text=after[len(before) :], written=True)]
                done = len(after)
        return [*spans, ChatSpan(text=text[done:])]

    def _marked_spans(self, messages: Sequence[Message], *, opens: bool) -> list[ChatSpan]:
        text, marks = self._render_marked(messages, opens=opens)
        prompts = [self.render(messages[:place], opens=True) for place in _answers_of(messages) if place]
        begins = [len(before) for before in prompts if text.startswith(before)]
        for place, (start, end) in enumerate(marks):  # the space before an answer is often a part of its first token
            begin = max((at for at in begins if at <= start), default=start)
            marks[place] = (start if text[begin:start].strip() else begin, end)
        cuts = sorted({0, len(text), *begins, *(cut for mark in marks for cut in mark)})
        return [
            ChatSpan(text=text[start:end], written=any(first <= start and end <= last for first, last in marks))
            for start, end in pairwise(cuts)
        ]

    def _render_marked(self, messages: Sequence[Message], *, opens: bool) -> tuple[str, list[tuple[int, int]]]:
        """Messages as the template writes them, and the places (start, end) of its {% generation %} marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        names: dict[str, Any] = dict(self.tokenizer.special_tokens_map)
        with self._rejects():
            texts, marks = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=_plain(self.tools),
                chat_template=self.tokenizer.get_chat_template(),
                return_assistant_tokens_mask=True,
                add_generation_prompt=opens,
                **names,
            )
        return texts[0], [(int(start), int(end)) for start, end in marks[0]]

    def _own_text(self, answer: Message) -> ChatSpan:
        if answer.get("tool_calls"):
            raise self._rewritten()
        return ChatSpan(text="".join(part["text"] for part in parts_of(answer["content"])), written=True)

    def _within_thought(self, answer: str, *, after: str) -> str:
        """The answer without the beginning of its thought, if the prompt before it has that."""
        opening = _OPEN_THOUGHT.search(after)
        if opening is None:
            return answer
        begins = opening[1] + opening[2]
        if answer.lstrip().startswith(begins):
            return answer.lstrip().removeprefix(begins).lstrip()
        if f"{opening[1]}/{opening[2]}" not in answer:
            raise PromptError(
                f"{self.where}: the chat template opens a thought, {begins}, and the answer has none: begin it with "
                f"{begins}...{opening[1]}/{opening[2]}, or set data.chat_template to one that opens none"
            )
        return answer

    def _rewritten(self) -> PromptError:
        return PromptError(
            f"{self.where}: the chat template writes earlier turns differently as the chat goes on, so that the "
            "assistant's text cannot be found; set data.chat_template to one with {% generation %} marks around it, "
            "or make each answer a row with data.prompt_column and data.response_column"
        )

    @contextmanager
    def _rejects(self) -> Iterator[None]:
        """Raise PromptError for messages that the template rejects."""
        try:
            yield
        except Exception as error:  # a template is a program of the model's, and meets rows of any form
            raise PromptError(f"{self.where}: the chat template rejects this prompt: {error}") from error


def steps_of(response: str, separator: str) -> list[str]:
    """Cut a response after each separator; blank pieces belong to the step before them."""
    pieces = [piece + separator for piece in response.split(separator)]
    pieces[-1] = pieces[-1].removesuffix(separator)
    steps = pieces[:1]
    for piece in pieces[1:]:
        if piece.strip() and steps[-1].strip():
            steps.append(piece)
        else:
            steps[-1] += piece
    return steps


def _answers_of(messages: Sequence[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if message["role"] == "assistant"]


def _plain(tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    return [dict(tool) for tool in tools] if tools else None


SHOWS_NONE = "does not contain the messages of a chat, so that every prompt would be the same"


def shows_messages(render: Callable[[list[Message]], str]) -> bool:
    """Return whether a chat template contains what messages say. One that takes no such chat is given the benefit."""
    text = "Which of 271828 and 314159 is more?"
    rendered: list[str] = []
    for content in (text, [{"type": "text", "text": text}]):
        with suppress(Exception):  # a template is a program of the model's, and may want chats of another form
            rendered.append(render([{"role": "user", "content": content}]))
    return not rendered or any(text in each for each in rendered)


_CONTEXT = 128
"""Characters before a piece that may change its tokens: more than a special token or a word has."""


def encode_pieces(tokenizer: PreTrainedTokenizerBase, pieces: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each piece of a text. They depend on the text before it, and not on the text after.

    They are those of the whole text, if none of its tokens spans the beginning of a piece. SentencePiece writes a space
    before each text that it gets, so that pieces alone would have other tokens.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_after(before: str, piece: str) -> list[int]:
        for context in (before[-_CONTEXT:], "\n", "x"):  # of these one does not merge with the piece
            known, both = encode(context), encode(context + piece)
            if both[: len(known)] == known and len(both) > len(known):
                return both[len(known) :]
        return encode(piece)

    tokens: list[list[int]] = []
    before = ""
    for piece in pieces:
        tokens.append(encode_after(before, piece) if before and piece else encode(piece))
        before += piece
    return tokens

"""Histories of several turns, from messages to tokens: what the model sampled is never decoded and encoded again.

    open      <user>hi<end><assistant>
    sampled                             hello<end>
    extend                                      \n<user>bye<end><assistant>

What follows a turn is found by rendering a chat of the same roles with a marker in place of the turn:

    <user>...<end><assistant>MARK<end>\n<user>bye<end><assistant>
                             closing  |---------extend-----------

The model's own stop token stays in the history, also where the template closes a turn with another one (gpt-oss writes
<|end|> for <|return|>). In some templates the next role's marker ends a turn (GLM): the model samples that itself.

A template that writes earlier turns differently as the chat goes on cannot be continued, and is refused at the start.
Thoughts that a template would strip from earlier turns stay, as the model wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy as np

from cosmos_rl_core.episodes.interfaces import Message, Opening
from cosmos_rl_core.errors import PromptError, UserError
from cosmos_rl_core.types import ToolCall, Turn
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.data.spans import Template, encode_pieces
from cosmos_rl_llm.media.item import EMPTY_VIEW, View
from cosmos_rl_llm.tools.calls import find_call_format

_MARK = "Zq7xMark"
"""A turn of the model in a rendered chat: no template writes it."""
_NEXT = "Vw3xNext"
"""A message after it."""
_THOUGHT = re.compile(r"[<\[◁](think|thinking|thought|reasoning)[>\]▷]\s*\Z", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOpening(Opening):
    """The beginning of a chat."""

    view: View = EMPTY_VIEW
    """Its pictures and videos."""


@dataclass(frozen=True, slots=True)
class _Closing:
    """The end of a turn of the model, as a template writes it before a message of some role."""

    before: str = ""
    """Rest of the turn after the marker, such as the end of a call."""
    text: str = ""
    token: int | None = None
    """The closing token and its text; None and empty if nothing closes a turn."""


_CALLING = Turn(
    terms=np.zeros(0, np.int32),
    logprobs=np.zeros(0, np.float32),
    versions=np.zeros(0, np.int32),
    finish_reason="stop",
    calls=(ToolCall(name="add", arguments={"value": _MARK}, id="call12345"),),
)
"""A turn with a call, by which templates are tried. Mistral's take ids of nine letters or digits alone."""
_ANSWERS = {"name": _CALLING.calls[0].name, "tool_call_id": _CALLING.calls[0].id}
"""Keys of a tool's answer to it."""


class ChatContinuation:
    """`episodes.interfaces.Continuation` over a chat template, or over plain text, whose pieces follow each other.

    Raises UserError for a template that cannot be continued, with the first token that differs.
    """

    def __init__(self, chat: Chat, *, plain: bool = False, single_turn: bool = False) -> None:
        """plain: whether messages follow each other as text, also where the tokenizer has a chat template.

        single_turn: nothing is continued, so that the template need not allow it.
        """
        self._chat = chat
        self._is_plain = plain or chat.tokenizer.chat_template is None
        self._tokenizer = chat.tokenizer
        self._call_format = find_call_format(chat.tokenizer)
        if not (self._is_plain or single_turn):
            self._prove()

    def open(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), where: str = ""
    ) -> ChatOpening:
        """Return the tokens of a chat with the opening of the model's turn. Raises PromptError and MediaError."""
        row: dict[str, Any] = {
            "prompt": _joined(messages) if self._is_plain else self._call_format.for_template(messages)
        }
        if not row["prompt"]:
            raise PromptError(
                f"{where or 'an episode'}: it begins with no message; give the row a prompt, or let reset return one"
            )
        encoded = self._chat.encode_prompt({**row, "tools": list(tools)} if tools else row, where=where)
        return ChatOpening(
            terms=encoded.tokens,
            text=self._chat.decode_prompt(encoded.tokens.tolist()),
            arrays=encoded.view.arrays,
            view=encoded.view,
        )

    def open_text(self, prompt: str | Sequence[int]) -> ChatOpening:
        """Return a history that begins with a text, or with tokens, outside of the template. Raises PromptError."""
        if isinstance(prompt, str):
            encoded = self._chat.encode_prompt({"prompt": prompt}, where="prompt")
            return ChatOpening(terms=encoded.tokens, text=encoded.text, view=encoded.view)
        if not prompt or not all(0 <= token < len(self._tokenizer) for token in prompt):
            raise PromptError(f"prompt: send one token or more, from 0 to {len(self._tokenizer) - 1}")
        return ChatOpening(terms=np.array(prompt, np.int32), text=self.decode(prompt))

    def text(self, terms: np.ndarray) -> str:
        """Return the text of a turn without special tokens."""
        return self._chat.decode(terms)

    def extend(self, turn: Turn, messages: Sequence[Message]) -> np.ndarray:
        """Return the tokens [n] int32 between a turn and the next one. Raises PromptError."""
        if self._is_plain:
            tokens = encode_pieces(self._tokenizer, ["\n", _joined(messages)])[1]
            return np.array(tokens, dtype=np.int32)
        if not messages:
            raise PromptError("the environment answered nothing, and did not end the episode; nothing asks for a turn")
        stop = int(turn.terms[-1]) if len(turn.terms) and int(turn.terms[-1]) in self._chat.end_ids else None
        closing = self._closing(turn, messages)
        rest = self._after_mark([*self._dummy(turn, messages), *messages]).removeprefix(closing.before)
        if stop is not None and (stop == closing.token or closing.token not in self._role_markers):
            rest = rest.removeprefix(closing.text)
        return np.array(encode_pieces(self._tokenizer, [_MARK, rest])[1], dtype=np.int32)

    def parse(self, turn: Turn, *, tools: Sequence[Mapping[str, Any]] = ()) -> Turn:
        """Return the turn with its text, thoughts and calls."""
        parsed = self._call_format.parse(self._chat.decode_prompt(turn.terms), tools)
        return replace(turn, text=parsed.text, reasoning=parsed.reasoning, calls=parsed.calls, problem=parsed.problem)

    def decode(self, terms: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self._chat.decode_prompt(terms)

    def arrays(self, branches: Sequence[tuple[Opening, np.ndarray]]) -> Mapping[str, np.ndarray]:
        """Return `prompt_tokens` and `tokens`; of several branches those of the first, and the lengths of all."""
        first, *others = branches
        arrays = {
            "prompt_tokens": first[0].terms,
            "tokens": np.concatenate([terms for _, terms in branches]).astype(np.int32),
            **first[0].arrays,
        }
        if others:
            arrays["branch_lengths"] = np.array([[len(o.terms), len(terms)] for o, terms in branches], dtype=np.int32)
            arrays["branch_prompts"] = np.concatenate([opening.terms for opening, _ in others]).astype(np.int32)
        return arrays

    # The template.

    def _render(self, messages: Sequence[Message]) -> str:
        shown = self._call_format.for_template(messages)
        return Template(tokenizer=self._tokenizer, where="an episode").render(shown, opens=True)

    def _dummy(self, turn: Turn | None, answers: Sequence[Message]) -> list[Message]:
        """A chat that ends with the marker as the model's turn; with the turn's calls, which tools' answers name."""
        asked: Message = {"role": "user", "content": "ask"}
        if turn is None or not turn.calls:
            return [asked, {"role": "assistant", "content": _MARK}]
        ids = [str(answer.get("tool_call_id") or "") for answer in answers if answer["role"] == "tool"]
        ids += [call.id for call in turn.calls[len(ids) :]]
        calls = [
            {"id": own, "type": "function", "function": {"name": call.name, "arguments": {"value": _MARK}}}
            for call, own in zip(turn.calls, ids)
        ]
        return [asked, {"role": "assistant", "content": "", "tool_calls": calls}]

    def _after_mark(self, messages: Sequence[Message]) -> str:
        text = self._render(messages)
        place = text.rfind(_MARK)
        if place < 0:
            raise PromptError("the chat template does not write what the assistant said")
        return text[place + len(_MARK) :]

    def _closing(self, turn: Turn | None, answers: Sequence[Message]) -> _Closing:
        """The end of a turn before these messages: what the template writes between the marker and the first."""
        first, *others = answers
        chat = [*self._dummy(turn, answers), {**first, "content": _NEXT}, *others]
        return self._closing_in(self._after_mark(chat).partition(_NEXT)[0])

    def _closing_in(self, between: str) -> _Closing:
        tokens = encode_pieces(self._tokenizer, [_MARK, between])[1]
        ends = [place for place, token in enumerate(tokens) if token in self._chat.end_ids]
        if ends:
            place = ends[0]
        elif tokens and tokens[0] in self._tokenizer.all_special_ids:
            place = 0
        else:
            return _Closing()
        written = self._chat.decode_prompt(tokens[place : place + 1])
        return _Closing(between[: between.index(written)], written, tokens[place])

    @cached_property
    def _role_markers(self) -> frozenset[int]:
        """Closing tokens that are the marker of the next role, and not the same before all of them."""
        tokens = set()
        for role in ("user", "tool"):
            try:
                tokens.add(self._closing(None, [{"role": role, "content": "", **_ANSWERS}]).token)
            except PromptError:  # a template without tools
                continue
        return frozenset(token for token in tokens if token is not None) if len(tokens) > 1 else frozenset()

    # Proof.

    def _prove(self) -> None:
        """Raise UserError unless fixed chats are the same rendered at once and continued turn by turn."""
        said: Message = {"role": "assistant", "content": "One and one is two."}
        user = ({"role": "user", "content": text} for text in ("Add one and one.", "And one more?", "Is that all?"))
        first, second, third = user
        self._prove_chat([first, said, second])
        self._prove_chat([first, said, second, {**said, "content": "Three."}, third])
        if "tools" in str(self._tokenizer.chat_template):
            called = _CALLING.calls[0]
            function = {"name": called.name, "arguments": dict(called.arguments)}
            call = {"id": called.id, "type": "function", "function": function}
            answer = {"role": "tool", "content": "2", **_ANSWERS}
            self._prove_chat([first, {"role": "assistant", "content": "", "tool_calls": [call]}, answer])

    def _prove_chat(self, messages: Sequence[Message]) -> None:
        *_, said, answer = messages
        calls = _CALLING.calls if said.get("tool_calls") else ()
        try:
            before, whole = self._render(messages[:-2]), self._render(messages)
            turn = Turn(
                terms=np.array([min(self._chat.end_ids)], np.int32),
                logprobs=np.zeros(1, np.float32),
                versions=np.zeros(1, np.int32),
                finish_reason="stop",
                calls=calls,
            )
            closing = self._closing(turn, [answer])
            rest = self._after_mark([*self._dummy(turn, [answer]), answer])
            continued = rest.removeprefix(closing.before + closing.text)
        except PromptError as error:
            raise UserError(f"[environment]: {error.reason}; set data.chat_template to one that takes it") from error
        opened = _THOUGHT.sub("", before)  # a thought that the prompt opens is not in the rendered history
        if not whole.startswith(opened):
            raise self._differs(opened, whole)
        if not whole.endswith(continued):
            raise self._differs(continued, whole[-len(continued) :])

    def _differs(self, continued: str, whole: str) -> UserError:
        """The error of a template that rewrites a history, with the first token that differs."""
        columns = [
            [self._chat.decode_prompt([token]) for token in encode_pieces(self._tokenizer, [text])[0]]
            for text in (continued, whole)
        ]
        pairs = enumerate(zip_longest(*columns, fillvalue=""))
        place, (mine, other) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
        return UserError(
            "[environment]: the chat template writes earlier turns differently as the chat goes on, so that an episode "
            f"cannot be continued: after {''.join(columns[0][:place])[-60:]!r}, {mine!r} becomes {other!r}; set "
            "data.chat_template to one that does not"
        )


def _joined(messages: Sequence[Message]) -> str:
    return "".join(str(message["content"]) for message in messages)

"""Prompts and responses of both engines: encoding, limits of length, stop strings, rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cosmos_rl_core.errors import PromptError
from cosmos_rl_core.types import FinishReason, Prompt, Rollout, Sampling, Turn
from cosmos_rl_llm.data.chat import Chat, Encoded
from cosmos_rl_llm.data.reading import readers
from cosmos_rl_llm.media.item import EMPTY_VIEW, View
from cosmos_rl_llm.media.source import shows_media


async def encode(chat: Chat, prompt: Prompt) -> Encoded:
    """Return a prompt's tokens and pictures. Raises SampleError or UserError.

    Pictures and videos are fetched and decoded in a thread. A heartbeat leaves from the event loop: a replica that read
    a long video or waited for a server there would be taken for one that hangs.
    """
    if not shows_media(prompt.row.get("prompt")):
        return chat.encode_prompt(prompt.row, where=prompt.origin)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(readers(), lambda: chat.encode_prompt(prompt.row, where=prompt.origin))


def check_length(prompt: Prompt, length: int, sampling: Sampling, *, limit: int | None) -> None:
    """Raise PromptError for an empty prompt, and for one whose responses may exceed the context `limit`."""
    where, most = name_of(prompt), sampling.max_terms
    if length == 0:
        raise PromptError(f"{where}: the prompt has no tokens; check its column and the chat template")
    if limit is not None and length + most > limit:
        raise PromptError(
            f"{where}: the prompt has {length} tokens and with up to {most} new ones exceeds the context "
            f"of {limit}; shorten it, lower rollout.sampling.max_tokens or raise model.max_length"
        )


def name_of(prompt: Prompt) -> str:
    """Return the location of a prompt, for messages."""
    return prompt.origin or f"prompt {prompt.sample_id}"


_MARGIN = 8
"""Tokens decoded before the first position of a stop string, for tokenizers that trim a text's start."""


@dataclass(frozen=True, slots=True)
class StopStrings:
    """Strings that end a response; its tokens keep them, its text does not."""

    chat: Chat
    strings: Sequence[str]

    def end(self, tokens: Sequence[int]) -> bool:
        """Return whether the last of a response's tokens completed one; a token is at least one byte of it."""
        if not self.strings:
            return False
        longest = max(len(text.encode()) for text in self.strings)
        tail = self.chat.decode(tokens[-longest - _MARGIN :])
        return any(text in tail for text in self.strings)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a response up to the first of them."""
        text = self.chat.decode(tokens)
        ends = [place for stop in self.strings if (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text


@dataclass(eq=False, slots=True, kw_only=True)
class Response:
    """One sample of a prompt and its terms so far."""

    prompt_tokens: np.ndarray
    """[prompt] int32."""
    view: View = EMPTY_VIEW
    """Pictures and videos of the prompt."""
    stops: StopStrings | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def as_turn(self) -> Turn:
        """Return the finished sample as a turn of an episode."""
        assert self.finish_reason is not None
        return Turn(
            terms=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions[: len(self.tokens)], dtype=np.int32),
            finish_reason=self.finish_reason,
        )

    def as_rollout(self, arrays: Mapping[str, np.ndarray]) -> Rollout:
        """Return the finished sample. arrays: those beside its tokens and pictures."""
        assert self.finish_reason is not None and self.stops is not None
        tokens = np.array(self.tokens, dtype=np.int32)
        return Rollout(
            arrays={"prompt_tokens": self.prompt_tokens, "tokens": tokens, **self.view.arrays, **arrays},
            rollout_logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions[: len(tokens)], dtype=np.int32),
            loss_mask=np.ones(len(tokens), dtype=bool),
            text=self.stops.text(self.tokens),
            finish_reason=self.finish_reason,
        )

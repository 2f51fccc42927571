"""What both engines do alike with prompts and responses: encoding, limits of length, stop strings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from cosmos_rl_core.errors import PromptError
from cosmos_rl_core.types import Prompt, Sampling
from cosmos_rl_llm.data.chat import Chat, Encoded
from cosmos_rl_llm.data.reading import readers
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

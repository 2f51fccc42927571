"""Prompts to tokens in a rollout replica, whose event loop goes on meanwhile.

    text                          -> encoded at once
    with pictures and videos      -> fetched, decoded and encoded in one of a few threads

A heartbeat leaves from the event loop: a replica that read a long video or waited for a server there would be taken
for one that hangs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cosmos_rl_core.types import Prompt
from cosmos_rl_llm.data.chat import Encoded
from cosmos_rl_llm.media.source import shows_media

THREADS = 8
"""Maximum number of prompts with pictures or videos that are read at once; no more than there are cores."""


class PromptEncoder:
    """Encodes prompts for an engine.

    encoded = await encoder(prompt)       # raises what the function raises: SampleError or UserError
    """

    def __init__(self, encode: Callable[[Prompt], Encoded]) -> None:
        """encode: may be called from several threads at once."""
        self._encode = encode
        threads = min(THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="prompt-media")

    async def __call__(self, prompt: Prompt) -> Encoded:
        if not shows_media(prompt.row.get("prompt")):
            return self._encode(prompt)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._encode, prompt)

    def close(self) -> None:
        """Encode nothing more. What is being read ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

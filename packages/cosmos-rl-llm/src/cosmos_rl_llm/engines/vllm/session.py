"""Histories of vLLM that grow by turns.

turn 0   prompt                            -> drawn        salt of the cache: the version of the weights
turn 1   prompt, drawn, appended           -> drawn        the same salt: keys and values of all full blocks are there

Each turn is a request with all tokens so far, as they were drawn. vLLM's prefix cache keeps keys and values while an
environment answers, as long as it has room. After a switch of weights those of earlier turns stay in use, as they do
inside of a sequence; with `recompute_kv` they are computed again with the new weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cosmos_rl_core.episodes.interfaces import Opening
from cosmos_rl_core.types import Sampling, Turn
from cosmos_rl_llm.data.chat import Encoded
from cosmos_rl_llm.data.continuation import ChatOpening
from cosmos_rl_llm.media.item import EMPTY_VIEW

if TYPE_CHECKING:
    from cosmos_rl_llm.engines.vllm.engine import VllmEngine


class VllmSession:
    """Implements `episodes.interfaces.Session`."""

    def __init__(self, engine: VllmEngine, opening: Opening, *, keeps_salt: bool) -> None:
        """keeps_salt: whether all turns read keys and values under the version of the first."""
        self._engine = engine
        self._history = opening.terms
        self._view = opening.view if isinstance(opening, ChatOpening) else EMPTY_VIEW
        self._keeps_salt = keeps_salt
        self._salt: int | None = None
        self.limit: int | None = engine.max_length

    async def extend(self, terms: np.ndarray, *, sampling: Sampling, seed: int) -> Turn:
        self._history = np.concatenate([self._history, terms]).astype(np.int32)
        if self._salt is None or not self._keeps_salt:
            self._salt = self._engine.version
        encoded = Encoded(text="", tokens=self._history, view=self._view)
        sequence = await self._engine.draw(encoded, salt=self._salt, sampling=sampling, seed=seed)
        assert sequence.finish_reason is not None, "the request has ended"
        drawn = np.array(sequence.tokens, dtype=np.int32)
        self._history = np.concatenate([self._history, drawn])
        return Turn(
            terms=drawn,
            logprobs=np.array(sequence.logprobs, dtype=np.float32),
            versions=np.array(sequence.versions[: len(drawn)], dtype=np.int32),
            finish_reason=sequence.finish_reason,
        )

    def close(self) -> None:
        """Nothing is reserved: vLLM's cache drops blocks that nothing has read for longest."""

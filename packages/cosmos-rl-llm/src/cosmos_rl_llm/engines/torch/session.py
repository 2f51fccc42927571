"""Histories of the torch engine that grow by turns, and their keys and values while an environment answers.

turn 0   prompt -> decode                      keys and values of all but the last token are kept
turn 1   last token, appended tokens -> decode              in one pass that attends to them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cosmos_rl_core.episodes.interfaces import Opening
from cosmos_rl_core.types import Sampling, Turn
from cosmos_rl_llm.data.continuation import ChatOpening
from cosmos_rl_llm.engines.torch.cache import KeptTerms
from cosmos_rl_llm.media.item import EMPTY_VIEW, View

if TYPE_CHECKING:
    from cosmos_rl_llm.engines.torch.engine import TorchEngine


@dataclass(eq=False, slots=True)
class History:
    """All tokens of an episode's branch so far."""

    tokens: np.ndarray
    """[n] int32."""
    view: View = EMPTY_VIEW


class WaitingTerms:
    """Keys and values of histories between two turns, within a limit of memory. Used by the event loop alone."""

    def __init__(self, limit: int) -> None:
        """limit: bytes; 0 keeps nothing."""
        self.limit = limit
        self._kept: dict[History, KeptTerms] = {}
        """In the order of their last turns."""
        self._bytes = 0

    def put(self, history: History, kept: KeptTerms) -> None:
        """Keep those of a history, in place of others that have waited longest."""
        self._kept[history] = kept
        self._bytes += kept.num_bytes
        while self._bytes > self.limit:
            self.take(next(iter(self._kept)))

    def take(self, history: History) -> KeptTerms | None:
        """Return those of a history, if they are still there, and keep them no longer."""
        kept = self._kept.pop(history, None)
        if kept is not None:
            self._bytes -= kept.num_bytes
        return kept

    def free(self) -> None:
        self._kept.clear()
        self._bytes = 0


class TorchSession:
    """Implements `episodes.interfaces.Session`."""

    def __init__(self, engine: TorchEngine, opening: Opening) -> None:
        self._engine = engine
        view = opening.view if isinstance(opening, ChatOpening) else EMPTY_VIEW
        self._history = History(opening.terms, view)
        self.limit = engine.max_length

    async def extend(self, terms: np.ndarray, *, sampling: Sampling, seed: int) -> Turn:
        history = self._history
        history.tokens = np.concatenate([history.tokens, terms]).astype(np.int32)
        sequence = await self._engine.draw(history, sampling=sampling, seed=seed)
        assert sequence.finish_reason is not None, "the request has ended"
        drawn = np.array(sequence.tokens, dtype=np.int32)
        history.tokens = np.concatenate([history.tokens, drawn])
        return Turn(
            terms=drawn,
            logprobs=np.array(sequence.logprobs, dtype=np.float32),
            versions=np.array(sequence.versions, dtype=np.int32),
            finish_reason=sequence.finish_reason,
        )

    def close(self) -> None:
        self._engine.forget(self._history)

"""Histories that grow by turns, of both engines: all tokens so far, as they were sampled and appended.

    turn 0   prompt                    -> sampled
    turn 1   prompt, sampled, appended   -> sampled        the engine knows keys and values of the first tokens

The torch engine keeps keys and values by itself while an environment answers (`torch.cache.WaitingTerms`), vLLM in its
prefix cache.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from cosmos_rl_core.episodes.interfaces import Opening
from cosmos_rl_core.types import Prompt, Sampling, Turn
from cosmos_rl_llm.config import ROUTES
from cosmos_rl_llm.data.continuation import ChatOpening
from cosmos_rl_llm.engines.prompts import Response
from cosmos_rl_llm.media.item import EMPTY_VIEW, View

NO_EPISODES = f"{ROUTES}: the experts of episodes are not recorded; set it to false"
EPISODE = Prompt(sample_id=0, row={}, origin="an episode")
"""Stands for the prompt of a history, in messages."""


@dataclass(eq=False, slots=True)
class SessionTokens:
    """All tokens of an episode's branch so far."""

    tokens: np.ndarray
    """[n] int32."""
    view: View = EMPTY_VIEW
    """Pictures and videos among them."""
    salt: int | None = None
    """vLLM's: version under which keys and values are cached."""


Draw = Callable[[SessionTokens, Sampling, int], Awaitable[Response]]
"""Samples a response after a history, with a seed."""


class TokenSession:
    """Implements `episodes.interfaces.Session`."""

    def __init__(
        self,
        opening: Opening,
        *,
        limit: int | None,
        draw: Draw,
        forget: Callable[[SessionTokens], object] = lambda history: None,
    ) -> None:
        """forget: frees what the engine keeps of a history."""
        self._history = SessionTokens(opening.terms, opening.view if isinstance(opening, ChatOpening) else EMPTY_VIEW)
        self._draw, self._forget = draw, forget
        self.limit = limit

    async def extend(self, terms: np.ndarray, *, sampling: Sampling, seed: int) -> Turn:
        history = self._history
        history.tokens = np.concatenate([history.tokens, terms]).astype(np.int32)
        turn = (await self._draw(history, sampling, seed)).as_turn()
        history.tokens = np.concatenate([history.tokens, turn.terms])
        return turn

    def close(self) -> None:
        self._forget(self._history)

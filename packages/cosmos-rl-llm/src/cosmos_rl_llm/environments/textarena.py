"""TextArena: games in words, for one player or against players of yours."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from cosmos_rl_core import plugins
from cosmos_rl_core.episodes.interfaces import Environment, Observation
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import Turn
from cosmos_rl_llm.environments import imported


class TextArena(Environment):
    """A game that the model plays as player 0. The row's "index" and "seed" choose the game's chance."""

    def __init__(
        self, *, id: str, options: Mapping[str, Any] | None = None, num_players: int = 1, opponent: str = ""
    ) -> None:
        """id: such as "GuessTheNumber-v0". options: of the game. opponent: "module:function" that all other players
        call with what they see, and that returns what they do."""
        self._arena = imported("textarena", requirement="textarena")
        self._players = num_players
        if num_players > 1 and not opponent:
            raise UserError('a game for several players needs the option opponent = "module:function"')
        self._opponent: Callable[[str], str] | None = plugins.attribute(opponent, kind="opponent") if opponent else None
        try:  # "-raw": without wrappers, which repeat the whole game in each message
            self._game = self._arena.make(id if id.endswith("-raw") else f"{id}-raw", **(options or {}))
        except (TypeError, ValueError, ImportError, LookupError) as error:  # LookupError: of nltk, a list of words
            raise UserError(f"textarena {id}: {error}") from error

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self._chance = random.Random(f"{row['seed']} {row.get('index')}").getstate()
        self._in_chance(lambda: self._game.reset(num_players=self._players))
        self._in_chance(self._others, False)
        return Observation(self._seen(0))

    async def step(self, said: str, turn: Turn) -> Observation:
        done, _ = self._in_chance(self._game.step, said)
        done = self._in_chance(self._others, done)
        if not done:
            return Observation(self._seen(0))
        rewards, info = self._game.close()
        metrics = {"invalid_move": float(info[0].get("invalid_move", False)), "moves": float(info[0]["turn_count"])}
        return Observation(self._seen(0), reward=float(rewards[0]), done=True, metrics=metrics)

    def _others(self, done: bool) -> bool:
        """Let the other players play until it is the model's turn; return whether the game has ended."""
        while not done and (player := self._game.state.current_player_id) != 0:
            assert self._opponent is not None
            done, _ = self._game.step(self._opponent(self._seen(player)))
        return done

    def _seen(self, player: int) -> str:
        """Return and forget what is new for a player, without what it has said itself."""
        new, self._game.state.observations[player] = self._game.state.observations[player], []
        return "\n".join(text for origin, text, _ in new if origin != player)

    def _in_chance(self, play: Callable[..., Any], *arguments: Any) -> Any:
        """Call with this episode's state of Python's global random numbers, which games use."""
        outside = random.getstate()
        random.setstate(self._chance)
        try:
            return play(*arguments)
        finally:
            self._chance = random.getstate()
            random.setstate(outside)

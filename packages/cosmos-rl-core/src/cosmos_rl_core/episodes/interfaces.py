"""The interfaces of an episode: the environment, the session of an engine, and the continuation between them.

    environment.reset(row) -> messages -> continuation.open -> session
    session.extend -> turn -> continuation.parse -> environment.step -> messages -> continuation.extend -> session ...

Terms that the model sampled are never decoded and encoded again: the next turn is sampled after the terms of all turns
so far and those that `Continuation.extend` appends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from cosmos_rl_core.interfaces import RolloutEngine
from cosmos_rl_core.types import Sampling, Turn

Message = Mapping[str, Any]
"""A chat message: {"role": "user", "content": "..."}; a tool's answer has also "tool_call_id" and "name"."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The answer of an environment."""

    messages: str | Sequence[Message] = ()
    """Appended to the history; a text is one message of the user."""
    reward: float | None = None
    """Of the turn that it answers; None: none is given."""
    done: bool = False
    """Whether the episode has come to its own end."""
    history: Sequence[Message] | None = None
    """Replaces the whole history, as after a compaction: the next turn begins a branch. `messages` are then unused."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Reported as means over the episodes that have them, under environment/; those of several turns are added up."""

    @property
    def as_messages(self) -> list[Message]:
        if isinstance(self.messages, str):
            return [{"role": "user", "content": self.messages}]
        return list(self.messages)


class Environment(ABC):
    """One episode. Built for each anew; `reset` comes first and once.

        class GuessGame(Environment):
            async def reset(self, row):
                self.secret = row["secret"]
                return Observation("Guess a number from 0 to 7.")

            async def step(self, said, turn):
                guess = int(said)
                if guess == self.secret:
                    return Observation("right", reward=1.0, done=True)
                return Observation("higher" if guess < self.secret else "lower")

    Methods may be plain functions, which then run in threads. An exception ends the episode, which is tried again; an
    error of the model, such as a number that is none, is an observation.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the functions that the model may call, for the chat template. May be set by `reset`."""

    @abstractmethod
    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """Begin. row: the prompt's, with its messages in "prompt" if it has any, and "seed", an integer that all
        episodes of a prompt have in common. The messages follow those of the row."""

    @abstractmethod
    async def step(self, said: str, turn: Turn) -> Observation:
        """Answer a turn. said: its text. A turn that was cut (`turn.finish_reason == "length"`) is the last one: the
        observation may give it a reward, and its messages are not used."""

    async def close(self) -> None:  # noqa: B027  optional
        """Free what the episode holds. Called once, also after an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The beginning of a history, as the model reads it."""

    terms: np.ndarray
    """[prompt] int32."""
    text: str
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The domain's own inputs beside the terms, such as pictures."""


class Continuation(Protocol):
    """Turns messages into terms and terms into what was said; one for each chat template.

    Raises UserError where it is built for a template that writes earlier turns differently as the chat goes on.
    """

    def open(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), where: str = "") -> Opening:
        """Return a history from its beginning, with the opening of the model's turn. Raises PromptError."""
        ...

    def extend(self, turn: Turn, messages: Sequence[Message]) -> np.ndarray:
        """Return the terms [n] int32 that follow a turn's own: the end of the turn, as far as the model did not draw
        it, the messages, and the opening of the next turn. Raises PromptError."""
        ...

    def parse(self, turn: Turn, *, tools: Sequence[Mapping[str, Any]] = ()) -> Turn:
        """Return the turn with what it says and calls."""
        ...

    def arrays(self, branches: Sequence[tuple[Opening, np.ndarray]]) -> Mapping[str, np.ndarray]:
        """Return `Rollout.arrays` of an episode: of each branch its opening, and all terms [T] that follow."""
        ...


class Session(Protocol):
    """A history in an engine, which grows by turns. The engine may keep keys and values of it between them."""

    limit: int | None
    """Terms of the whole history that the model can read; None: no limit."""

    async def extend(self, terms: np.ndarray, *, sampling: Sampling, seed: int) -> Turn:
        """Append terms [n] int32 and draw a turn after them, of at most `sampling.max_terms`.

        The first call appends none: the history begins with its opening. Raises PromptError for one that does not fit
        into the engine. Cancelling the task frees the sequence.
        """
        ...

    def close(self) -> None:
        """Forget the history."""
        ...


@runtime_checkable
class HoldsSessions(RolloutEngine, Protocol):
    """An engine that can draw an episode turn by turn."""

    def open(self, opening: Opening) -> Session: ...

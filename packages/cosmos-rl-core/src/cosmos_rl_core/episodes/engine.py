"""Episodes of several turns: for each of a prompt's rollouts an environment and a session of the engine.

    row -> environment.reset -> open -> [draw -> parse -> environment.step -> append]* -> Rollout

Each episode is a task of its own, so that its engine works on other episodes while an environment answers.

consumes   prompts
produces   rollouts with one step for each turn
waits for  a place (`max_episodes`), the engine, the environment
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from cosmos_rl_core.episodes.build import Environments
from cosmos_rl_core.episodes.config import EnvironmentSection
from cosmos_rl_core.episodes.history import EpisodeHistory
from cosmos_rl_core.episodes.interfaces import (
    Continuation,
    Environment,
    HoldsSessions,
    Message,
    Opening,
    Session,
)
from cosmos_rl_core.errors import PromptError, SampleError, UserError
from cosmos_rl_core.types import FinishReason, Prompt, Rollout, Sampling, Turn

T = TypeVar("T")

_NOTHING = np.zeros(0, np.int32)


class EnvironmentFailed(Exception):
    """The environment raised, took too long or answered with something other than an observation."""


class EpisodeGenerator:
    """Generates the rollouts of a prompt as episodes, in place of `RolloutEngine.generate`.

    prompt_text, rollouts = await episodes.generate(prompt, num_samples=8, sampling=sampling, seed=7)
    """

    def __init__(
        self,
        engine: HoldsSessions,
        continuation: Continuation,
        environments: Environments,
        section: EnvironmentSection,
    ) -> None:
        self.engine, self.continuation, self.environments = engine, continuation, environments
        self.section = section
        self._places = asyncio.Semaphore(section.max_episodes)
        self._num_answering = 0
        self.num_sampling = 0
        """Turns that the engine is asked for."""

    @property
    def is_waiting(self) -> bool:
        """Whether all episodes wait for environments, which have a time limit, and none for the engine."""
        return self._num_answering > 0 and not self.num_sampling

    async def generate(
        self, prompt: Prompt, *, num_samples: int, sampling: Sampling, seed: int
    ) -> tuple[str, list[Rollout]]:
        """Return the first prompt as the model saw it, and a rollout for each episode (as `RolloutEngine.generate`).

        `sampling.max_terms` limits the terms of an episode after its first prompt, the environment's included. Raises
        SampleError where an environment fails in all of its tries.
        """
        tasks = [
            asyncio.create_task(self._episode(prompt, number, sampling=sampling, seed=seed))
            for number in range(num_samples)
        ]
        try:
            finished = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return finished[0][0], [rollout for _, rollout in finished]

    async def _episode(self, prompt: Prompt, number: int, *, sampling: Sampling, seed: int) -> tuple[str, Rollout]:
        """Run one episode, again if its environment fails."""
        for tries in range(self.section.retries + 1):
            async with self._places:
                run = _EpisodeRun(self, prompt, sampling=sampling, seed=seed, number=number)
                try:
                    return await run.run()
                except EnvironmentFailed as error:
                    if tries == self.section.retries:
                        name, where = self.section.name, place_of(prompt)
                        raise SampleError(f"[environment] {name} failed on {where}: {error}") from error
        raise AssertionError("the last try returns or raises")

    def build(self) -> Environment:
        """Build the environment of an episode. Raises EnvironmentFailed: its options were right at the start."""
        try:
            return self.environments.make()
        except Exception as error:  # user code may raise anything
            raise EnvironmentFailed(str(error)) from error

    async def answer(self, method: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Call a method of an environment within the time limit.

        Raises EnvironmentFailed, and an environment's own UserError and SampleError.
        """
        limit_s = self.section.timeout_s
        limit = asyncio.timeout(limit_s)
        self._num_answering += 1
        try:
            async with limit:
                return await method(*arguments)
        except (UserError, SampleError):
            raise
        except Exception as error:  # user code may raise anything; the episode is tried again, and the reason shown
            name = method.__name__
            if limit.expired():
                raise EnvironmentFailed(f"{name} took longer than [environment] timeout_s = {limit_s:g}") from error
            raise EnvironmentFailed(f"{name} raised {type(error).__name__}: {error}") from error
        finally:
            self._num_answering -= 1


class _EpisodeRun:
    """One try of an episode."""

    def __init__(
        self, generator: EpisodeGenerator, prompt: Prompt, *, sampling: Sampling, seed: int, number: int
    ) -> None:
        self._generator, self._prompt = generator, prompt
        self._sampling, self._seed, self._number = sampling, seed, number
        self._where = place_of(prompt)
        self._history = EpisodeHistory()
        self._session: Session | None = None
        self._branch = 0
        self._model_s = 0.0
        """Time of the last turn."""
        self._branch_terms = 0
        """Terms of the current branch, its opening included."""

    async def run(self) -> tuple[str, Rollout]:
        """Return the first prompt and the rollout. Raises EnvironmentFailed, and SampleError as an engine does."""
        generator, row = self._generator, self._prompt.row
        environment = generator.build()
        try:
            row = {"seed": self._seed, **row}
            first = await generator.answer(environment.reset, row)
            opening = self._begin([*messages_of(row), *first.as_messages], environment)
            reason = await self._turns(environment)
        finally:
            self._close_session()
            with suppress(EnvironmentFailed):  # its answers are in; what it failed to free is its own
                await generator.answer(environment.close)
        rollout = self._history.rollout(generator.continuation, finish_reason=reason)
        return opening.text, self._with_rewards(rollout, reason)

    def _begin(self, messages: Sequence[Message], environment: Environment) -> Opening:
        """Begin a branch: the first, or one whose history was rewritten."""
        opening = self._generator.continuation.open(messages, tools=environment.tools, where=self._where)
        self._close_session()
        self._session = self._generator.engine.open(opening)
        self._branch, self._branch_terms = self._history.begin(opening), len(opening.terms)
        return opening

    def _close_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    async def _turns(self, environment: Environment) -> FinishReason:
        """Draw turns and let the environment answer until one of them, or a limit, ends the episode."""
        section, continuation = self._generator.section, self._generator.continuation
        appended = _NOTHING
        for number in range(section.max_turns):
            room = self._room(len(appended))
            if room < 1 and not number:
                raise PromptError(
                    f"{self._where}: the first prompt has {self._branch_terms} tokens, and the model reads "
                    f"{self._session and self._session.limit}; shorten it or raise model.max_length"
                )
            if room < 1:
                break
            turn = await self._draw(appended, room, number=number)
            turn = continuation.parse(turn, tools=environment.tools)
            place = self._history.add(self._branch, appended, turn, model_s=self._model_s)
            self._branch_terms += len(appended) + len(turn.terms)
            began = time.perf_counter()
            observation = await self._generator.answer(environment.step, turn.text, turn)
            cut = turn.finish_reason != "stop"  # without a stop token nothing can follow
            ends = observation.done or cut or number + 1 == section.max_turns
            self._history.answer(
                place,
                [] if cut else observation.as_messages,
                reward=observation.reward,
                metrics=dict(observation.metrics),
                environment_s=time.perf_counter() - began,
            )
            if ends:
                return "stop" if observation.done else "length"
            if observation.history is not None:
                self._begin(observation.history, environment)
                appended = _NOTHING
            else:
                appended = continuation.extend(turn, observation.as_messages)
        return "length"

    async def _draw(self, appended: np.ndarray, room: int, *, number: int) -> Turn:
        assert self._session is not None, "a branch was begun"
        most = self._generator.section.max_turn_tokens
        sampling = replace(self._sampling, max_terms=room if most is None else min(room, most))
        seed = np.random.SeedSequence([self._seed, self._number, number]).generate_state(1, np.uint64)
        began = time.perf_counter()
        self._generator.num_sampling += 1
        try:
            return await self._session.extend(appended, sampling=sampling, seed=int(seed[0] >> np.uint64(1)))
        finally:
            self._generator.num_sampling -= 1
            self._model_s = time.perf_counter() - began

    def _room(self, num_appended: int) -> int:
        """Terms that the next turn may have: within the episode's limit, and the model's context."""
        assert self._session is not None, "a branch was begun"
        room = self._sampling.max_terms - self._history.num_terms - num_appended
        limit = self._session.limit
        return room if limit is None else min(room, limit - self._branch_terms - num_appended)

    def _with_rewards(self, rollout: Rollout, reason: FinishReason) -> Rollout:
        """Return the rollout with the recipe's reward of an episode that was cut and that nobody gave one."""
        unfinished = self._generator.section.unfinished_reward
        if reason == "stop" or unfinished is None or any(each.reward is not None for each in rollout.exchanges):
            return rollout
        *before, last = rollout.exchanges
        return replace(rollout, exchanges=(*before, replace(last, reward=unfinished)))


def place_of(prompt: Prompt) -> str:
    """Return the location of a prompt's row, for messages."""
    return prompt.origin or f"prompt {prompt.sample_id}"


def messages_of(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a row's prompt; a text is one message of the user."""
    prompt = row.get("prompt") or ()
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

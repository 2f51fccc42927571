"""Conformance checks of environments, for the tests of plug-ins.

    @pytest.mark.parametrize("check", ENVIRONMENT_CHECKS)
    def test_my_game(check):
        asyncio.run(check(lambda: Guess(top=7), rows, ["3", "5"]))

or all of them: `asyncio.run(check_environment(lambda: Guess(top=7), rows, said=["3", "5"]))`. rows: of the data set,
two or more that differ. said: the texts of the model's turns, one after the other and from the first again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from cosmos_rl_core.episodes.build import Environments
from cosmos_rl_core.episodes.interfaces import Environment, Observation
from cosmos_rl_core.types import FinishReason, Turn

MakeEnvironment = Callable[[], Environment]
Rows = Sequence[Mapping[str, Any]]
EnvironmentCheck = Callable[[MakeEnvironment, Rows, Sequence[str]], Coroutine[Any, Any, None]]

_MAX_TURNS = 20
_STRANGE = ("", "\N{SNOWMAN} \x00 \ud7ff", "[" * 1000, "1e999", "None", "<tool_call>{", "word " * 2000)
"""Texts that any model may say."""


def turn_of(said: str, finish_reason: FinishReason = "stop", *, problem: str = "") -> Turn:
    """Return a turn that says a text, of one term for each of its bytes."""
    terms = np.frombuffer(said.encode(), np.uint8).astype(np.int32)
    zeros = np.zeros(len(terms), np.int32)
    return Turn(
        terms=terms,
        logprobs=zeros.astype(np.float32),
        versions=zeros,
        finish_reason=finish_reason,
        text=said,
        problem=problem,
    )


async def begins_with_a_message(make: MakeEnvironment, rows: Rows, said: Sequence[str]) -> None:
    """The first observation asks something, is not the end, and does not change the row; tools have a name."""
    async with _Stage(make) as stage:
        for row in rows:
            before = deepcopy(dict(row))
            environment, first = await stage.begin(row)
            assert dict(row) == before
            assert first.as_messages or row.get("prompt"), "neither the row nor the environment has a message"
            assert not first.done
            tools = json.loads(json.dumps(list(environment.tools), allow_nan=False))
            assert all(isinstance(tool.get("function", tool).get("name"), str) for tool in tools), tools


async def plays_to_an_end(make: MakeEnvironment, rows: Rows, said: Sequence[str]) -> None:
    """Turns are answered by messages of JSON and finite rewards, until the end."""
    async with _Stage(make) as stage:
        for row in rows:
            observations = await stage.play(row, said)
            goes_on = [one for one in observations[1:] if not one.done]  # the first may leave it to the row
            assert all(one.as_messages or one.history for one in goes_on), "an observation without a message"


async def repeats_with_a_seed(make: MakeEnvironment, rows: Rows, said: Sequence[str]) -> None:
    """An episode of the same row and seed is the same again, if the same is said."""
    async with _Stage(make) as stage:
        for row in rows:
            first, again = [_seen(await stage.play(row, said)) for _ in range(2)]
            assert first == again


async def shares_nothing(make: MakeEnvironment, rows: Rows, said: Sequence[str]) -> None:
    """Episodes that are played side by side are those that are played one after the other."""
    async with _Stage(make) as stage:
        alone = [_seen(await stage.play(row, said)) for row in rows]
        together = await asyncio.gather(*(stage.play(row, said) for row in [*rows, *rows]))
        assert [_seen(one) for one in together] == [*alone, *alone]


async def answers_anything(make: MakeEnvironment, rows: Rows, said: Sequence[str]) -> None:
    """A text of no sense, a call that does not parse and a turn that was cut are answered, without an exception."""
    cut, broken = turn_of(said[0], "length"), turn_of("", problem="the call is no JSON")
    async with _Stage(make) as stage:
        for turn in (*map(turn_of, _STRANGE), cut, broken):
            environment, _ = await stage.begin(rows[0])
            _in_json(await environment.step(turn.text, turn))


async def closes_at_any_time(make: MakeEnvironment, rows: Rows, said: Sequence[str]) -> None:
    """`close` works before `reset`, which may have failed, after it, and after a turn."""
    async with _Stage(make) as stage:
        await stage.environments.make().close()
        await (await stage.begin(rows[0]))[0].close()
        environment, _ = await stage.begin(rows[0])
        await environment.step(said[0], turn_of(said[0]))
        await environment.close()


ENVIRONMENT_CHECKS: Sequence[EnvironmentCheck] = (
    begins_with_a_message,
    plays_to_an_end,
    repeats_with_a_seed,
    shares_nothing,
    answers_anything,
    closes_at_any_time,
)


async def check_environment(make: MakeEnvironment, rows: Rows, *, said: Sequence[str]) -> None:
    """All of ENVIRONMENT_CHECKS."""
    for check in ENVIRONMENT_CHECKS:
        await check(make, rows, said)


class _Stage:
    """Plays episodes, and closes those that the check has not."""

    def __init__(self, make: MakeEnvironment) -> None:
        self.environments = Environments(make, label="the environment")
        self._open: list[Environment] = []

    async def __aenter__(self) -> _Stage:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.environments.close()

    async def begin(self, row: Mapping[str, Any]) -> tuple[Environment, Observation]:
        environment = self.environments.make()
        return environment, _in_json(await environment.reset({"seed": 7, **row}))

    async def play(self, row: Mapping[str, Any], said: Sequence[str]) -> list[Observation]:
        """Return the observations of an episode."""
        environment, observation = await self.begin(row)
        observations = [observation]
        try:
            while not observations[-1].done and len(observations) <= _MAX_TURNS:
                await asyncio.sleep(0)  # the turns of episodes that are played side by side alternate
                text = said[(len(observations) - 1) % len(said)]
                observations.append(_in_json(await environment.step(text, turn_of(text))))
        finally:
            await environment.close()
        return observations


def _in_json(observation: Observation) -> Observation:
    for messages in (observation.as_messages, observation.history or []):
        assert json.loads(json.dumps(list(messages), allow_nan=False)) == list(messages), messages
    return observation


def _seen(observations: Sequence[Observation]) -> list[Any]:
    return [(one.as_messages, one.history, one.reward, one.done) for one in observations]

"""Environments of episodes: found by name, built with their options, checked at each answer."""

import asyncio
import threading
from importlib import import_module

import numpy as np
import pytest

from cosmos_rl_core.episodes.build import build_environments
from cosmos_rl_core.episodes.config import EnvironmentSection
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import VARIABLE
from cosmos_rl_core.launch.preflight.checks import CODE, problems_among
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.testing.tiny import TINY
from cosmos_rl_core.types import Turn

GAMES = """
import threading

from cosmos_rl_core import Environment, Observation

class Guess(Environment):
    def __init__(self, *, top=7, answer=None):
        self.top, self.answer = top, answer
        if top < 1:
            raise ValueError("top is below 1")

    async def reset(self, row):
        self.secret = row["secret"]
        self.tools = [{"name": "peek"}]
        return Observation(f"0 to {self.top}")

    async def step(self, said, turn):
        if self.answer is not None:
            return self.answer
        return Observation("right" if int(said) == self.secret else "wrong", reward=1.0, done=True)

class Plain(Environment):
    closed = []

    def reset(self, row):
        return Observation(threading.current_thread().name)

    def step(self, said, turn):
        return next(iter(()))

    def close(self):
        Plain.closed.append(threading.current_thread().name)

class Half(Environment):
    async def reset(self, row):
        return Observation("")

def function():
    return None
"""
TURN = Turn(
    terms=np.zeros(1, np.int32),
    logprobs=np.zeros(1, np.float32),
    versions=np.zeros(1, np.int32),
    finish_reason="stop",
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "some_games.py").write_text(GAMES)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def section(name="Guess", **options):
    return EnvironmentSection(name=f"some_games:{name}", options=options)


def played(one, said="3", row=None):
    """Play an episode of one turn; return the environment and its two observations."""

    async def go():
        environments = build_environments(one)
        environment = environments.make()
        first = await environment.reset(row or {"secret": 3})
        try:
            return environment, first, await environment.step(said, TURN)
        finally:
            await environment.close()
            await environments.close()

    return asyncio.run(go())


def test_an_episode_gets_an_environment_of_its_own_with_the_options():
    environment, first, second = played(section(top=4))
    assert first.messages == "0 to 4"
    assert (second.messages, second.reward, second.done) == ("right", 1.0, True)
    assert environment.tools == [{"name": "peek"}]


def test_plain_functions_run_in_threads():
    with pytest.raises(RuntimeError, match="StopIteration"):
        played(section("Plain"))
    (closed,) = import_module("some_games").Plain.closed
    assert closed.startswith("environment") and closed != threading.current_thread().name


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (section(tp=3), "does not take options {'tp': 3}: .*; known options: top, answer"),
        (section(top=0), "does not take options {'top': 0}: top is below 1$"),
        (section("Half"), "lacks step: define"),
        (section("function"), "is <function function .*>: name a class derived from cosmos_rl_core.Environment"),
        (section("Gess"), "has no attribute 'Gess'"),
        (EnvironmentSection(name="guess"), "no environment is called 'guess'"),
    ],
)
def test_what_cannot_be_built_is_refused_at_once(one, message):
    with pytest.raises(UserError, match=message):
        build_environments(one)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ("yes", TypeError, "Guess.step returned 'yes': return an Observation"),
        ({"messages": [{"role": "tool", "content": {1, 2}.__len__}]}, TypeError, "which is not JSON"),
        ({"messages": "half a pair: \ud800"}, TypeError, "which is not JSON"),
        ({"messages": [{"role": "user"}]}, TypeError, """{'role': 'user'}: give it "role" and "content\""""),
        ({"history": ["hello"]}, TypeError, "'hello': give it"),
        ({"reward": float("nan")}, ValueError, "nan as a reward: return a finite number"),
        ({"metrics": {"moves": float("inf")}}, ValueError, "inf as moves"),
    ],
)
def test_an_observation_that_no_episode_can_record_is_an_error(answer, error, message):
    from cosmos_rl_core import Observation

    with pytest.raises(error, match=message):
        played(section(answer=Observation(**answer) if isinstance(answer, dict) else answer))


def test_a_check_of_a_recipe_builds_the_environment():
    checks = [check for check in CODE if check.key == "environment.name"]
    for name, wrong in (("Guess", []), ("Gess", ["has no attribute 'Gess'"]), ("Half", ["lacks step"])):
        run = {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 1}
        config = load_config({"run": run, "environment": {"name": f"some_games:{name}"}})
        problems = problems_among(checks, config, TINY)
        assert [problem.key for problem in problems] == ["environment.name"] * len(wrong)
        assert all(text in problem.wrong for text, problem in zip(wrong, problems, strict=True))

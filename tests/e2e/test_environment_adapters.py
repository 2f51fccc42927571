"""Environments of other projects, each installed into an environment of its own, pass the conformance checks there."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cosmos_rl_core.episodes.build import build_environments, check_section
from cosmos_rl_core.episodes.config import EnvironmentSection
from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.imports import VARIABLE
from cosmos_rl_core.testing.environments import check_environment, turn_of
from cosmos_rl_core.types import ToolCall

UV = str(Path(sys.executable).with_name("uv"))
ROWS = [{"index": 0}, {"index": 1}]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXT_GAME = """
import gymnasium
from gymnasium.spaces import Text

class Guess(gymnasium.Env):
    observation_space = Text(40, charset="abcdefghijklmnopqrstuvwxyz 0123456789")
    action_space = Text(2, charset="0123456789")

    def __init__(self, top=9):
        self.top = top

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.secret = int(self.np_random.integers(self.top + 1))
        return f"0 to {self.top}", {}

    def step(self, action):
        right = int(action) == self.secret
        return ("right" if right else "wrong"), float(right), right, False, {}

class Numbers(Guess):
    action_space = gymnasium.spaces.Discrete(10)

gymnasium.register("Guess-v0", Guess)
gymnasium.register("Numbers-v0", Numbers)
"""
OPPONENT = """
import re

def first_free(seen):
    moves = re.findall(r"'\\[(\\d)\\]'", seen.rpartition("Available Moves")[2])
    return f"[{moves[0]}]"
"""
SERVER = """
import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Said(Action):
    message: str

class Heard(Observation):
    text: str

class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, top=9, **_):
        self.secret = random.Random(seed).randint(0, top)
        return Heard(text=f"0 to {top}", done=False)

    def step(self, action, timeout_s=None, **_):
        right = action.message == str(self.secret)
        return Heard(text="right" if right else "wrong", done=right, reward=float(right))

    @property
    def state(self):
        return State()

app = create_fastapi_app(Guess, Said, Heard, max_concurrent_envs=32)
uvicorn.run(app, fd=int(sys.argv[1]), log_level="warning")
"""
VERIFIERS = """
import verifiers as vf
from datasets import Dataset

DATA = {"question": ["1+1=", "2+3="], "answer": ["2", "5"]}

def right(completion, answer, **_):
    return float(any(answer in (message.content or "") for message in completion if message.role == "assistant"))

class Retry(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": "again"}]

    @vf.stop
    async def is_right(self, state):
        trajectory = state["trajectory"]
        return bool(trajectory) and state["answer"] in trajectory[-1]["completion"][-1].content

class Forgets(Retry):
    async def get_prompt_messages(self, state):
        if not state["trajectory"]:
            return state["prompt"]
        return [{"role": "user", "content": f"turn {len(state['trajectory'])}"}]

def add(a: int, b: int) -> int:
    '''Add two numbers.'''
    return a + b

def load_environment(kind="single"):
    common = dict(dataset=Dataset.from_dict(DATA), rubric=vf.Rubric(funcs=[right]))
    match kind:
        case "single":
            return vf.SingleTurnEnv(**common)
        case "retry":
            return Retry(max_turns=3, **common)
        case "forgets":
            return Forgets(max_turns=3, **common)
        case "tool":
            return vf.ToolEnv(tools=[add], max_turns=3, **common)
    raise ValueError(f"no kind {kind}")
"""


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """Return the interpreter of an environment with a project; skip the test where that cannot be installed."""
    made = {}

    def make(requirement):
        if requirement not in made:
            root = tmp_path_factory.mktemp("venv")
            for command in (
                [UV, "venv", "--quiet", "--python", sys.executable, root],
                [UV, "pip", "install", "--quiet", "--python", root / "bin/python", requirement, "numpy", "msgspec"],
            ):
                done = subprocess.run(command, capture_output=True, text=True, timeout=800)
                if done.returncode != 0:
                    made[requirement] = pytest.skip.Exception(f"{requirement} cannot be installed: {done.stderr}")
                    break
            else:
                made[requirement] = str(root / "bin/python")
        if isinstance(made[requirement], BaseException):
            raise made[requirement]
        return made[requirement]

    return make


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    for name, code in {"text_game": TEXT_GAME, "opponent": OPPONENT, "server": SERVER, "sums": VERIFIERS}.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def section(name, python, **options):
    return EnvironmentSection(name=name, options=options, python=python, timeout_s=120.0)


def played(one, *said, row=None):
    """Play an episode, a turn for each text or turn; return its observations and tools."""

    async def go():
        environments = build_environments(one)
        environment = environments.make()
        try:
            observations = [await environment.reset({"seed": 7, "index": 0, **(row or {})})]
            for turn in said:
                turn = turn_of(turn) if isinstance(turn, str) else turn
                observations.append(await environment.step(turn.text, turn))
            return observations, environment.tools
        finally:
            await environment.close()
            await environments.close()

    return asyncio.run(go())


def texts(observation):
    """The contents of an observation's messages."""
    return [message["content"] for message in observation.as_messages]


def conforms(one, *said):
    async def go():
        environments = build_environments(one)
        try:
            await check_environment(environments.make, ROWS, said=said)
        finally:
            await environments.close()

    asyncio.run(go())


def test_reasoning_gym_asks_and_scores(interpreter):
    python = interpreter("reasoning-gym")
    one = section("reasoning_gym", python, task="chain_sum", config={"max_terms": 2}, seed=3, attempts=2, tag="answer")
    conforms(one, "<answer>5</answer>")
    first, *_ = played(one)[0]
    left, sign, right = texts(first)[0].rpartition(":")[2].rstrip(" =").split()
    total = int(left) + int(right) if sign == "+" else int(left) - int(right)
    (_, wrong, solved), _ = played(one, "no answer", f"I say <answer> {total} </answer>.")
    assert (wrong.reward, wrong.done) == (None, False)
    assert (solved.reward, solved.done, solved.metrics) == (1.0, True, {"solved": 1.0})
    with pytest.raises(UserError, match="reasoning_gym task 'chain'"):
        check_section(section("reasoning_gym", python, task="chain"))


def test_textarena_plays_alone_and_against_an_opponent(interpreter):
    python = interpreter("textarena")
    alone = section("textarena", python, id="GuessTheNumber-v0")
    conforms(alone, *(f"[{number}]" for number in (10, 5, 15, 3, 18)))
    observations, _ = played(alone, "[1]", *["no number"] * 2)
    assert texts(observations[0])[0].startswith("You are Player 0. You are playing Guess The Number.")
    assert "The target number is higher." in texts(observations[1])[0]
    assert observations[-1].done and 0 <= (observations[-1].reward or 0) <= 1
    assert observations[-1].metrics["invalid_move"] == 1.0

    both = section("textarena", python, id="TicTacToe-v0", num_players=2, opponent="opponent:first_free")
    conforms(both, *(f"[{square}]" for square in (8, 7, 6, 5, 4, 3, 2, 1, 0)))
    observations, _ = played(both, "[4]", "[5]", "[3]")
    assert "Player 1 placed their symbol (X) in cell 0." in texts(observations[1])[0]
    assert (observations[-1].reward, observations[-1].done) == (1.0, True)
    with pytest.raises(UserError, match="needs the option opponent"):
        check_section(section("textarena", python, id="TicTacToe-v0", num_players=2))


def test_gymnasium_environments_of_texts(interpreter):
    python = interpreter("gymnasium")
    one = section("gymnasium_text", python, id="text_game:Guess-v0", kwargs={"top": 3}, instruction="Guess.")
    conforms(one, "0", "1", "2", "3")
    observations, _ = played(one, "x", "77", "0", "1", "2", "3")
    assert [observation.messages for observation in observations[:3]] == [
        "Guess.\n0 to 3",
        "Answer with 1 to 2 of 0123456789",
        "wrong",
    ]
    assert sum(observation.reward or 0 for observation in observations) == 1.0
    for name, message in (("text_game:Numbers-v0", "has the space Discrete"), ("text_game:Chess-v0", "doesn't exist")):
        with pytest.raises(UserError, match=message):
            check_section(section("gymnasium_text", python, id=name))


def test_openenv_sessions_of_a_server(interpreter, modules):
    python = interpreter("openenv-core")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = subprocess.Popen(
            [python, modules / "server.py", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            one = section("openenv", python, url=url, observation_field="text")
            wait_for_server(one, server)
            conforms(one, "0", "1", "2", "3")
            observations, _ = played(one, *map(str, range(4)), row={"reset": {"top": 3}})
            assert observations[0].messages == "0 to 3"
            assert [one.reward for one in observations[1:]].count(1.0) == 1
        finally:
            server.kill()
            server.wait()
    with pytest.raises(SampleError, match="raised ConnectionError: Failed to connect"):
        played(one)


def wait_for_server(one, server):
    deadline = time.monotonic() + 120
    while True:
        try:
            played(one)
            return
        except SampleError:
            assert server.poll() is None and time.monotonic() < deadline


def test_verifiers_runs_its_own_loop(interpreter):
    python = interpreter("verifiers<0.3")
    for kind in ("single", "retry", "forgets", "tool"):
        conforms(section("verifiers", python, env="sums", args={"kind": kind}), "2", "3", "4", "5")

    (first, end), _ = played(section("verifiers", python, env="sums"), "it is 2")
    assert texts(first) == ["1+1="]
    assert (end.reward, end.done, end.metrics["right"]) == (1.0, True, 1.0)

    (_, again, end), _ = played(section("verifiers", python, env="sums", args={"kind": "retry"}), "3", "2")
    assert texts(again) == ["again"]
    assert again.history is None
    assert end.reward == 1.0

    (_, rewritten), _ = played(section("verifiers", python, env="sums", args={"kind": "forgets"}), "3")
    assert [message["content"] for message in rewritten.history or ()] == ["turn 1"]

    call = turn_of("")
    object.__setattr__(call, "calls", (ToolCall(name="add", arguments={"a": 1, "b": 1}),))
    (_, answer, end), tools = played(section("verifiers", python, env="sums", args={"kind": "tool"}), call, "2")
    assert [tool["function"]["name"] for tool in tools] == ["add"]
    assert [(message["role"], message["content"]) for message in answer.as_messages] == [("tool", "2")]
    assert end.reward == 1.0
    with pytest.raises(UserError, match="no kind loud"):
        check_section(section("verifiers", python, env="sums", args={"kind": "loud"}))


@pytest.mark.parametrize(
    ("name", "options", "requirement"),
    [
        ("reasoning_gym", {"task": "chain_sum"}, "reasoning-gym"),
        ("textarena", {"id": "GuessTheNumber-v0"}, "textarena"),
        ("openenv", {"url": "http://127.0.0.1:1"}, "openenv-core"),
        ("verifiers", {"env": "sums"}, "'verifiers<0.3'"),
    ],
)
def test_a_project_that_is_not_installed_is_named_with_its_line(name, options, requirement):
    with pytest.raises(UserError, match=f"No module named .* install {requirement}, or name another interpreter"):
        check_section(EnvironmentSection(name=name, options=options))


def test_the_recipe_of_the_cookbook_improves(interpreter, tmp_path):
    script = Path(__file__).parents[2] / "cookbook/agent_reasoning_gym/recipe.py"
    command = [sys.executable, script, "--dir", tmp_path, "--python", interpreter("reasoning-gym")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
    evaluations = [json.loads(line) for line in (tmp_path / "run/eval.jsonl").read_text().splitlines()]
    first, *_, last = (line["eval/reward_mean"] for line in evaluations)  # 0.59 and 0.70 where measured
    assert last > first + 0.05

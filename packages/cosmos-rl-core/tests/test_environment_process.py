"""Environments in a process of another interpreter: many episodes at once, errors, deadlines, deaths."""

import asyncio
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from cosmos_rl_core.connected_process import ProcessDied
from cosmos_rl_core.episodes.build import build_environments, check_section
from cosmos_rl_core.episodes.config import EnvironmentSection
from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.imports import VARIABLE
from cosmos_rl_core.processes import is_alive
from cosmos_rl_core.types import ToolCall, Turn

PLAYS = """
import asyncio
import os
import re
import sys

import cosmos_rl_core.errors
from cosmos_rl_core import Environment, Observation

class Play(Environment):
    tools = [{"name": "look"}]
    closed = []

    def __init__(self, *, top=7):
        self.top = top

    async def reset(self, row):
        self.row = row
        if row.get("bad"):
            raise cosmos_rl_core.errors.PromptError("the row is bad")
        return Observation([{"role": "user", "content": f"{os.getpid()} {self.top}"}], metrics={"moves": 1})

    async def step(self, said, turn):
        match said:
            case "which":
                return Observation(str(self.row["x"]), reward=0.5)
            case "turn":
                seen = [turn.terms.tolist(), turn.logprobs.tolist(), turn.versions.tolist(), turn.calls[0].arguments]
                return Observation(repr(seen), done=True)
            case "raise":
                raise ValueError("no such move")
            case "unsendable":
                return Observation([{"role": "user", "content": object()}])
            case "wait":
                await asyncio.sleep(600)
            case "exit":
                os._exit(3)
            case "loop":  # a search that keeps the interpreter's lock for years
                re.search("(a+)+$", "a" * 60 + "b")
            case "closed":
                return Observation(repr(self.closed))

    async def close(self):
        self.closed.append(self.row["x"])

class Modules(Environment):
    async def reset(self, row):
        return Observation(" ".join(sorted({name.partition(".")[0] for name in sys.modules})))

    async def step(self, said, turn):
        return Observation("")

class Never(Environment):
    def __init__(self):
        os._exit(7)

    async def reset(self, row): ...
    async def step(self, said, turn): ...
"""
TURN = Turn(
    terms=np.array([3, 1], np.int32),
    logprobs=np.array([-0.5, -1.0], np.float32),
    versions=np.array([4, 5], np.int32),
    finish_reason="stop",
    calls=(ToolCall(name="look", arguments={"at": [1]}),),
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "some_plays.py").write_text(PLAYS)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def section(name="Play", *, python=sys.executable, timeout_s=60.0, **options):
    return EnvironmentSection(name=f"some_plays:{name}", options=options, python=python, timeout_s=timeout_s)


def with_environments(test, one=None):
    """Run a test with environments; return its result."""

    async def go():
        environments = build_environments(one or section())
        try:
            async with asyncio.timeout(100):
                return await test(environments)
        finally:
            await environments.close()

    return asyncio.run(go())


def text_of(observation):
    (message,) = observation.as_messages
    return message["content"]


async def begun(environments, **row):
    environment = environments.make()
    observation = await environment.reset(row)
    return environment, int(text_of(observation).split()[0])


def test_a_process_plays_many_episodes_and_ends_with_the_environments():
    async def play(environments):
        begins = await asyncio.gather(*(begun(environments, x=x) for x in range(8)))
        (pid,) = {pid for _, pid in begins}
        answers = await asyncio.gather(*(environment.step("which", TURN) for environment, _ in begins))
        await asyncio.gather(*(environment.close() for environment, _ in begins[1:]))
        closed = text_of(await begins[0][0].step("closed", TURN))
        return pid, [(text_of(answer), answer.reward, answer.done) for answer in answers], closed, begins[0][0].tools

    pid, answers, closed, tools = with_environments(play)
    assert pid != os.getpid()
    assert not is_alive(pid)
    assert answers == [(str(x), 0.5, False) for x in range(8)]
    assert sorted(closed) == sorted(repr(list(range(1, 8))))
    assert tools == [{"name": "look"}]


def test_options_rows_and_turns_arrive_as_they_are():
    async def play(environments):
        environment = environments.make()
        first = await environment.reset({"x": None})
        return first, await environment.step("turn", TURN)

    first, second = with_environments(play, section(top=3))
    assert text_of(first).endswith(" 3")
    assert first.metrics == {"moves": 1.0}
    assert text_of(second) == "[[3, 1], [-0.5, -1.0], [4, 5], {'at': [1]}]"
    assert second.done


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("raise", "Play.step raised ValueError: no such move"),
        ("unsendable", "Play.step raised TypeError: .* is not JSON: Encoding objects of type object"),
        ("nothing", "Play.step raised TypeError: Play.step returned None: return an Observation"),
    ],
)
def test_an_error_ends_its_episode_alone(said, message):
    async def play(environments):
        (first, pid), (second, _) = [await begun(environments, x=x) for x in range(2)]
        with pytest.raises(SampleError, match=message) as raised:
            await first.step(said, TURN)
        await first.close()
        assert text_of(await second.step("which", TURN)) == "1"
        assert (await begun(environments, x=2))[1] == pid
        return raised.value.final

    assert with_environments(play) is False


def test_a_row_that_cannot_be_played_is_final():
    async def play(environments):
        with pytest.raises(SampleError, match=r"Play.reset raised PromptError: the row is bad") as raised:
            await environments.make().reset({"bad": True})
        assert raised.value.final
        with pytest.raises(TypeError):  # a row that is not JSON-like
            await environments.make().reset({"x": object()})

    with_environments(play)


@pytest.mark.parametrize(
    ("said", "how"),
    [
        ("exit", r"the process of environment some_plays:Play died \(exit code 3\)"),
        ("loop", "the process of environment some_plays:Play took longer than timeout_s = 0.2 and was killed"),
    ],
)
def test_a_process_that_dies_or_hangs_ends_its_episodes_and_is_replaced(said, how):
    async def play(environments):
        (first, pid), (second, _) = [await begun(environments, x=x) for x in range(2)]
        waiting = asyncio.create_task(second.step("wait", TURN))
        await asyncio.sleep(0)
        for call in (first.step(said, TURN), waiting, second.step("which", TURN)):
            with pytest.raises(ProcessDied, match=how):
                await call
        await first.close()
        await second.close()
        third, other = await begun(environments, x=7)
        assert other != pid
        assert text_of(await third.step("which", TURN)) == "7"

    with_environments(play, section(timeout_s=0.2 if said == "loop" else 60.0))


def test_a_call_that_is_given_up_is_cancelled_when_the_episode_is_closed():
    async def play(environments):
        environment, pid = await begun(environments, x=0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await environment.step("wait", TURN)
        await environment.close()
        other, again = await begun(environments, x=1)
        assert again == pid
        assert text_of(await other.step("closed", TURN)) == "[0]"

    with_environments(play)


def test_a_process_that_is_killed_between_calls_is_replaced():
    async def play(environments):
        environment, pid = await begun(environments, x=0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ProcessDied, match="signal SIGKILL"):
            await environment.step("which", TURN)
        assert (await begun(environments, x=1))[1] != pid

    with_environments(play)


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (section(tp=1), "known options: top"),
        (section("Plays"), "has no attribute 'Plays'"),
        (section("Never"), r"the process of environment some_plays:Never died \(exit code 7\)"),
        (section(python="/no/python"), "cannot run /no/python: No such file or directory"),
    ],
)
def test_a_check_before_the_run_says_what_is_wrong(one, message):
    check_section(section(top=1))
    with pytest.raises(UserError, match=message):
        check_section(one)


def test_an_interpreter_without_numpy_and_msgspec_says_so(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty"], check=True)
    python = str(tmp_path / "empty/bin/python")
    with pytest.raises(
        UserError, match=r"ModuleNotFoundError: No module named '\w+'\): .*-m pip install numpy msgspec"
    ):
        check_section(section(python=python))


def test_a_process_imports_little():
    async def play(environments):
        return text_of(await environments.make().reset({})).split()

    modules = with_environments(play, section("Modules"))
    assert not {"torch", "pydantic", "rich", "typer"} & {*modules}


def test_a_start_that_takes_longer_than_an_answer_may_goes_on(folder):
    async def play(environments):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await environments.make().reset({"x": 0})
        _, pid = await begun(environments, x=1)
        return pid

    code = PLAYS + "\nopen(__file__ + '.starts', 'a').write('start ')\n"
    (folder / "some_plays.py").write_text(code)
    with_environments(play)
    assert (folder / "some_plays.py.starts").read_text() == "start "


def test_a_process_that_is_still_starting_ends_with_the_environments():
    async def leave(environments):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await environments.make().reset({"x": 0})

    with_environments(leave)

"""Rewards in processes, which a deadline kills and replaces."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core import load_config
from cosmos_rl_core.assemble import build_rubric
from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.imports import VARIABLE, add_folders
from cosmos_rl_core.processes import is_alive
from cosmos_rl_core.reward.processes import RewardProcesses
from cosmos_rl_core.reward.rubric import Rubric, WeightedReward
from cosmos_rl_core.testing.tiny import TINY
from cosmos_rl_core.types import Episode, Prompt, Rollout, RolloutGroup

FUNCTIONS = """
import os
import re

import numpy as np

def pid(group):
    return [float(os.getpid())] * len(group.rollouts)

def seen(group, *, scale=1.0):
    row, first = group.prompt.row, group.rollouts[0]
    return [scale * (row["x"] + each.num_terms + each.media["image"].sum()) for each in group.rollouts]

def steps(group):
    return [np.arange(3.0), 5.0]

def loops(group):
    if "loop" in group.rollouts[0].text:  # a search that keeps the interpreter's lock for years
        re.search("(a+)+$", "a" * 60 + "b")
    return [float(os.getpid())] * len(group.rollouts)

def dies(group):
    os._exit(3)

def raises(group):
    raise ConnectionError("no judge")

def broken(group):
    return [float("nan")] * len(group.rollouts)

async def judged(group):
    return [1.0] * len(group.rollouts)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "process_rewards.py").write_text(FUNCTIONS)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def rollout(text="", num_terms=2, **changes):
    return Rollout(
        arrays={},
        rollout_logprobs=np.zeros(num_terms, np.float32),
        versions=np.zeros(num_terms, np.int32),
        loss_mask=np.ones(num_terms, np.bool_),
        text=text,
        **changes,
    )


def group(text="", **row):
    return RolloutGroup(
        prompt=Prompt(sample_id=9, row=row, origin="train.jsonl:4"), rollouts=(rollout(text), rollout(text, 3))
    )


def scored(name, *groups, timeout_s=30.0, workers=1, **options) -> list[Any]:
    """Score the groups at once; return the rewards of each, or its error."""
    processes = RewardProcesses(timeout_s=timeout_s, workers=workers)
    function = processes.reward(f"process_rewards:{name}", label=name, options=options)
    rubric = Rubric([WeightedReward(name=name, weight=1.0, function=function)], processes=processes)

    async def go():
        async with asyncio.timeout(60):
            return await asyncio.gather(*map(rubric.score, groups), return_exceptions=True)

    try:
        found = asyncio.run(go())
    finally:
        rubric.close()
    return [each if isinstance(each, BaseException) else [one.reward for one in each.rollouts] for each in found]


def test_the_function_gets_the_whole_group_and_its_options():
    rollouts = (rollout(media={"image": np.ones(4, np.uint8)}), rollout(num_terms=3, media={"image": np.ones(9, bool)}))
    assert scored("seen", replace(group(x=10), rollouts=rollouts), scale=2.0) == [[2.0 * 16, 2.0 * 22]]


def test_a_process_stays_for_the_next_call():
    (first, *_), (again, *_), (third, *_) = scored("pid", group(), group(), group())
    assert first == again == third != os.getpid()


def test_steps_of_episodes_have_their_own_rewards():
    episode = Episode(term_steps=np.arange(3, dtype=np.int32), values=np.zeros(4, np.float32), rewards=np.zeros(3))
    episode = replace(episode, rewards=episode.rewards.astype(np.float32))
    rollouts = (rollout(num_terms=3, episode=episode), rollout(num_terms=3, episode=episode))
    assert scored("steps", replace(group(), rollouts=rollouts)) == [[3.0, 5.0]]


def test_an_async_function_is_awaited_there():
    assert scored("judged", group()) == [[1.0, 1.0]]


def test_a_call_that_never_returns_is_killed_and_its_process_replaced():
    late, (pid, *_), (again, *_) = scored("loops", group("loop"), group(), group(), timeout_s=1.0)
    assert isinstance(late, SampleError) and late.final  # the same text would take as long again
    assert late.reason == (
        "reward 'loops' on train.jsonl:4 took longer than [reward] timeout_s = 1, and its process was killed"
    )
    assert pid == again and pid != os.getpid()  # they waited longer than timeout_s, for the next process


def test_a_process_that_dies_is_an_error_of_its_group_alone():
    (died,) = scored("dies", group())
    assert isinstance(died, SampleError) and not died.final
    assert died.reason == "reward 'dies' on train.jsonl:4: the worker died (exit code 3)"


@pytest.mark.parametrize(
    ("name", "reason", "final"),
    [
        ("raises", "reward 'raises' on train.jsonl:4 raised ConnectionError: no judge", False),
        ("broken", "reward 'broken' on train.jsonl:4 returned nan for rollout 0; it must be a finite number", True),
        ("missing", "reward 'process_rewards:missing': process_rewards (", True),
    ],
)
def test_errors_are_those_of_a_function_in_this_process(name, reason, final):
    (error,) = scored(name, group())
    assert isinstance(error, SampleError)
    assert error.reason.startswith(reason)
    assert error.final is final


class Asks:
    """A reward that asks for a process."""

    own_process = True

    def __call__(self, group):
        return [float(os.getpid())] * len(group.rollouts)


@pytest.mark.parametrize(
    ("keys", "is_here"),
    [
        ({"name": "process_rewards:pid"}, True),
        ({"name": "process_rewards:pid", "own_process": True}, False),
        ({"name": "test_reward_processes:Asks"}, False),
        ({"name": "test_reward_processes:Asks", "own_process": False}, True),
    ],
)
def test_a_key_of_the_recipe_or_the_reward_itself_asks_for_a_process(keys, is_here, folder, monkeypatch):
    add_folders([str(folder), os.path.dirname(__file__)])
    monkeypatch.setenv(VARIABLE, os.pathsep.join([str(folder), os.path.dirname(__file__)]))
    tables = {
        "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 1, "output_dir": str(folder)},
        "reward": {"functions": [keys]},
    }
    rubric = build_rubric(load_config(tables), TINY)
    try:
        one, _ = asyncio.run(rubric.score(group())).rollouts
    finally:
        rubric.close()
    assert (one.reward == os.getpid()) is is_here


PARENT = """
import asyncio, sys
sys.path.append({tests!r})
from test_reward_processes import group
from cosmos_rl_core.reward.processes import RewardProcesses

async def go():
    processes = RewardProcesses(timeout_s=1.0, workers=1)
    hangs = processes.reward("process_rewards:loops", label="loops", options={{}})
    pool = await processes.started()
    calls = asyncio.create_task(hangs.steps(group("loop")))
    await asyncio.sleep(0)
    print(*pool.pids, flush=True)
    await calls

asyncio.run(go())
"""


def test_a_process_that_keeps_the_interpreters_lock_does_not_outlive_a_killed_parent():
    code = PARENT.format(tests=os.path.dirname(__file__))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    deadline = time.monotonic() + 60.0
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(pid)

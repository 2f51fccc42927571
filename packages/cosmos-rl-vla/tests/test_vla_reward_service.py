"""Episodes judged by a reward server in a process of its own: videos of different lengths, and what goes along."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from cosmos_rl_core import run
from cosmos_rl_core.reward.remote import RemoteReward
from cosmos_rl_core.reward.rubric import Rubric, WeightedReward
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup

for needed in ("httpx", "starlette", "uvicorn"):
    pytest.importorskip(needed, reason="an extra of the package")

pytestmark = pytest.mark.usefixtures("one_thread")

COMMAND = "from cosmos_rl_core.cli.main import main; main()"
HORIZON = 4
JUDGE = """
def seen(group):
    assert group.prompt.row["task"] in ("red", "green") and group.prompt.row["instruction"].startswith("reach the ")
    return [len(rollout.media["video"]) + 100 * float(rollout.media["success"][0]) for rollout in group.rollouts]

def last_brightness(group):
    return [float(rollout.media["video"][-1].mean()) for rollout in group.rollouts]
"""

SIMULATOR = """
from dataclasses import replace
from cosmos_rl_vla.sims.reach import Reach

class Jump(Reach):
    def step(self, action):
        stepped = super().step(action)
        done = bool(action[0] > 0.5)
        return replace(stepped, terminated=done, success=done, truncated=stepped.truncated and not done)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Options of RemoteReward for a server that judges by `JUDGE`."""
    folder = tmp_path_factory.mktemp("judge")
    (folder / "judges.py").write_text(JUDGE)
    arguments = ["--reward", "judges:seen", "--reward", "judges:last_brightness", "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "reward-server", *arguments, "--token-file", str(folder / "token")],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    line = server.stdout.readline()
    yield {"url": line.split()[2], "token_file": str(folder / "token")}
    server.terminate()
    server.communicate(timeout=30)


def test_every_episode_is_judged_by_its_own_frames(tmp_path, served, monkeypatch):
    (tmp_path / "jumps.py").write_text(SIMULATOR)
    monkeypatch.syspath_prepend(tmp_path)
    remote = {"reward": "seen", "beside": ["success"], "columns": ["task", "instruction"], **served}
    recipe = {
        "run": {"domain": "vla", "placement": "inline", "max_steps": 1, "output_dir": str(tmp_path / "run")},
        "model": {
            "action_dim": 2,
            "state_dim": 2,
            "horizon": HORIZON,
            "words": ["reach the red green square"],
            "stats": "unit",
            "noise": {"level": 0.5},
        },
        "data": {"simulator": "jumps:Jump", "tasks": ["red", "green"], "options": {"image_size": 16, "max_steps": 24}},
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 4, "threads": 1},
        "rollout": {
            "group_size": 4,
            "threads": 1,
            "sampling": {"max_steps": 24},
            "options": {"processes": 1, "slots": 4},
        },
        "reward": {
            "functions": [
                {"name": "cosmos_rl_core.reward.remote:RemoteReward", "label": "seen", "options": remote},
                {"name": "success", "weight": 0.0},
            ]
        },
        "logging": {"sinks": ["jsonl"], "media_every": 0},
    }
    run(recipe)
    files = sorted((tmp_path / "run" / "rollouts").glob("step_*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(rows) == 4 * 4
    lengths = {}
    for row in rows:
        steps = int(row["response"].split()[-2])
        frames = math.ceil(steps / HORIZON) + 1
        assert row["rewards"]["seen"] == frames + 100 * row["rewards"]["success"]
        lengths.setdefault(row["sample"], set()).add(frames)
    assert any(len(found) > 1 for found in lengths.values()), "episodes of one group ended at different times"


def test_a_film_that_ended_early_ends_with_its_own_last_frame(served):
    videos = [np.full((length, 4, 4, 3), level, np.uint8) for length, level in ((2, 10), (5, 20))]
    videos[0][-1] = 200
    group = RolloutGroup(
        prompt=Prompt(sample_id=0, row={"task": "red", "instruction": "reach the red square"}),
        rollouts=tuple(judged(video) for video in videos),
        prompt_text="",
    )
    rewards = [
        WeightedReward(name=name, weight=1.0, function=RemoteReward(reward=name, beside=("success",), **served))
        for name in ("seen", "last_brightness")
    ]
    scored = asyncio.run(Rubric(rewards).score(group))
    assert [rollout.reward_breakdown for rollout in scored.rollouts] == [
        {"seen": 102.0, "last_brightness": 200.0},
        {"seen": 105.0, "last_brightness": 20.0},
    ]


def judged(video):
    return Rollout(
        arrays={},
        rollout_logprobs=np.zeros(1, np.float32),
        versions=np.zeros(1, np.int32),
        loss_mask=np.ones(1, bool),
        media={"video": video, "success": np.array([True])},
    )

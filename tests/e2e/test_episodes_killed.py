"""kill -9 of a rollout replica in the middle of its episodes: no sample is lost or trained twice."""

import os
import signal
from collections import Counter

import pytest

from cosmos_rl_llm import write_tiny_model

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]

STEPS, PROMPTS, GROUP = 6, 4, 3
GAME = """
import asyncio
import os
from pathlib import Path

from cosmos_rl_core import Environment, Observation

ASKED = Path(os.environ["ASKED"])


def rows():
    return [{"secret": secret} for secret in range(8)]


class Game(Environment):
    async def reset(self, row):
        self.turns = 0
        return Observation("?")

    async def step(self, said, turn):
        self.turns += 1
        # The process that is in the middle of an episode; the first one waits to be killed.
        first = not ASKED.exists()
        with ASKED.open("a") as log:
            log.write(f"{os.getpid()}\\n")
        if first:
            await asyncio.sleep(600)
        return Observation("<" if said else ">", reward=float(len(said)), done=self.turns == 3)
"""
RECIPE = """
[run]
domain = "llm"
name = "killed"
output_dir = "{run_dir}"
max_steps = {steps}
share_gpus = true

[model]
path = "{base}"

[data]
rows = "killed_game:rows"
prompt_column = ""
chat_template = "none"

[environment]
name = "killed_game:Game"
max_turns = 4
max_turn_tokens = 2
unfinished_reward = 0.0
timeout_s = 900.0

[algorithm]
name = "grpo"

[policy]
prompts_per_step = {prompts}

[rollout]
group_size = {group}
replicas = 2

[rollout.sampling]
max_tokens = 16

[sync]
max_staleness = 1

[[reward.functions]]
name = "environment"
"""


def test_a_replica_that_is_killed_in_the_middle_of_its_episodes_costs_no_sample(
    tmp_path, monkeypatch, start, wait_for, rows_of
):
    (tmp_path / "killed_game.py").write_text(GAME)
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    base = write_tiny_model(tmp_path / "base", characters="01234567<>?", num_layers=2, hidden_size=64)
    run_dir = tmp_path / "run"
    recipe = tmp_path / "run.toml"
    recipe.write_text(RECIPE.format(run_dir=run_dir, base=base, steps=STEPS, prompts=PROMPTS, group=GROUP))
    process = start("run", recipe)
    wait_for(lambda: (tmp_path / "asked").exists() and (tmp_path / "asked").read_text().endswith("\n"), "an episode")
    os.kill(int((tmp_path / "asked").read_text().split()[0]), signal.SIGKILL)
    told, errors = process.communicate(timeout=500)

    assert process.returncode == 0, told[-3000:] + errors[-3000:]
    assert "died (signal SIGKILL); starting it again" in told
    rows = [row for step in range(STEPS) for row in rows_of(run_dir / "rollouts" / f"step_{step:06d}.jsonl")]
    trained = Counter(row["sample"] for row in rows)
    assert set(trained.values()) == {GROUP}, "each sample once, with all of its episodes"
    assert len(trained) == STEPS * PROMPTS
    turns = [len(row["exchanges"]) for row in rows]
    assert max(turns) > 1

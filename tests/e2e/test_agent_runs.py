"""Whole runs with [agent]: programs that the run starts, and agents that ask it for rows."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_rl_llm import write_tiny_model

RECIPE = Path(__file__).parents[2] / "cookbook" / "agent_openai_client"
pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]


def play(tmp_path, *overrides, code=0, hidden_size=64):
    """Run the recipe of the cookbook with programs that the run starts; return what it printed, and its directory."""
    base = write_tiny_model(tmp_path / "base", characters="012<>?", num_layers=2, hidden_size=hidden_size)
    run = tmp_path / "run"
    command = [sys.executable, "-c", "from cosmos_rl_core.cli.main import main; main()", "run"]
    command += [str(RECIPE / "run.toml"), f"model.path={base}"]
    command += [f"run.output_dir={run}", "rollout.group_size=2", "policy.prompts_per_step=1", "agent.max_episodes=2"]
    done = subprocess.run(
        [*command, *overrides],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr, run


def rollouts_of(run):
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_run_starts_its_agents_and_trains_what_they_played(tmp_path):
    agent = json.dumps([sys.executable, str(RECIPE / "agent.py")])
    printed, run = play(tmp_path, "run.max_steps=2", f"agent.command={agent}")
    url = re.search(r"rollout-0: agents ask (http://127\.0\.0\.1:\d+/v1)", printed)
    assert url is not None, printed
    assert (run / "endpoints" / "rollout-0").read_text().strip() == url[1]
    token = run / "agent_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert token.read_text().strip() not in printed
    assert token.read_text().strip() != (run / "token").read_text().strip()
    lines = rollouts_of(run)
    assert len(lines) == 4 and all(line["rewards"]["environment"] in (0.0, 1.0) for line in lines)


def test_a_run_whose_agents_fail_ends_with_their_reason(tmp_path):
    agent = json.dumps([sys.executable, "-c", "raise SystemExit('no shop to buy from')"])
    printed, run = play(tmp_path, "run.max_steps=1", f"agent.command={agent}", "agent.retries=0", code=2)
    assert "the agent ended with exit code 1" in printed and "no shop to buy from" in printed
    assert not rollouts_of(run)


@pytest.mark.xdist_group("vllm")
def test_agents_are_answered_and_trained_with_vllm(tmp_path):
    pytest.importorskip("vllm", reason="the extra cosmos-rl-llm[vllm] is not installed")
    agent = json.dumps([sys.executable, str(RECIPE / "agent.py")])
    engine = ["rollout.engine=vllm", "rollout.options={max_sequences=8, cache_bytes=67108864}"]
    _, run = play(tmp_path, "run.max_steps=3", f"agent.command={agent}", *engine, hidden_size=128)  # heads of 32
    lines = rollouts_of(run)
    assert len(lines) == 6 and all(line["rewards"]["environment"] in (0.0, 1.0) for line in lines)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    mismatches = [line["mismatch_kl"] for line in metrics if "mismatch_kl" in line]
    assert len(mismatches) == 3 and max(mismatches) < 1e-4  # of the terms that were recorded, under the weights of each


def test_agents_that_ask_for_rows_are_trained(tmp_path):
    command = [sys.executable, str(RECIPE / "recipe.py"), "--dir", str(tmp_path), "run.max_steps=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(rollouts_of(tmp_path / "run")) == 3 * 3 * 24

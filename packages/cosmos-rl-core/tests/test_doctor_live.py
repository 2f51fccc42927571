"""`cosmos-rl doctor RUN` on whole runs that hang: a reward that never returns, and a rank that is stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.ops.doctor.run import examine_run
from cosmos_rl_core.ops.doctor.stacks import worker_processes

pytestmark = pytest.mark.ci
LIMIT_S = 120.0
PROGRAM = """
import json, sys
from cosmos_rl_core import run
run(json.loads(sys.argv[1]))
"""
JUDGE = """
import threading

def score(group):
    if group.prompt.sample_id >= 20:
        wait_for_the_judge()
    return [float(i) for i in range(len(group.rollouts))]

def wait_for_the_judge():
    threading.Event().wait()
"""


def recipe(tmp_path, **parts):
    return {
        "run": {
            "domain": "cosmos_rl_core.testing.tiny:TINY",
            "output_dir": str(tmp_path / "run"),
            "max_steps": 1_000_000,
            "placement": "local",
        },
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 10, "threads": 1, **parts.get("policy", {})},
        "rollout": {"group_size": 8, "threads": 1, "sampling": {"max_tokens": 3}},
        "reward": {"timeout_s": 1000.0, "functions": [{"name": parts.get("reward", "hits")}]},
        "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
        "logging": {"sinks": ["jsonl"]},
    }


@pytest.fixture
def started(tmp_path):
    """Starts a run beside the tests; it ends with the test."""
    processes = []

    def start(**parts):
        (tmp_path / "judge_that_hangs.py").write_text(JUDGE)
        command = [sys.executable, "-c", PROGRAM, json.dumps(recipe(tmp_path, **parts))]
        with (tmp_path / "out").open("wb") as out:
            processes.append(subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out))
        return tmp_path / "run"

    yield start
    for process in processes:
        process.kill()
        process.wait()
    for worker in worker_processes(tmp_path / "run"):
        os.kill(worker.pid, signal.SIGKILL)


def until(condition, tmp_path):
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, seen(tmp_path)
        time.sleep(0.2)
    return found


def seen(tmp_path):
    """The output of the run, its diagnosis and the ends of its logs, for a failure."""
    try:
        found = str(examine_run(tmp_path / "run", stacks=True))
    except UserError as error:
        found = str(error)
    logs = [path.read_text()[-2000:] for path in sorted((tmp_path / "run").glob("logs/*.log"))]
    return "\n".join([(tmp_path / "out").read_text(), found, *logs])


def verdict(run_dir):
    """The line about waits; None before the run has a status."""
    try:
        found = examine_run(run_dir)
    except UserError:
        return None
    return next((check for check in found.checks if check.name == "waits"), None)


def test_a_reward_that_never_returns_is_named_with_its_line(started, tmp_path):
    run_dir = started(reward="judge_that_hangs:score")

    def scores():
        found = verdict(run_dir)
        return found if found and "scores rollouts" in found.text and "since 1" in found.text else None

    found = until(scores, tmp_path)  # for 10 seconds or more
    assert found.text.startswith("rollout-0 scores rollouts with the rewards since 1")
    diagnosis = examine_run(run_dir, stacks=True)
    assert "leased to rollout-0" in diagnosis.waits[0]
    assert "wait_for_the_judge" in diagnosis.stacks
    assert "judge_that_hangs.py" in diagnosis.stacks


def test_a_stopped_rank_is_named_and_the_run_goes_on_after_it(started, tmp_path):
    run_dir = started(policy={"parallel": {"dp_shard": 2}})
    metrics = run_dir / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, tmp_path)
    (last,) = (one for one in worker_processes(run_dir) if one.rank == "1")
    os.kill(last.pid, signal.SIGSTOP)

    def named():
        found = verdict(run_dir)
        return found if found and "does not run" in found.text else None

    found = until(named, tmp_path)
    assert found.level == "bad"
    assert found.text == f"policy-0 does not run: rank 1, process {last.pid} is stopped (SIGSTOP)"
    assert found.fix == f"kill -CONT {last.pid} lets it go on"
    stacks = examine_run(run_dir, stacks=True).stacks
    assert "policy-0 rank 0" in stacks
    assert f"rank 1, process {last.pid}: no stacks, as it is stopped" in stacks
    steps = metrics.read_text().count("\n")
    os.kill(last.pid, signal.SIGCONT)
    until(lambda: metrics.read_text().count("\n") > steps + 2, tmp_path)

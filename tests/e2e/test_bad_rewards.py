"""Rewards that fail once a run is on its way, and signals to the command: exit code, text and time of the end."""

import json
import os
import signal
import time

import pytest

from cosmos_rl_core.checkpoint.manifest import list_steps, read_state

pytestmark = pytest.mark.ci

SLOW = pytest.mark.slow
LATEST_S = 120.0
"""Maximum time of a run that ends by its error, on a busy machine."""
REWARDS = """
import os
import re
import sys
import time

def late(group):
    return min(int(rollout.versions.min()) for rollout in group.rollouts) >= 1

def exits_late(group):
    if late(group):
        sys.exit(3)
    return [1.0] * len(group.rollouts)

def dies_late(group):
    if late(group):
        os._exit(3)
    return [1.0] * len(group.rollouts)

def hangs_late(group):
    while late(group):
        time.sleep(0.1)
    return [1.0] * len(group.rollouts)

def searches(group):
    if group.prompt.sample_id == 5:
        re.search("(a+)+$", "a" * 60 + "b")  # for years, with the interpreter's lock
    return [float(rollout.num_terms) for rollout in group.rollouts]

def keeps_lock_once(group):
    flag = os.path.join(os.path.dirname(__file__), "kept")
    if late(group) and not os.path.exists(flag):
        open(flag, "w").close()
        re.search("(a+)+$", "a" * 60 + "b")
    return [float(rollout.num_terms) for rollout in group.rollouts]

def nothing_late(group):
    return None if late(group) else [1.0] * len(group.rollouts)

def slow(group):
    time.sleep(0.5)
    return [float(rollout.num_terms) for rollout in group.rollouts]
"""


@pytest.fixture
def ended(tmp_path, bandit, write_recipe, start):
    """Run a recipe with one of these rewards; return exit code and all that was printed, after a check of its time."""
    (tmp_path / "late_rewards.py").write_text(REWARDS)

    def ended(name, **changes):
        functions = [{"name": f"late_rewards:{name}"}]
        keys = {"logging__sinks": ["console", "jsonl"], "reward__functions": functions, **changes}
        recipe = write_recipe(tmp_path / "recipe.toml", bandit(tmp_path / "run", **keys))
        began = time.monotonic()
        process = start("run", recipe)
        told, errors = process.communicate(timeout=LATEST_S)
        assert time.monotonic() - began < LATEST_S
        assert process.returncode in (0, 1, 2), errors
        return process.returncode, told + errors

    return ended


@pytest.mark.parametrize(
    ("name", "changes", "code", "text"),
    [
        ("exits_late", {}, 2, "reward 'exits_late' on tiny:"),
        pytest.param("nothing_late", {}, 2, "returned NoneType; it must return one number per rollout", marks=SLOW),
        ("hangs_late", {"reward__timeout_s": 0.2}, 2, "took longer than [reward] timeout_s = 0.2"),
        pytest.param("dies_late", {"elastic__restart_workers": 0}, 1, "rollout-0 died (exit code 3)", marks=SLOW),
    ],
)
def test_a_reward_that_fails_later_ends_the_run_with_its_name(ended, name, changes, code, text):
    found, printed = ended(name, **changes)
    assert (found, text in printed) == (code, True), printed


def test_an_answer_that_a_reward_never_returns_from_costs_a_run_its_group_alone(ended, rows_of, tmp_path):
    function = {"name": "late_rewards:searches", "own_process": True}
    code, printed = ended("searches", run__max_steps=4, reward__functions=[function], reward__timeout_s=1.0)
    assert code == 0, printed
    assert [line["step"] for line in rows_of(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3]


def test_a_rollout_that_does_not_answer_is_killed_and_started_again(ended, rows_of, tmp_path):
    keys = {"elastic__silence_s": 3.0, "elastic__suspect_grace_s": 0.5, "run__max_steps": 4}
    code, printed = ended("keeps_lock_once", **keys)
    assert code == 0, printed
    assert "rollout-0 has not answered for too long and is killed" in printed
    assert "rollout-0 died (signal SIGKILL); starting it again" in printed
    assert [line["step"] for line in rows_of(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3]


@SLOW
def test_a_slow_reward_delays_the_run_and_nothing_else(ended, rows_of, tmp_path):
    code, printed = ended("slow", run__max_steps=2)
    assert code == 0, printed
    assert [line["step"] for line in rows_of(tmp_path / "run" / "metrics.jsonl")] == [0, 1]


def test_sigterm_ends_a_run_as_ctrl_c_does(tmp_path, bandit, write_recipe, start, wait_for, rows_of):
    tables = bandit(tmp_path / "run", run__max_steps=100_000, logging__sinks=["console", "jsonl"])
    process = start("run", write_recipe(tmp_path / "recipe.toml", tables))
    wait_for(lambda: rows_of(tmp_path / "run" / "metrics.jsonl"), "the first step")
    process.send_signal(signal.SIGTERM)
    told, errors = process.communicate(timeout=LATEST_S)
    assert process.returncode == 130, errors
    assert "stopping: the current step is finished and saved (again to stop at once)" in told
    assert "--resume auto" in told
    (step,) = list_steps(tmp_path / "run" / "checkpoints")[-1:]
    assert read_state(tmp_path / "run" / "checkpoints" / f"step_{step}").step == step
    outcome, status = (json.loads((tmp_path / "run" / name).read_text()) for name in ("outcome.json", "status.json"))
    assert (outcome["state"], outcome["step"]) == ("interrupted", step)
    assert not any("lost" in str(wait) for wait in status["waits"]), status["waits"]


def test_a_killed_command_takes_its_workers_with_it(tmp_path, bandit, write_recipe, start, wait_for, rows_of, pid_of):
    tables = bandit(tmp_path / "run", run__max_steps=100_000)
    process = start("run", write_recipe(tmp_path / "recipe.toml", tables))
    wait_for(lambda: rows_of(tmp_path / "run" / "metrics.jsonl"), "the first step")
    workers = [pid_of(tmp_path / "run", name) for name in ("policy-0", "rollout-0")]
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(is_there, workers)), "the workers to leave")


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

"""The controller is killed with SIGKILL at a named point and started again: nothing is lost or doubled.

A worker stops at the point until the controller is dead, so that the kill cannot come too early or too late.
"""

import json
import random
import time

import pytest
from lives import SUPPORT, num_lines

from cosmos_rl_core.control.ledger import records

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]

STEPS, PROMPTS = 12, 4
CHANGES = {
    "run__domain": "dying:DOMAIN",
    "run__max_steps": STEPS,
    "sync__max_staleness": 0,
    "checkpoint__every_steps": 4,
    "rollout__options": {"delay_s": 0.02},
}
SUPERVISED = {"run__domain": "dying:DOMAIN", "checkpoint__every_steps": 4}
EVALUATED = {"eval__every_steps": 5, "eval__data": {"rows": 3}}
POLICY, ROLLOUT = ("--name", "policy-0"), ("--name", "rollout-0")
slow = pytest.mark.slow


@pytest.fixture
def stopped(tmp_path, controller, wait_for, monkeypatch):
    """Start a controller whose workers stop at a point; return its parts, the wait for the point, and the release."""
    reached, go = tmp_path / "reached", tmp_path / "go"

    def begin(name, point, **changes):
        monkeypatch.setenv("PYTHONPATH", SUPPORT)
        monkeypatch.setenv("STOP_AT", f"{name} {point} {reached} {go}")
        return controller(**{**CHANGES, **changes})

    return begin, lambda: wait_for(reached.exists, "the point"), go.touch


@pytest.fixture
def take_over(tmp_path, start, wait_for):
    """Kill a controller, start the next one, and return it when it serves."""

    def again(process, run_dir):
        process.kill()
        process.wait()
        generation = json.loads((run_dir / "controller.json").read_text())["generation"]
        following = start("controller", tmp_path / "run.toml")

        def serves():
            assert following.poll() is None, following.communicate()
            return json.loads((run_dir / "controller.json").read_text())["generation"] > generation

        wait_for(serves, "the next controller")
        return following

    return again


@pytest.fixture
def trained_once(rows_of, journal_of):
    """Check metrics, samples and commits of a run of `steps`."""

    def check(run_dir, steps=STEPS):
        assert [row["step"] for row in rows_of(run_dir / "metrics.jsonl")] == list(range(steps))
        assigned, commits, trained = (), [], []
        for record in journal_of(run_dir):
            if isinstance(record, records.Assigned):
                assigned = record.samples
            elif isinstance(record, records.Commit):
                commits.append(record.step)
                trained += assigned
        assert commits == list(range(steps)), "a step was committed twice, or undone"
        assert trained == list(range(steps * PROMPTS)), "a sample was trained twice or lost"

    return check


@pytest.fixture
def whole(tmp_path, bandit, write_recipe, start, finished, monkeypatch):
    """Make the run that nobody disturbed, and return its directory."""

    def make(*, without=(), usual=CHANGES, **changes):
        for name in ("STOP_AT", "PACE"):
            monkeypatch.delenv(name, raising=False)
        tables = bandit(tmp_path / "whole", **{**usual, **changes, "run__placement": "inline"})
        for name in without:
            del tables[name]
        finished(start("run", write_recipe(tmp_path / "whole.toml", tables)), timeout_s=240)
        return tmp_path / "whole"

    return make


@pytest.mark.parametrize(
    ("worker", "point", "changes"),
    [
        pytest.param("rollout-0", "evaluating", EVALUATED, id="during an evaluation"),
        pytest.param("policy-0", "saving", {}, id="while a checkpoint is saved", marks=slow),
    ],
)
def test_a_controller_that_is_killed(
    worker, point, changes, stopped, take_over, start, finished, trained_once, rows_of, whole, bits_of
):
    begin, reach, release = stopped
    process, run_dir, (policy, rollout) = begin(worker, point, **changes)
    workers = [start(*policy, *POLICY), start(*rollout, *ROLLOUT)]
    reach()
    process = take_over(process, run_dir)
    release()
    finished(process, timeout_s=240)
    for each in workers:
        finished(each)
    trained_once(run_dir)
    other = whole(**changes)
    assert bits_of(run_dir / f"checkpoints/step_{STEPS}") == bits_of(other / f"checkpoints/step_{STEPS}")
    assert rows_of(run_dir / "eval.jsonl") == rows_of(other / "eval.jsonl")


@slow
@pytest.mark.parametrize("connected", [False, True], ids=["no worker has connected", "the policy is being built"])
def test_a_controller_that_is_killed_before_a_worker_is_ready(
    connected, stopped, take_over, start, finished, trained_once
):
    """A worker that is being built joins the next controller."""
    begin, reach, release = stopped
    process, run_dir, (policy, rollout) = begin("policy-0", "building")
    workers = []
    if connected:
        workers.append(start(*policy, *POLICY))
        reach()
    process = take_over(process, run_dir)
    release()
    if not connected:
        workers.append(start(*policy, *POLICY))
    workers.append(start(*rollout, *ROLLOUT))
    finished(process, timeout_s=240)
    for each in workers:
        finished(each)
    trained_once(run_dir)


@slow
def test_kills_of_the_controller_in_supervised_fine_tuning(
    controller, take_over, start, wait_for, finished, trained_once, rows_of, whole, bits_of, monkeypatch
):
    kills, steps, chance = 5, 60, random.Random(5)
    monkeypatch.setenv("PYTHONPATH", SUPPORT)
    monkeypatch.setenv("PACE", "0.05")
    changes = {"run__max_steps": steps, "algorithm__name": "sft", "eval__every_steps": 7, "eval__data": {"rows": 6}}
    process, run_dir, (policy, *_) = controller(without=("rollout", "reward"), **{**SUPERVISED, **changes})
    worker = start(*policy, *POLICY)
    for kill in range(kills):
        wanted = 2 + kill * (steps - 10) // kills
        wait_for(lambda: num_lines(run_dir / "metrics.jsonl") >= wanted, f"step {wanted}")  # noqa: B023
        time.sleep(chance.uniform(0.0, 0.2))  # the moment is the point of the test
        process = take_over(process, run_dir)
    finished(process, timeout_s=240)
    finished(worker)
    trained_once(run_dir, steps)
    other = whole(without=("rollout", "reward"), usual=SUPERVISED, **changes)
    assert bits_of(run_dir / f"checkpoints/step_{steps}") == bits_of(other / f"checkpoints/step_{steps}")
    assert rows_of(run_dir / "eval.jsonl") == rows_of(other / "eval.jsonl")

"""`cosmos-rl launch --on ray` as a job of Ray, which is submitted and stopped, and the loss of Ray's head."""

import subprocess
import sys

import pytest
from loopback_ray import LoopbackRay, address

from cosmos_rl_core.checkpoint.manifest import read_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, PROMPTS = 12, 4
LONG = {"run__max_steps": 100_000, "rollout__options": {"delay_s": 0.05}}


@pytest.fixture(scope="module")
def ray():
    if LoopbackRay.missing(jobs=True):
        pytest.skip("ray[default] is not installed (tests/cluster/README.md)")
    with LoopbackRay(nodes=1, jobs=True) as cluster:
        yield cluster


@pytest.fixture
def recipe(tmp_path, bandit, write_recipe):
    """Write a recipe with changes; return its path. The run's directory is `run` beside it."""

    def write(**changes):
        fixed = {"logging__sinks": ["console", "jsonl"], "cluster__ray": {"place_s": 300}, "run__max_steps": STEPS}
        return write_recipe(tmp_path / "run.toml", bandit(tmp_path / "run", **{**fixed, **changes}))

    return write


@pytest.fixture
def jobs(ray):
    """Call `ray job WORD ...`; return the exit code and the output."""

    def call(word, *arguments):
        command = [sys.executable, "-m", "ray.scripts.scripts", "job", word, "--address", ray.jobs_address]
        done = subprocess.run([*command, *map(str, arguments)], env=ray.environment, text=True, capture_output=True)
        return done.returncode, done.stdout + done.stderr

    return call


@pytest.fixture
def call(ray, tmp_path):
    """Call `cosmos-rl ...`; return the exit code and the output."""

    def call(*arguments):
        command = ["cosmos-rl", *map(str, arguments)]
        done = subprocess.run(command, env=ray.environment, cwd=tmp_path, text=True, capture_output=True)
        return done.returncode, done.stdout + done.stderr

    return call


def must_have_trained_each_sample_once(run_dir, rows_of, *, steps):
    rows = rows_of(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(steps))
    files = [run_dir / "rollouts" / f"step_{step:06d}.jsonl" for step in range(steps)]
    assert len({row["sample"] for file in files for row in rows_of(file)}) == steps * PROMPTS


def test_a_job_of_ray_launches_a_run_and_ends_with_it(jobs, recipe, tmp_path, rows_of):
    code, out = jobs("submit", "--", "cosmos-rl", "launch", recipe(), "--on", "ray")
    assert code == 0, out
    assert f"step {STEPS}/{STEPS}" in out and "succeeded" in out
    must_have_trained_each_sample_once(tmp_path / "run", rows_of, steps=STEPS)
    code, out = jobs("submit", "--", "cosmos-rl", "launch", recipe(run__max_steps=0), "--on", "ray")
    assert code == 1 and "run.max_steps" in out


def test_a_stopped_job_saves_and_leaves_nothing_and_another_continues_it(
    jobs, call, recipe, tmp_path, rows_of, wait_for
):
    run_dir = tmp_path / "run"
    launch = ("cosmos-rl", "launch", recipe(**LONG), "--on", "ray")
    code, out = jobs("submit", "--no-wait", "--submission-id", "long", "--", *launch)
    assert code == 0, out
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps", timeout_s=300)
    code, out = jobs("stop", "long")
    assert code == 0 and "'long' was stopped" in out, out
    wait_for(lambda: "jobs:" not in call("status", run_dir)[1], "the end of the actors", timeout_s=300)
    steps = len(rows_of(run_dir / "metrics.jsonl"))
    assert read_state(run_dir / "checkpoints" / f"step_{steps}").step == steps
    _, out = call("status", run_dir)
    assert f"cosmos-rl launch {tmp_path / 'run.toml'} --on ray --resume" in out
    launch = ("cosmos-rl", "launch", recipe(run__max_steps=steps + 3), "--on", "ray", "--resume")
    code, out = jobs("submit", "--", *launch)
    assert code == 0, out
    must_have_trained_each_sample_once(run_dir, rows_of, steps=steps + 3)


def test_a_job_that_is_stopped_while_it_waits_for_a_place_leaves_nothing(jobs, call, recipe, tmp_path, wait_for):
    run_dir = tmp_path / "run"
    launch = ("cosmos-rl", "launch", recipe(**LONG, rollout__replicas=5), "--on", "ray")  # of two GPUs
    code, out = jobs("submit", "--no-wait", "--submission-id", "waits", "--", *launch)
    assert code == 0, out
    wait_for(lambda: "RUNNING on 127.0.0.2" in call("status", run_dir)[1], "the first actors", timeout_s=300)
    code, out = jobs("stop", "waits")
    assert code == 0 and "'waits' was stopped" in out, out
    wait_for(lambda: "jobs:" not in call("status", run_dir)[1], "the end of the actors", timeout_s=60)


def test_the_loss_of_the_head_ends_launch_with_what_to_do_and_resume_continues(
    ray, call, recipe, tmp_path, rows_of, wait_for
):
    """The controller is on the other node, which ends with its head."""
    run_dir, there = tmp_path / "run", {"controller": {"node1": 1}, "policy": {"node0": 0.1}}
    placed = {"cluster__ray": {"place_s": 300, "resources": there}}
    ray.start_node(1)
    try:
        process = subprocess.Popen(
            ["cosmos-rl", "launch", recipe(**LONG, **placed, checkpoint__every_steps=2), "--on", "ray"],
            env=ray.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 5, "five steps", timeout_s=300)
        ray.lose_node(0)
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 2
        assert f"the head of Ray at {address(0)}:{ray.port} has not answered for 3" in errors
        wait_for(lambda: "NOT LIVE" in call("status", run_dir)[1], "the end of the controller", timeout_s=200)
        code, out = call("status", run_dir)
        assert code == 0 and "the states of the jobs are not known here: no cluster of Ray answers at" in out
        assert f"continue: cosmos-rl launch {tmp_path / 'run.toml'} --on ray --resume" in out
        code, out = call("stop", run_dir, "--now")
        assert code == 2 and "no cluster of Ray answers at" in out
    finally:
        ray.lose_node(1)
        ray.start_node(0)
    steps = len(rows_of(run_dir / "metrics.jsonl")) + 3
    code, out = call("launch", recipe(run__max_steps=steps), "--on", "ray", "--resume")
    assert code == 0, out
    must_have_trained_each_sample_once(run_dir, rows_of, steps=steps)

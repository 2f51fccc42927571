"""`cosmos-rl launch --on ray` on a real Ray of two nodes: a whole run, lost processes and nodes, scaling, Ctrl-C."""

import contextlib
import os
import re
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
from loopback_ray import LoopbackRay

from cosmos_rl_core.checkpoint.manifest import read_state
from cosmos_rl_core.ops.clusters.launcher import ClusterRun
from cosmos_rl_core.ops.clusters.launcher import launch as launch_on
from cosmos_rl_core.testing.conformance import check_launcher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, PROMPTS = 12, 4
LONG = {"run__max_steps": 100_000, "rollout__options": {"delay_s": 0.05}}
PLACE_S = 300


@pytest.fixture(scope="module")
def ray():
    if LoopbackRay.missing():
        pytest.skip("Ray is not installed (tests/cluster/README.md)")
    with LoopbackRay(nodes=2) as cluster:
        yield cluster


@pytest.fixture
def recipe(tmp_path, bandit, write_recipe):
    """Write a recipe with changes; return its path. The run's directory is `run` beside it."""

    def write(**changes):
        fixed = {"logging__sinks": ["console", "jsonl"], "cluster__ray": {"place_s": PLACE_S}}
        tables = bandit(tmp_path / "run", **{**fixed, "run__max_steps": STEPS, "rollout__replicas": 2, **changes})
        return write_recipe(tmp_path / "run.toml", tables)

    return write


@pytest.fixture
def call(ray, tmp_path):
    """Call `cosmos-rl ...`, which must end with this exit code; return its output."""

    def call(*arguments, code=0):
        done = subprocess.run(
            ["cosmos-rl", *map(str, arguments)], env=ray.environment, cwd=tmp_path, text=True, capture_output=True
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    yield call
    if (tmp_path / "run" / "status.json").exists() and "jobs:" in call("status", tmp_path / "run"):
        call("stop", tmp_path / "run", "--now")


@pytest.fixture
def launched(call, recipe, tmp_path, rows_of, wait_for):
    """Start a run without an end, wait for three steps, return its directory."""

    def start(**changes):
        call("launch", recipe(**{**LONG, **changes}), "--on", "ray", "--detach")
        steps_of(tmp_path / "run", rows_of, wait_for, 3)
        return tmp_path / "run"

    return start


def steps_of(run_dir, rows_of, wait_for, more):
    """Wait for so many further steps."""
    steps = len(rows_of(run_dir / "metrics.jsonl")) + more
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= steps, f"{more} further steps", timeout_s=300)


def members_of(run_dir, rows_of, wait_for, number):
    wait_for(lambda: rows_of(run_dir / "metrics.jsonl")[-1]["members"] == number, f"{number} members", timeout_s=300)


def must_have_trained_each_sample_once(run_dir, rows_of):
    found = [line["step"] for line in rows_of(run_dir / "metrics.jsonl")]  # once: the run may go on
    steps = len(found)
    assert found == list(range(steps))
    files = [run_dir / "rollouts" / f"step_{step:06d}.jsonl" for step in range(steps)]
    assert len({row["sample"] for file in files for row in rows_of(file)}) == steps * PROMPTS


def kill_process(*words):
    """Kill the process with these words in its command line; a text of several words has them in this order."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = f" {(entry / 'cmdline').read_text().replace(chr(0), ' ')} "
                if all(f" {word} " in line for word in words):
                    found.append(int(entry.name))
    (pid,) = found
    os.kill(pid, signal.SIGKILL)


def test_a_launch_stays_until_the_run_has_trained_to_its_end(call, recipe, tmp_path, rows_of):
    out = call("launch", recipe(), "--on", "ray")
    for name in ("controller", "policy-0", "rollout-0", "rollout-1"):
        assert f"{name}: RUNNING on 127.0.0." in out
    assert f"step {STEPS}/{STEPS}" in out
    must_have_trained_each_sample_once(tmp_path / "run", rows_of)
    assert read_state(tmp_path / "run" / "checkpoints" / f"step_{STEPS}").step == STEPS
    assert "jobs:" not in call("status", tmp_path / "run")  # no actor is left


def test_ray_conforms(ray, recipe, monkeypatch, wait_for):
    for name, value in ray.environment.items():
        monkeypatch.setenv(name, value)
    from cosmos_rl_core.ops.clusters.ray import Ray

    run, until = ClusterRun.of(recipe(**LONG), []), partial(wait_for, timeout_s=300)
    try:
        check_launcher(Ray(), run, start=lambda: launch_on("ray", run, resume=False), until=until)
    finally:
        Ray().stop(run, now=True)
        import ray as library

        library.shutdown()


def test_policies_and_rollouts_are_added_and_removed(call, launched, rows_of, wait_for):
    run_dir = launched()
    assert "rollout-2: RUNNING on 127.0.0." in call("scale", run_dir, "rollout=3")
    members_of(run_dir, rows_of, wait_for, 4)
    assert call("scale", run_dir, "rollout=1") == "rollout-1: leaves\nrollout-2: leaves\n"
    added = call("scale", run_dir, "rollout=2")  # also while they leave
    assert re.fullmatch(r"rollout-[1-4]: RUNNING on 127\.0\.0\.\d\n", added), added
    members_of(run_dir, rows_of, wait_for, 3)
    assert call("scale", run_dir, "rollout=1").endswith(": leaves\n")
    members_of(run_dir, rows_of, wait_for, 2)
    assert "policy-1: RUNNING on 127.0.0." in call("scale", run_dir, "policy=2")
    members_of(run_dir, rows_of, wait_for, 3)
    assert call("scale", run_dir, "policy=1") == "policy-1: leaves\n"
    members_of(run_dir, rows_of, wait_for, 2)
    wait_for(lambda: "policy-1" not in call("status", run_dir), "the end of the actor", timeout_s=300)
    must_have_trained_each_sample_once(run_dir, rows_of)


def test_processes_without_a_place_are_refused_with_the_numbers(call, recipe, launched, tmp_path):
    small = {"cluster__ray": {"place_s": 10}}
    out = call("launch", recipe(**LONG, rollout__replicas=5, **small), "--on", "ray", code=2)
    assert "Ray has not started all processes within 10 s ([cluster.ray] place_s)" in out
    assert "wants 1 CPU, 1 GPU on one machine: there is no place for it, or" in out  # four GPUs, the policy has one
    assert "machine 127.0.0.2 has 4 CPU, 2 GPU, 1 node0" in out
    assert "machine 127.0.0.3 has 4 CPU, 2 GPU, 1 node1" in out
    assert "ended without a controller" in call("status", tmp_path / "run")
    wide = {"ranks_per_node": 3, "num_nodes": 2, "prompts_per_step": 6}
    out = call("launch", recipe(**LONG, policy=wide, **small), "--on", "ray", code=2)
    assert "policy-0.1 wants 1 CPU, 3 GPU on each of 2 machines, and there is no place for it" in out
    run_dir = launched(**small)
    assert "rollout-4 wants 1 CPU, 1 GPU on one machine" in call("scale", run_dir, "rollout=5", code=2)


def test_killed_processes_are_started_again(call, launched, rows_of, wait_for):
    run_dir = launched()
    kill_process("worker", "rollout-1", str(run_dir))
    wait_for(lambda: "restarts: 1" in call("status", run_dir), "a restart of the rollout", timeout_s=300)
    members_of(run_dir, rows_of, wait_for, 3)
    kill_process("controller", str(run_dir.parent / "run.toml"))
    wait_for(lambda: call("status", run_dir).count("restarts: 1") == 2, "a restart of the controller", timeout_s=300)
    steps_of(run_dir, rows_of, wait_for, 3)
    must_have_trained_each_sample_once(run_dir, rows_of)


def test_the_controller_the_policy_and_a_rollout_of_a_lost_node_move_to_another(ray, call, launched, rows_of, wait_for):
    """Node 2 alone has the resource `spot`, and all processes; then node 3 has it."""
    ray.start_node(2, more={"spot": 4})
    try:
        spot = {role: {"spot": 1, "GPU": 0} for role in ("controller", "policy", "rollout")}
        run_dir = launched(cluster__ray={"place_s": PLACE_S, "resources": spot}, checkpoint__every_steps=1)
        assert call("status", run_dir).count("RUNNING on 127.0.0.4") == 4
        ray.lose_node(2)
        ray.start_node(3, more={"spot": 4})
        wait_for(lambda: call("status", run_dir).count("RUNNING on 127.0.0.5") == 4, "another node", timeout_s=600)
        steps_of(run_dir, rows_of, wait_for, 3)
    finally:
        for index in (2, 3):
            ray.lose_node(index)


def test_a_rollout_of_a_lost_node_returns_and_the_run_goes_on(ray, call, launched, rows_of, wait_for):
    here = {"controller": {"node0": 0.1}, "policy": {"node0": 0.1}, "rollout": {"CPU": 2}}
    run_dir = launched(cluster__ray={"place_s": PLACE_S, "resources": here})
    ray.lose_node(1)
    try:
        steps_of(run_dir, rows_of, wait_for, 3)
    finally:
        ray.start_node(1)
    members_of(run_dir, rows_of, wait_for, 3)
    must_have_trained_each_sample_once(run_dir, rows_of)


def test_ctrl_c_saves_and_launch_resumes(ray, call, recipe, tmp_path, rows_of, wait_for):
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        ["cosmos-rl", "launch", recipe(**LONG), "--on", "ray"], env=ray.environment, text=True, stdout=subprocess.PIPE
    )
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps", timeout_s=300)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 130, out
    steps = len(rows_of(run_dir / "metrics.jsonl"))
    assert read_state(run_dir / "checkpoints" / f"step_{steps}").step == steps
    call("launch", recipe(run__max_steps=steps + 5), "--on", "ray", "--resume")
    assert len(rows_of(run_dir / "metrics.jsonl")) == steps + 5
    must_have_trained_each_sample_once(run_dir, rows_of)


def test_a_policy_over_two_machines_has_a_node_for_each(call, recipe, tmp_path, rows_of):
    wide = {"num_nodes": 2, "ranks_per_node": 1, "threads": 2, "prompts_per_step": PROMPTS}
    out = call("launch", recipe(policy=wide, rollout__replicas=1), "--on", "ray")
    nodes = {line.rpartition(" ")[2] for line in out.splitlines() if re.match(r"policy-0\.\d: RUNNING", line)}
    assert nodes == {"127.0.0.2", "127.0.0.3"}
    must_have_trained_each_sample_once(tmp_path / "run", rows_of)


@pytest.mark.parametrize("machine", [0, 1])
def test_a_policy_over_two_machines_returns_after_the_kill_of_one_part(call, launched, rows_of, wait_for, machine):
    wide = {"num_nodes": 2, "ranks_per_node": 1, "threads": 2, "prompts_per_step": PROMPTS}
    run_dir = launched(policy=wide, rollout__replicas=1, checkpoint__every_steps=1)
    kill_process("worker", "policy-0", f"--node {machine}", str(run_dir))
    wait_for(lambda: call("status", run_dir).count(", restarts: 1") == 2, "a restart of both parts", timeout_s=300)
    steps_of(run_dir, rows_of, wait_for, 3)
    members_of(run_dir, rows_of, wait_for, 2)

"""`cosmos-rl launch --on slurm` on a real Slurm of three nodes: a whole run, lost nodes, preemption, time limits."""

import contextlib
import json
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from cosmos_rl_core.checkpoint.manifest import read_state
from cosmos_rl_core.ops.clusters.launcher import ClusterRun
from cosmos_rl_core.ops.clusters.launcher import launch as launch_on
from cosmos_rl_core.ops.clusters.slurm import Slurm
from cosmos_rl_core.testing.conformance import check_launcher, refused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, PROMPTS = 12, 4


@pytest.fixture
def launched(slurm, tmp_path, bandit, write_recipe, monkeypatch):
    """Submit a run; return its directory and a function for `cosmos-rl launch` with further arguments."""
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)

    def launch(*flags, **changes):
        fixed = {"run__bind": "127.0.0.1", "logging__sinks": ["console", "jsonl"]}
        recipe = bandit(tmp_path / "run", **{**fixed, "run__max_steps": STEPS, "rollout__replicas": 2, **changes})
        write_recipe(tmp_path / "run.toml", recipe)
        return tmp_path / "run", slurm.call("cosmos-rl", "launch", str(tmp_path / "run.toml"), "--on", "slurm", *flags)

    yield launch
    slurm.call("scancel", "--user=root")


@pytest.fixture
def jobs(slurm):
    """State of each job by its name without the run's label."""

    def listed():
        lines = slurm.call("squeue", "--noheader", "--format=%j %T").splitlines()
        return {
            line.split()[0].rpartition(".")[2]: line.split()[1] for line in lines if line.split()[1] != "COMPLETING"
        }

    return listed


def slow(rate=0.05):
    """Rollouts that take so many seconds each."""
    return {"run__max_steps": 10_000, "rollout__options": {"delay_s": rate}}


def places(slurm):
    """Number and node of each job by its name without the run's label."""
    lines = slurm.call("squeue", "--noheader", "--format=%j %A %N").splitlines()
    return {line.split()[0].rpartition(".")[2]: line.split()[1:] for line in lines}


def must_have_trained_each_sample_once(run_dir, rows_of, *, steps):
    assert [line["step"] for line in rows_of(run_dir / "metrics.jsonl")][:steps] == list(range(steps))
    files = [run_dir / "rollouts" / f"step_{step:06d}.jsonl" for step in range(steps)]
    assert len({row["sample"] for file in files for row in rows_of(file)}) == steps * PROMPTS


def test_a_run_of_three_jobs_trains_to_its_end(launched, jobs, wait_for, rows_of):
    run_dir, out = launched()
    assert re.findall(r"^(\S+): job \d+$", out, re.MULTILINE) == ["rollout-0", "rollout-1", "run"]
    wait_for(lambda: not jobs(), "the end of all jobs", timeout_s=300)
    must_have_trained_each_sample_once(run_dir, rows_of, steps=STEPS)
    assert read_state(run_dir / "checkpoints" / f"step_{STEPS}").step == STEPS


def test_with_gang_two_policies_and_a_rollout_are_steps_of_one_job_on_three_nodes(launched, jobs, wait_for, rows_of):
    run_dir, out = launched(cluster__slurm={"gang": True}, policy__replicas=2, rollout__replicas=1)
    assert re.findall(r"^(\S+): job \d+$", out, re.MULTILINE) == ["run"]
    wait_for(lambda: not jobs(), "the end of the job", timeout_s=300)
    must_have_trained_each_sample_once(run_dir, rows_of, steps=STEPS)


def test_with_gang_rollouts_share_a_node_with_a_gpu_each(launched, jobs, wait_for, rows_of):
    """Two policy ranks have both GPUs of a node, so that two rollouts are on the next one."""
    run_dir, _ = launched(**slow(), cluster__slurm={"gang": True}, policy__ranks_per_node=2)
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps", timeout_s=300)
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str(run_dir).encode() in (entry / "cmdline").read_bytes():
                variables = (entry / "environ").read_bytes().decode().split("\0")
                place = dict(variable.split("=", 1) for variable in variables if "=" in variable)
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                if "worker" in words and Path(words[0]).name != "srun":
                    name = words[words.index("--name") + 1]
                    found[name] = place["SLURMD_NODENAME"], place["CUDA_VISIBLE_DEVICES"]
    assert found["policy-0"] == ("n0", "0,1")
    assert found["rollout-0"] == ("n1", "0")
    assert found["rollout-1"] == ("n1", "1")


def test_a_killed_controller_is_started_again_and_its_workers_stay(slurm, launched, jobs, wait_for, rows_of):
    run_dir, _ = launched(**slow())
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps", timeout_s=300)
    os.kill(json.loads((run_dir / "controller.json").read_text())["pid"], signal.SIGKILL)
    generation = lambda: json.loads((run_dir / "controller.json").read_text())["generation"]  # noqa: E731
    wait_for(lambda: generation() == 1, "the next controller")
    steps = len(rows_of(run_dir / "metrics.jsonl"))
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) > steps + 3, "further steps")
    must_have_trained_each_sample_once(run_dir, rows_of, steps=steps)
    (log,) = (run_dir / "launch").glob("*.rollout-0-*.log")
    assert log.read_text().count(" rollout-0: process ") == 1  # it was not started again


def test_rollouts_are_scaled_as_jobs(slurm, launched, jobs, wait_for, rows_of):
    run_dir, _ = launched(**slow())
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps", timeout_s=300)
    assert slurm.call("cosmos-rl", "status", str(run_dir)).startswith("jobs:\n")
    assert re.fullmatch(r"rollout-2: job \d+\n", slurm.call("cosmos-rl", "scale", str(run_dir), "rollout=3"))
    wait_for(lambda: rows_of(run_dir / "metrics.jsonl")[-1]["members"] == 4, "four members", timeout_s=300)
    assert slurm.call("cosmos-rl", "scale", str(run_dir), "rollout=1") == "rollout-1: cancelled\nrollout-2: cancelled\n"
    wait_for(lambda: rows_of(run_dir / "metrics.jsonl")[-1]["members"] == 2, "two members", timeout_s=300)


def test_a_rollout_on_a_lost_node_is_queued_again_and_the_run_goes_on(slurm, launched, jobs, wait_for, rows_of):
    wide = {"extra": ["--exclusive"]}  # a node for each job
    run_dir, _ = launched(**slow(), cluster__slurm=wide)
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps", timeout_s=300)
    places = dict(line.split() for line in slurm.call("squeue", "--noheader", "--format=%j %N").splitlines())
    name, node = next((name, node) for name, node in places.items() if name.endswith("rollout-1"))
    slurm.lose_node(node)
    wait_for(lambda: jobs().get("rollout-1") == "PENDING", f"{name} in the queue again")
    steps = len(rows_of(run_dir / "metrics.jsonl"))
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) > steps + 3, "further steps")
    slurm.restore_node(node)
    wait_for(lambda: jobs().get("rollout-1") == "RUNNING", f"{name} on a node again", timeout_s=300)


def test_a_preempted_rollout_hands_its_prompts_back_and_returns(slurm, launched, jobs, wait_for, rows_of):
    """What it cannot finish within `leave_s` the other one generates, and it is no failed attempt of a sample."""
    options = {"rollout_partition": "spot", "extra": ["--exclusive"]}
    run_dir, _ = launched(**slow(), cluster__slurm=options, elastic__leave_s=0.1, rollout__max_attempts=1)
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps", timeout_s=300)
    name = "rollout-1"
    node = places(slurm)[name][1]  # without a node Slurm may preempt both, one after the other
    slurm.call("sbatch", "--exclusive", f"--nodelist={node}", "--job-name=other.other", "--wrap=sleep 30")
    wait_for(lambda: jobs().get("other") == "RUNNING", "the job of a higher priority", timeout_s=120)
    assert jobs()[name] == "PENDING"
    steps = len(rows_of(run_dir / "metrics.jsonl"))
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) > steps + 3, "further steps")
    must_have_trained_each_sample_once(run_dir, rows_of, steps=steps + 3)
    (log,) = (run_dir / "launch").glob("*.run-*.log")
    assert f"{name} has left" in log.read_text()
    assert "lost" not in log.read_text() and "dropped" not in log.read_text()
    both = ["RUNNING", "RUNNING"]
    wait_for(
        lambda: [jobs().get(name) for name in ("rollout-0", "rollout-1")] == both, "the preempted one", timeout_s=300
    )


def test_before_its_time_limit_a_run_saves_and_continues_in_another_job(slurm, launched, jobs, wait_for, rows_of):
    run_dir, out = launched(**slow())
    first = re.search(r"^run: job (\d+)$", out, re.MULTILINE)[1]
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps", timeout_s=300)
    slurm.call("scancel", "--signal=USR1", "--batch", first)  # as --signal=B:USR1@180 does
    wait_for(lambda: first not in slurm.call("squeue", "--noheader", "--format=%i").split(), "the end of the first job")
    steps = len(rows_of(run_dir / "metrics.jsonl"))
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) > steps + 3, "steps of the second job", timeout_s=300)
    must_have_trained_each_sample_once(run_dir, rows_of, steps=steps)


def test_cancelled_jobs_save_and_launch_resumes_them(slurm, launched, jobs, wait_for, rows_of):
    run_dir, _ = launched(**slow())
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps", timeout_s=300)
    slurm.call("scancel", "--user=root")
    wait_for(lambda: not slurm.call("squeue", "--noheader").strip(), "the end of all jobs", timeout_s=120)
    steps = len(rows_of(run_dir / "metrics.jsonl"))
    assert read_state(run_dir / "checkpoints" / f"step_{steps}").step == steps
    launched("--resume", run__max_steps=steps + 5)
    wait_for(lambda: not jobs(), "the end of all jobs", timeout_s=300)
    must_have_trained_each_sample_once(run_dir, rows_of, steps=steps + 5)


@pytest.mark.parametrize("now", [False, True])
def test_slurm_is_a_platform(launched, tmp_path, bandit, write_recipe, wait_for, now):
    tables = bandit(tmp_path / "run", run__bind="127.0.0.1", rollout__replicas=2, **slow())
    run = ClusterRun.of(write_recipe(tmp_path / "run.toml", tables), [])
    start = partial(launch_on, "slurm", run, resume=False)
    check_launcher(Slurm(), run, start=start, until=partial(wait_for, timeout_s=200), now=now)


def test_a_refused_job_is_an_error_with_the_words_of_slurm(launched, tmp_path, bandit, write_recipe):
    run = ClusterRun.of(write_recipe(tmp_path / "run.toml", bandit(tmp_path / "run")), ["cluster.slurm.partition=none"])
    refused(partial(launch_on, "slurm", run, resume=False), because="invalid partition specified: none")
    assert Slurm().alive(run) == {}


def test_stop_saves_and_leaves_no_job(slurm, launched, jobs, wait_for, rows_of):
    run_dir, _ = launched(**slow())
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps", timeout_s=300)
    out = slurm.call("cosmos-rl", "stop", str(run_dir), timeout_s=300)
    assert out.startswith("the run ends after the step in work, which is saved\n")
    assert out.endswith("the run has ended\n")
    assert jobs() == {}
    steps = len(rows_of(run_dir / "metrics.jsonl"))
    assert read_state(run_dir / "checkpoints" / f"step_{steps}").step == steps


def test_a_requeued_run_saves_and_continues(slurm, launched, jobs, wait_for, rows_of):
    run_dir, _ = launched(**slow())
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps", timeout_s=300)
    job, _ = places(slurm)["run"]
    slurm.call("scontrol", "requeue", job)
    wait_for(lambda: jobs().get("run") == "PENDING", "the job in the queue again", timeout_s=120)
    steps = len(rows_of(run_dir / "metrics.jsonl"))
    assert read_state(run_dir / "checkpoints" / f"step_{steps}").step == steps
    slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")  # it would be two minutes later
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) > steps + 3, "further steps", timeout_s=300)
    must_have_trained_each_sample_once(run_dir, rows_of, steps=steps + 3)
    wait_for(lambda: rows_of(run_dir / "metrics.jsonl")[-1]["members"] == 3, "both rollouts", timeout_s=300)


def test_a_requeued_run_ends_with_the_weights_of_one_that_was_not(slurm, launched, jobs, wait_for, rows_of, tmp_path):
    exact = {"sync__max_staleness": 0, "rollout__options": {"delay_s": 0.02}}
    run_dir, _ = launched(**exact)
    wait_for(lambda: not jobs(), "the end of the run that is not disturbed", timeout_s=300)
    undisturbed = weights(run_dir)
    run_dir.rename(tmp_path / "undisturbed")
    run_dir, _ = launched(**exact)
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps", timeout_s=300)
    job, _ = places(slurm)["run"]
    slurm.call("scontrol", "requeue", job)
    wait_for(lambda: jobs().get("run") == "PENDING", "the job in the queue again", timeout_s=120)
    assert 3 <= len(rows_of(run_dir / "metrics.jsonl")) < STEPS
    slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")
    wait_for(lambda: not jobs(), "the end of all jobs", timeout_s=300)
    must_have_trained_each_sample_once(run_dir, rows_of, steps=STEPS)
    requeued = weights(run_dir)
    assert requeued.keys() == undisturbed.keys()
    assert all(requeued[name].equal(undisturbed[name]) for name in requeued)


def weights(run_dir):
    """Weights and optimizer state after the last step."""
    folder = run_dir / "checkpoints" / f"step_{STEPS}"
    assert read_state(folder).step == STEPS
    files = sorted(folder.rglob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items() if not name.startswith("rng/")}


def test_a_run_whose_node_is_lost_continues_on_another(slurm, launched, jobs, wait_for, rows_of):
    run_dir, _ = launched(
        **slow(), checkpoint__every_steps=2, rollout__replicas=1, cluster__slurm={"extra": ["--exclusive"]}
    )
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps", timeout_s=300)
    job, node = places(slurm)["run"]
    slurm.lose_node(node)
    try:
        wait_for(lambda: jobs().get("run") == "PENDING", "the job in the queue again", timeout_s=120)
        steps = len(rows_of(run_dir / "metrics.jsonl"))
        slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")
        wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) > steps + 3, "further steps", timeout_s=300)
        must_have_trained_each_sample_once(run_dir, rows_of, steps=steps + 3)
        assert places(slurm)["run"][1] != node
    finally:
        slurm.restore_node(node)


NAMED = ["scontrol() { command scontrol \"$@\" | sed 's/^n[0-9]$/127.0.0.1/'; }; export -f scontrol"]
"""[cluster] setup: the names of these nodes are no names of machines."""


def test_a_policy_that_loses_its_second_node_is_queued_again(slurm, launched, jobs, wait_for, rows_of):
    two = {"policy__num_nodes": 2, "policy__ranks_per_node": 1, "rollout__replicas": 1}
    options = {"cluster__slurm": {"extra": ["--exclusive"]}, "cluster__setup": NAMED, "checkpoint__every_steps": 2}
    run_dir, _ = launched(**slow(), **two, **options)
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps", timeout_s=300)
    job, nodes = places(slurm)["run"]
    _, second = slurm.call("scontrol", "show", "hostnames", nodes).split()
    slurm.lose_node(second)
    try:
        wait_for(lambda: jobs().get("run") == "PENDING", "the job in the queue again", timeout_s=120)
        steps = len(rows_of(run_dir / "metrics.jsonl"))
    finally:
        slurm.restore_node(second)
    slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) > steps + 3, "further steps", timeout_s=300)
    must_have_trained_each_sample_once(run_dir, rows_of, steps=steps + 3)


def test_a_policy_over_two_nodes_trains_and_is_started_again(slurm, launched, rank_pids, wait_for, rows_of):
    run_dir, _ = launched(
        **slow(),
        checkpoint__every_steps=2,
        policy__num_nodes=2,
        policy__ranks_per_node=1,
        cluster__setup=NAMED,
    )
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps", timeout_s=300)
    assert rows_of(run_dir / "metrics.jsonl")[-1]["members"] == 3
    listed = slurm.call("squeue", "--noheader", "--steps", "--format=%i %N").splitlines()
    assert any(re.search(r" n\[\d.\d\]$", line) for line in listed), listed  # a step on two nodes
    rank = rank_pids(run_dir)[1]
    os.kill(rank, signal.SIGKILL)
    wait_for(lambda: rank_pids(run_dir).get(1, rank) != rank, "the rank of another process", timeout_s=120)
    steps = len(rows_of(run_dir / "metrics.jsonl"))
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) > steps + 3, "further steps", timeout_s=300)
    must_have_trained_each_sample_once(run_dir, rows_of, steps=steps)

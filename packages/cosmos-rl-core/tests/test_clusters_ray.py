"""The plan of a run on Ray, and the terminal. tests/cluster runs them on a real Ray."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.ops.clusters.follow import Logs, follow
from cosmos_rl_core.ops.clusters.launcher import ClusterRun, find_launcher
from cosmos_rl_core.ops.clusters.ray import Ray, _must_listen, not_started, processes, processes_of_run
from cosmos_rl_core.ops.clusters.ray_supervisor import ReplicaAddress

RECIPE = """
[run]
domain = "cosmos_rl_core.testing.tiny:TINY"
output_dir = "{directory}/run"
max_steps = 3
[[reward.functions]]
name = "hits"
"""


@pytest.fixture
def cluster(tmp_path):
    """Return the recipe as a ClusterRun."""
    (tmp_path / "run.toml").write_text(RECIPE.format(directory=tmp_path))
    return lambda *overrides: ClusterRun.of(tmp_path / "run.toml", overrides)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_plan_has_an_actor_for_each_machine_with_its_resources(cluster):
    run = cluster(
        "policy.replicas=2", "policy.ranks_per_node=8", "policy.num_nodes=2", "rollout.replicas=2",
        'cluster.ray.resources={rollout={CPU=4, "accelerator_type:H100"=0.001}}',
    )  # fmt: skip
    by_name = {one.spec.name: one for one in processes_of_run(run)}
    workers = ["policy-0.0", "policy-0.1", "policy-1.0", "policy-1.1", "rollout-0", "rollout-1"]
    assert list(by_name) == [*workers, "controller"] and list(by_name["controller"].place.after) == workers
    assert by_name["controller"].resources == {"CPU": 1}
    assert by_name["policy-1.1"].resources == {"CPU": 1, "GPU": 8}
    assert by_name["policy-1.1"].strategy == "STRICT_SPREAD" and by_name["policy-1.1"].place.machine == 1
    assert by_name["policy-1.1"].place.group == f"{run.label}.policy-1"
    assert by_name["rollout-0"].strategy == "SPREAD" and not by_name["rollout-0"].place.group
    assert by_name["rollout-0"].needs == "4 CPU, 1 GPU, 0.001 accelerator_type:H100 on one machine"
    assert by_name["policy-0.0"].needs == "1 CPU, 8 GPU on each of 2 machines"
    (single, *_) = processes(cluster("policy.ranks_per_node=2"), cluster("policy.ranks_per_node=2").policies())
    assert single.spec.name == "policy-0" and single.strategy == "STRICT_PACK" and single.resources["GPU"] == 2
    (cpu, *_) = processes(cluster("cluster.gpus=false"), cluster("cluster.gpus=false").policies())
    assert cpu.resources == {"CPU": 1}


def test_processes_without_an_answer_are_not_said_to_have_no_place(cluster):
    run = cluster("policy.replicas=2")
    ready, without, rollout, _ = processes_of_run(run)
    lines = not_started([ready, without, rollout], reserved={f"{run.label}.policy-0"})
    assert lines == [
        "policy-0 has a place, and Ray is still starting it (imports, [cluster.ray] extra)",
        "policy-1 wants 1 CPU, 1 GPU on one machine, and there is no place for it",
        "rollout-0 wants 1 CPU, 1 GPU on one machine: there is no place for it, or Ray is still starting it",
    ]
    wide = [
        one
        for one in processes_of_run(cluster("cluster.ray.resources={rollout={GPU=16}}"))
        if one.spec.name == "rollout-0"
    ]
    assert "are all of one machine: [rollout.parallel] tp x pp" in not_started(wide, reserved=())[-1]


def test_the_plan_needs_no_ray(cluster):
    hidden = "import sys; sys.modules['ray'] = None\n"
    text = f"{hidden}from cosmos_rl_core.cli.app import main; main(sys.argv[1:])"
    recipe = cluster().file
    command = [sys.executable, "-c", text, "launch", str(recipe), "--on", "ray"]
    done = subprocess.run([*command, "--dry-run"], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "policy-0: 1 CPU, 1 GPU on one machine (placement group STRICT_PACK)\n  " in done.stdout
    assert " controller " in done.stdout and done.stdout.count("--role rollout") == 1
    done = subprocess.run(command, text=True, capture_output=True)
    assert (done.returncode, done.stderr.strip()) == (
        2,
        f"error: Ray is not installed here: {pip_install('cosmos-rl-core[ray]')}",
    )


def test_an_address_at_which_nothing_listens_is_found_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match="refused"):
            _must_listen(f"127.0.0.1:{free.getsockname()[1]}")
    _must_listen("auto")
    _must_listen("ray://127.0.0.1:1")  # Ray's own client has a time limit


def test_ray_is_a_launcher_and_its_section_is_strict(cluster):
    assert isinstance(find_launcher("ray"), Ray)
    with pytest.raises(UserError, match="adress"):
        cluster('cluster.ray.adress="auto"')
    with pytest.raises(UserError, match="has CPU = -1 for policy; an amount is at least 0"):
        cluster("cluster.ray.resources={policy={CPU=-1}}")
    with pytest.raises(UserError, match="trainer"):
        cluster("cluster.ray.resources={trainer={CPU=1}}")


def test_machines_of_a_replica_meet_at_another_address_after_the_failure_of_one():
    restarted, answers = [], []
    meeting = ReplicaAddress(lambda: restarted.append(True))
    meeting.open("first:1")
    assert [meeting.address(1), meeting.address(2)] == ["first:1", "first:1"]
    asking = threading.Thread(target=lambda: answers.append(meeting.address(1)))  # the part of machine 1 has ended
    asking.start()
    wait_until(lambda: restarted)
    assert not answers
    meeting.open("first:2")
    asking.join(60)
    assert answers == ["first:2"] and meeting.address(2) == "first:2" and len(restarted) == 1


def test_logs_are_read_as_they_grow(tmp_path):
    logs = Logs(tmp_path)
    (tmp_path / "controller.log").write_text("starting workers\nhalf")
    (tmp_path / "rollout-0.log").write_text("ready\n\n")
    assert list(logs.read()) == ["starting workers", "rollout-0: ready", "rollout-0: "]
    with (tmp_path / "controller.log").open("a") as file:
        file.write(" a line\n")
    assert list(logs.read()) == ["half a line"]
    assert list(logs.read()) == []


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_stops_the_run_and_a_second_one_ends_it(cluster, monkeypatch, times):
    monkeypatch.setattr("cosmos_rl_core.ops.clusters.follow.CHECK_S", 0.0)
    stops, lines = [], []

    def is_alive():
        if len(stops) < times:
            os.kill(os.getpid(), signal.SIGINT)
        return len(stops) < times

    assert follow(cluster(), is_alive=is_alive, stop=stops.append, say=lines.append)
    assert stops == [False, True][:times]
    assert lines == ["the run stops: it saves and ends; Ctrl-C again ends it at once"]
    assert not follow(cluster(), is_alive=lambda: False, stop=stops.append, say=lines.append)

"""`cosmos-rl launch --on kubernetes` on a stand-in that runs the manifest: to the end, lost pods, scaling, resuming."""

import json
import os
import re
import socket
from functools import partial

import pytest
import stand_in_kubernetes
from stand_in_kubernetes import StandIn

from cosmos_rl_core.checkpoint.manifest import read_state
from cosmos_rl_core.ops.clusters import manifest
from cosmos_rl_core.ops.clusters.kubernetes import Kubernetes
from cosmos_rl_core.ops.clusters.launcher import ClusterRun, launch
from cosmos_rl_core.testing.conformance import check_launcher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, PROMPTS, LEFT, KILLED = 12, 4, 143, 137
SLOW = {"run__max_steps": 10_000, "rollout__options": {"delay_s": 0.05}}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    if why := stand_in_kubernetes.missing():
        pytest.skip(why)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "cluster").mkdir()
    with StandIn(tmp_path / "cluster") as cluster:
        monkeypatch.setenv("PATH", f"{tmp_path / 'cluster' / 'bin'}:{os.environ['PATH']}")
        yield cluster


@pytest.fixture
def recipe(tmp_path, bandit, write_recipe):
    """Write a recipe and return it as a ClusterRun."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def make(**changes):
        settings = {"image": "none", "claim": "claim", "port": port}
        fixed = {"run__max_steps": STEPS, "rollout__replicas": 2, "logging__sinks": ["console", "jsonl"]}
        tables = bandit(
            tmp_path / "run", **{**fixed, "cluster__kubernetes": settings, "cluster__gpus": False, **changes}
        )
        return ClusterRun.of(write_recipe(tmp_path / "run.toml", tables), [])

    return make


@pytest.fixture
def launched(cluster, recipe, start, finished, tmp_path):
    """Launch a run; return its directory in the claim, and the command's output."""

    def run(*flags, **changes):
        made = recipe(**changes)
        out, _ = finished(start("launch", tmp_path / "run.toml", "--on", "kubernetes", *flags))
        return cluster.root / "claims" / "claim" / manifest.KubernetesManifest(made).name, out

    return run


@pytest.fixture
def steps_of(rows_of):
    return lambda run_dir: len(rows_of(run_dir / "metrics.jsonl"))


@pytest.fixture
def trains(wait_for, steps_of):
    """Wait for further steps."""

    def wait(run_dir, more=3):
        at = steps_of(run_dir)
        return wait_for(lambda: steps_of(run_dir) >= at + more, f"{more} steps after {at}", timeout_s=300)

    return wait


def generation(run_dir):
    return contact(run_dir)["generation"] if (run_dir / "controller.json").exists() else -1


def contact(run_dir):
    return json.loads((run_dir / "controller.json").read_text())


def must_have_trained_each_sample_once(run_dir, rows_of, *, steps):
    assert [line["step"] for line in rows_of(run_dir / "metrics.jsonl")][:steps] == list(range(steps))
    files = [run_dir / "rollouts" / f"step_{step:06d}.jsonl" for step in range(steps)]
    assert len({row["sample"] for file in files for row in rows_of(file)}) == steps * PROMPTS


def test_a_manifest_trains_to_its_end(cluster, launched, wait_for, rows_of):
    run_dir, out = launched()
    assert re.findall(r"^(\w+) .* created$", out, re.MULTILINE) == ["secret", "configmap", "jobset", "job", "job"]
    wait_for(lambda: "" not in cluster.ends().values(), "the end of all Jobs", timeout_s=300)
    assert cluster.ends() == dict.fromkeys(("controller", "policy-0", "rollout-0", "rollout-1"), "Complete")
    must_have_trained_each_sample_once(run_dir, rows_of, steps=STEPS)
    assert read_state(run_dir / "checkpoints" / f"step_{STEPS}").step == STEPS


def test_killed_pods_are_replaced_and_the_run_goes_on(cluster, launched, trains, wait_for, rows_of, steps_of):
    """With TLS: the next controller has the certificates of the first one."""
    encrypted = {"tls__enabled": True, "tls__weights": True, "sync__transport": "tcp"}
    run_dir, _ = launched(**SLOW, **encrypted, checkpoint__every_steps=1)
    trains(run_dir)
    authority = contact(run_dir)["ca"]
    assert len(authority) == 64
    for replica in ("rollout-0", "controller", "policy-0"):
        killed = cluster.pod(replica)
        killed.kill()
        wait_for(lambda: cluster.pod(replica) not in (None, killed), f"another pod of {replica}")  # noqa: B023
        trains(run_dir, 6)
    assert (generation(run_dir), contact(run_dir)["ca"]) == (1, authority)
    for replica in ("rollout-0", "controller", "policy-0"):
        assert cluster.exit_codes(replica) == [KILLED]
    assert cluster.exit_codes("rollout-1") == []
    assert [line["step"] for line in rows_of(run_dir / "metrics.jsonl")][:12] == list(range(12))


def test_an_evicted_controller_serves_until_it_is_killed_and_the_next_one_continues(
    cluster, launched, trains, wait_for, rows_of, steps_of
):
    settings = {**SLOW, "elastic__leave_s": 1.0}
    run_dir, _ = launched(**settings)
    trains(run_dir)
    pod = cluster.pod("controller")
    pod.evict()
    trains(run_dir)
    assert generation(run_dir) == 0
    pod.kill()  # as the kubelet does at the end of the grace period
    wait_for(lambda: generation(run_dir) == 1, "the next controller")
    trains(run_dir)
    assert cluster.exit_codes("policy-0") == cluster.exit_codes("rollout-0") == []
    must_have_trained_each_sample_once(run_dir, rows_of, steps=steps_of(run_dir) - 1)


def test_with_all_pods_evicted_the_run_continues_where_it_was(cluster, launched, trains, wait_for, rows_of, steps_of):
    run_dir, _ = launched(**SLOW)
    trains(run_dir)
    evicted = [cluster.pod(name) for name in ("controller", "policy-0", "rollout-0", "rollout-1")]
    for pod in evicted:
        pod.evict()
    wait_for(lambda: generation(run_dir) == 1, "the next controller")
    trains(run_dir)
    assert cluster.exit_codes("policy-0") == cluster.exit_codes("controller") == [LEFT]
    must_have_trained_each_sample_once(run_dir, rows_of, steps=steps_of(run_dir) - 1)


def test_a_frozen_controller_is_killed_by_its_probe(cluster, recipe, monkeypatch, trains, wait_for):
    monkeypatch.setattr(manifest, "FROZEN_S", 10)
    run = recipe(**SLOW, elastic__leave_s=0.0)
    launch("kubernetes", run, resume=False)
    run_dir = cluster.root / "claims" / "claim" / manifest.KubernetesManifest(run).name
    trains(run_dir)
    pod = cluster.pod("controller")
    pod.freeze()
    pod.grace_s = 1
    wait_for(lambda: generation(run_dir) == 1, "the next controller", timeout_s=300)
    trains(run_dir)


def test_a_policy_over_two_machines_waits_for_names_and_is_restarted_as_a_whole(cluster, launched, trains, wait_for):
    two = {"policy__num_nodes": 2, "policy__parallel__dp_shard": 2, "checkpoint__every_steps": 1}
    cluster.has_names = False
    run_dir, _ = launched(**SLOW, **two, rollout__replicas=1)
    pods = wait_for(lambda: [pod for i in (0, 1) if (pod := cluster.pod("policy-0", i))], "the pods of the policy")
    for pod in pods:
        wait_for(lambda: "waiting for " in pod.log.read_text(), f"the wait of {pod.name}", timeout_s=300)  # noqa: B023
    cluster.has_names = True
    trains(run_dir)
    assert cluster.exit_codes("policy-0") == []
    cluster.pod("policy-0", 1).evict()
    wait_for(lambda: len(cluster.exit_codes("policy-0")) == 2, "the end of both machines")
    assert cluster.exit_codes("policy-0") == [LEFT, LEFT]
    trains(run_dir)
    cluster.pod("policy-0", 0).kill()
    wait_for(lambda: len(cluster.exit_codes("policy-0")) == 4, "the end of both machines")
    trains(run_dir)


def test_the_stand_in_conforms(cluster, recipe, wait_for, monkeypatch, tmp_path):
    run = recipe(**SLOW)
    check_launcher(Kubernetes(), run, start=partial(launch, "kubernetes", run, resume=False), until=wait_for)


def test_a_run_is_scaled_shown_stopped_and_resumed(
    cluster, launched, start, finished, trains, wait_for, rows_of, steps_of, tmp_path
):
    here = tmp_path / "run"
    run_dir, _ = launched(**SLOW)
    trains(run_dir)
    out, _ = finished(start("status", here))
    assert out.startswith("jobs:\n  controller: 1 active\n  policy-0: 1 active\n")
    finished(start("scale", here, "rollout=3"))
    wait_for(lambda: rows_of(run_dir / "metrics.jsonl")[-1]["members"] == 4, "four members", timeout_s=300)
    finished(start("scale", here, "rollout=1"))
    wait_for(lambda: rows_of(run_dir / "metrics.jsonl")[-1]["members"] == 2, "two members", timeout_s=300)
    out, _ = finished(start("stop", here))
    assert out.endswith("the run has ended\n")
    assert (cluster.jobs, cluster.job_sets, cluster.objects) == ({}, {}, {})
    steps = steps_of(run_dir)
    assert read_state(run_dir / "checkpoints" / f"step_{steps}").step == steps

    launched(**SLOW)
    wait_for(lambda: cluster.exit_codes("controller")[-1] == 2, "the refusal of an earlier run")
    assert (
        "contains an earlier run" in max((cluster.root / "logs").glob("*controller*"), key=os.path.getmtime).read_text()
    )
    finished(start("stop", here))
    launched("--resume", **{**SLOW, "run__max_steps": steps + 5})
    wait_for(lambda: "" not in cluster.ends().values(), "the end of all Jobs", timeout_s=300)
    must_have_trained_each_sample_once(run_dir, rows_of, steps=steps + 5)

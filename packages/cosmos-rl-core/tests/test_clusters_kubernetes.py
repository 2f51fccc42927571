"""The objects for Kubernetes and the calls of kubectl. tests/cluster runs the manifest."""

import copy
import json
import os
import subprocess
import time

import pytest
import yaml
from kubernetes_schema import KINDS, problems

from cosmos_rl_core.control.address_file import ControllerFile
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.secrets import describe_encryption, make_secrets, read_secrets
from cosmos_rl_core.launch.takeover import take_over
from cosmos_rl_core.ops.clusters.kubernetes import Kubernetes
from cosmos_rl_core.ops.clusters.launcher import ClusterRun, find_launcher, shares_files
from cosmos_rl_core.ops.clusters.manifest import IS_FRESH, START, KubernetesManifest, merged
from cosmos_rl_core.recipe.sections import TlsSection
from cosmos_rl_core.wire.handshake import make_token
from cosmos_rl_core.wire.tls import read_tls

RECIPE = """
[run]
domain = "cosmos_rl_core.testing.tiny:TINY"
name = "{name}"
output_dir = "{directory}/run"
max_steps = 3
[rollout]
replicas = 2
[[reward.functions]]
name = "hits"
[cluster]
env = {{ WORD = "two words" }}
[cluster.kubernetes]
image = "example.com/cosmos-rl:1"
claim = "runs"
"""
MACHINES = ("policy.replicas=2", "policy.ranks_per_node=4", "policy.num_nodes=2")


@pytest.fixture
def cluster(tmp_path):
    def make(*overrides, name="my run"):
        (tmp_path / "run.toml").write_text(RECIPE.format(directory=tmp_path, name=name))
        return ClusterRun.of(tmp_path / "run.toml", overrides)

    return make


def objects(run):
    """The objects of the plan, by kind and the end of their names."""
    found = list(yaml.safe_load_all(Kubernetes().plan(run)))
    return {(one["kind"], one["metadata"]["name"].removeprefix(KubernetesManifest(run).name)): one for one in found}


def container(job):
    (found,) = job["spec"]["template"]["spec"]["containers"]
    return found


def replicated(run):
    """The Jobs of the JobSet by their names."""
    return {job["name"]: job["template"] for job in objects(run)["JobSet", ""]["spec"]["replicatedJobs"]}


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        MACHINES,
        ('checkpoint.path="s3://bucket/runs"', 'cluster.kubernetes.token_secret="mine"'),
        ('cluster.kubernetes.queue="robots"', 'cluster.kubernetes.namespace="team"', 'cluster.setup=["ulimit -n 9"]'),
        ('cluster.kubernetes.shm_size="64Gi"', 'cluster.kubernetes.pod.spec={nodeSelector={pool="gpu"}}'),
    ],
)
def test_every_object_is_valid(cluster, overrides):
    found = objects(cluster(*overrides))
    assert [problem for one in found.values() for problem in problems(one)] == []
    assert {kind for kind, _ in found} <= set(KINDS)


@pytest.mark.parametrize(
    ("place", "key", "value", "reported"),
    [
        (("replicatedJobs", 1, "template", "spec", "template", "spec"), "restartPolcy", "Never", "restartPolcy"),
        (("failurePolicy", "rules", 0), "name", "user-error", "user-error"),
        (("failurePolicy", "rules", 0), "action", "Restart", "Restart"),
        (("successPolicy",), "targetReplicatedJobs", ["control"], "control is no replicatedJob"),
        (("replicatedJobs", 0), "name", "c" * 40, "of a pod is too long"),
    ],
)
def test_the_schema_finds_planted_errors(cluster, place, key, value, reported):
    wrong = copy.deepcopy(objects(cluster(*MACHINES))["JobSet", ""])
    table = wrong["spec"]
    for step in place:
        table = table[step]
    table[key] = value
    assert any(reported in problem for problem in problems(wrong))


@pytest.mark.parametrize("name", ["x" * 80, "7B_Model.v2", "--", "日本", "a-" * 15 + "b"])
def test_names_are_those_of_hosts(cluster, name):
    for one in objects(cluster(name=name)).values():
        assert problems(one) == []


def test_a_pod_has_what_its_process_needs(cluster):
    found = objects(cluster("policy.ranks_per_node=4", "elastic.leave_s=30.5"))
    jobs = {job["name"]: job["template"] for job in found["JobSet", ""]["spec"]["replicatedJobs"]}
    policy = jobs["policy-0"]["spec"]["template"]["spec"]
    assert policy["terminationGracePeriodSeconds"] == 31 + 120
    assert container(jobs["policy-0"])["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    assert {"name": "WORD", "value": "two words"} in container(jobs["policy-0"])["env"]
    assert "resources" not in container(jobs["controller"])
    assert container(found["Job", "-rollout-1"])["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    words = container(found["Job", "-rollout-1"])["command"]
    assert words[words.index("--name") + 1] == "rollout-1"
    host = f"{KubernetesManifest(cluster()).name}-controller-0-0.{KubernetesManifest(cluster()).name}"
    assert words[words.index("--controller") + 1] == f"tcp://{host}:29400"
    assert f"run.advertise={host}:29400" in container(jobs["controller"])["command"]
    recipe = found["ConfigMap", "-recipe"]["data"]["run.toml"]
    assert 'name = "my run"' in recipe and "replicas = 2" in recipe


def test_a_policy_over_machines_is_restarted_as_a_whole(cluster):
    found = objects(cluster(*MACHINES))["JobSet", ""]
    second = found["spec"]["replicatedJobs"][2]["template"]
    assert (second["spec"]["completions"], second["spec"]["backoffLimit"]) == (2, 0)
    name = KubernetesManifest(cluster()).name
    assert container(second)["command"][-4:] == [
        "--node",
        "$(MACHINE)",
        "--rendezvous",
        f"{name}-policy-1-0-0.{name}:29401",
    ]
    assert found["spec"]["failurePolicy"]["rules"][-1]["action"] == "RestartJob"


def test_with_checkpoints_in_s3_the_controller_alone_mounts_the_claim(cluster):
    def mounts(jobs):
        return {
            name: "/runs" in [one["mountPath"] for one in container(job)["volumeMounts"]] for name, job in jobs.items()
        }

    assert mounts(replicated(cluster('checkpoint.path="s3://bucket/runs"'))) == {"controller": True, "policy-0": False}
    assert mounts(replicated(cluster())) == {"controller": True, "policy-0": True}


def test_the_token_is_that_of_an_existing_secret_or_new_each_time(cluster):
    given = objects(cluster('cluster.kubernetes.token_secret="mine"'))
    assert not any(kind == "Secret" for kind, _ in given)
    (token, *_) = container(given["Job", "-rollout-0"])["env"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "mine", "key": "token"}}
    first, second = (objects(cluster())["Secret", "-token"]["stringData"]["token"] for _ in range(2))
    assert first != second and len(bytes.fromhex(first)) == 32


def test_overlays_are_merged_by_role(cluster):
    run = cluster(
        'cluster.kubernetes.pod.metadata={labels={team="a"}}',
        'cluster.kubernetes.pod.spec={schedulerName="x", tolerations=[{operator="Exists"}]}',
        'cluster.kubernetes.policy_pod.spec.schedulerName="y"',
        'cluster.kubernetes.policy_pod.spec.containers=[{name="cosmos-rl", resources={limits={rdma=8}}}]',
    )
    jobs = replicated(run)
    policy, controller = (jobs[name]["spec"]["template"] for name in ("policy-0", "controller"))
    assert (policy["spec"]["schedulerName"], controller["spec"]["schedulerName"]) == ("y", "x")
    assert policy["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert policy["metadata"]["labels"] == {"cosmos-rl/run": KubernetesManifest(run).name, "team": "a"}
    assert container(jobs["policy-0"])["resources"] == {"limits": {"nvidia.com/gpu": 1, "rdma": 8}}
    with pytest.raises(UserError, match="an item of containers has no name"):
        objects(cluster('cluster.kubernetes.pod.spec={containers=[{image="x"}]}'))
    with pytest.raises(UserError, match="tables metadata and spec"):
        cluster('cluster.kubernetes.pod={nodeSelector={pool="gpu"}}')


def test_a_strategic_merge_patch_replaces_other_lists():
    base = {"args": [1, 2], "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
    patch = {"args": [3], "env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]}
    assert merged(base, patch) == {
        "args": [3],
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}, {"name": "C", "value": "4"}],
    }


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (["image"], r"has no image \(such as \"registry.*\"\)$"),
        (["claim"], r"has no claim \(such as \"runs\", a PersistentVolumeClaim\)$"),
        (["image", "claim"], r"has no image .* and no claim"),
    ],
)
def test_image_and_claim_are_required(cluster, missing, message):
    with pytest.raises(UserError, match=rf"\[cluster.kubernetes\] {message}"):
        Kubernetes().plan(cluster(*(f'cluster.kubernetes.{key}=""' for key in missing)))


def test_pods_get_the_certificates_of_the_run(cluster, monkeypatch, tmp_path):
    run = cluster("tls.enabled=true", 'cluster.kubernetes.token_secret="mine"', *MACHINES)
    assert Kubernetes().plan(run).startswith("# The Secrets are those of this run")
    found = objects(run)
    assert [problem for one in found.values() for problem in problems(one)] == []
    assert {name for kind, name in found if kind == "Secret"} == {"-tls"}
    bundles = found["Secret", "-tls"]["stringData"]
    jobs = {job["name"]: job["template"] for job in found["JobSet", ""]["spec"]["replicatedJobs"]}
    jobs["rollout-1"] = found["Job", "-rollout-1"]
    variables = {name: secrets_of(container(job)) for name, job in jobs.items()}
    workers = {
        "COSMOS_RL_TOKEN": ("mine", "token"),
        "COSMOS_RL_TLS": (f"{KubernetesManifest(run).name}-tls", "tls.pem"),
    }
    own = {"COSMOS_RL_CONTROLLER_TLS": (f"{KubernetesManifest(run).name}-tls", "tls_controller.pem")}
    assert variables.pop("controller") == workers | own
    assert set(variables) == {"policy-0", "policy-1", "rollout-1"} and all(one == workers for one in variables.values())

    monkeypatch.setenv("COSMOS_RL_CONTROLLER_TLS", bundles["tls_controller.pem"])
    with pytest.raises(UserError, match="COSMOS_RL_TLS is not the certificate of its workers"):
        make_secrets(tmp_path, run.config.tls)
    monkeypatch.setenv("COSMOS_RL_TLS", bundles["tls.pem"])
    made = make_secrets(tmp_path, run.config.tls)
    assert (made.controller.bundle, made.workers.bundle) == (bundles["tls_controller.pem"], bundles["tls.pem"])
    (tmp_path / "tls.pem").unlink()
    (tmp_path / "tls.pem").touch(mode=0o600)  # of an earlier launch
    assert read_secrets(tmp_path, run.config.tls) == made
    assert read_tls(tmp_path / "tls.pem") == made.workers


@pytest.mark.parametrize(
    ("bind", "tls", "words"),
    [
        ("127.0.0.1", {}, ""),
        ("0.0.0.0", {}, "[run] bind = 0.0.0.0 without TLS: connections are authenticated by the run's token and not"),
        ("0.0.0.0", {"enabled": True}, "for connections to the controller; [tls] weights = true adds weights"),
        ("0.0.0.0", {"enabled": True, "weights": True}, "for all connections"),
    ],
)
def test_a_run_says_what_others_in_the_network_can_read(tmp_path, bind, tls, words):
    section = TlsSection(**tls)
    made = make_secrets(tmp_path, section)
    text = describe_encryption(made, section, bind=bind)
    assert words in text and bool(words) == bool(text)
    assert (f"TLS 1.3 with the CA {made.ca[:16]}" in text) == bool(tls)


def secrets_of(container):
    """The variables of a container that come from Secrets: (name, key)."""
    keys = {one["name"]: one["valueFrom"].get("secretKeyRef") for one in container["env"] if "valueFrom" in one}
    return {name: (key["name"], key["key"]) for name, key in keys.items() if key}


@pytest.mark.parametrize(
    ("left", "first", "words"),
    [
        ([], "", []),
        ([], "--resume auto", ["--resume", "auto"]),
        (["token:ours", "controller.json:"], "--resume auto", []),  # it was killed: its successor takes over
        (["token:ours"], "", ["--resume", "auto"]),  # it was stopped, or never listened
        (["token:theirs", "controller.json:"], "", []),  # an earlier launch: refused by the controller
        (["token:theirs", "controller.json:"], "--resume auto", ["--resume", "auto"]),
    ],
)
def test_a_controller_that_starts_again_continues(tmp_path, left, first, words):
    for one in left:
        name, _, text = one.partition(":")
        (tmp_path / name).write_text(f"{text}\n")
    command = ["/bin/sh", "-c", START, "sh", str(tmp_path), first, "echo", "a b"]
    done = subprocess.run(
        command, env={**os.environ, "COSMOS_RL_TOKEN": "ours"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == " ".join(["a b", *words])


def test_a_controller_of_a_later_launch_refuses_the_run_of_an_earlier_one(tmp_path, monkeypatch):
    """Its workers would have another token than those of the earlier launch."""
    ControllerFile(address="tcp://127.0.0.1:1", generation=0, pid=1, host="x").write(tmp_path)
    make_token(tmp_path / "token")
    monkeypatch.setenv("COSMOS_RL_TOKEN", "5a" * 32)
    with pytest.raises(UserError, match="contains an earlier run, with another token"):
        take_over(tmp_path, "")


def test_a_status_is_fresh_for_a_while(tmp_path):
    def code(path):
        return subprocess.run(
            ["/bin/sh", "-c", IS_FRESH, "sh", path, "120"], capture_output=True, check=False
        ).returncode

    path = tmp_path / "status.json"
    assert code(path) != 0
    path.touch()
    assert code(path) == 0
    os.utime(path, (time.time() - 121,) * 2)
    assert code(path) != 0


def job(replica, *, status=None, **metadata):
    labels = {"cosmos-rl/replica": replica}
    suspend = status is None
    return {
        "kind": "Job",
        "metadata": {"labels": labels, **metadata},
        "spec": {"suspend": suspend},
        "status": status or {},
    }


def job_set(*, status=None, suspend=False, **metadata):
    spec = {"suspend": suspend, "replicatedJobs": [{"name": "controller"}, {"name": "policy-0"}]}
    return {"kind": "JobSet", "metadata": metadata, "spec": spec, "status": status or {}}


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """A kubectl that records its arguments in `calls` and prints the file `jobs`."""
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin" / "kubectl"
    path.write_text(
        f'#!/bin/bash\necho "$@" >> {tmp_path}/calls\nif [[ " $* " = *" get "* ]]; then cat {tmp_path}/jobs; fi'
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path


def test_the_states_are_those_of_the_jobs(cluster, kubectl):
    ended = {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}
    jobs = [
        job("controller", status={"active": 1}),
        job("policy-0", status={"active": 1}, deletionTimestamp="now"),
        job("rollout-0"),
        job("rollout-1", status=ended),
    ]
    (kubectl / "jobs").write_text(json.dumps({"items": jobs}))
    run = cluster('cluster.kubernetes.namespace="team"')
    assert Kubernetes().alive(run) == {"controller": "1 active", "policy-0": "leaving", "rollout-0": "suspended"}
    Kubernetes().scale(run, {"rollout": 3})  # rollout-0 stays, and the name of the one that has ended is in use
    calls = (kubectl / "calls").read_text().splitlines()
    kinds = "jobsets.jobset.x-k8s.io,jobs.batch"
    assert (
        calls[0]
        == f"--namespace=team get {kinds} --selector=cosmos-rl/run={KubernetesManifest(run).name} --output=json"
    )
    assert calls[-1] == "--namespace=team create --filename=-"


@pytest.mark.parametrize(
    ("items", "states"),
    [
        ([job_set()], {"controller": "no Job yet", "policy-0": "no Job yet"}),
        ([job_set(suspend=True)], {"controller": "suspended", "policy-0": "suspended"}),
        ([job_set(), job("controller", status={"active": 1})], {"controller": "1 active", "policy-0": "no Job yet"}),
        ([job_set(deletionTimestamp="now")], {"controller": "leaving", "policy-0": "leaving"}),
        ([job_set(status={"terminalState": "Completed"})], {}),
    ],
)
def test_a_job_set_without_its_jobs_is_alive(cluster, kubectl, items, states):
    (kubectl / "jobs").write_text(json.dumps({"items": items}))
    assert Kubernetes().alive(cluster()) == states


@pytest.mark.parametrize(
    "text",
    [
        'error: the server doesn\'t have a resource type "jobsets"',
        'error: resource mapping not found: no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"',
    ],
)
def test_a_cluster_without_job_sets_is_an_error_with_the_line_that_installs_them(cluster, kubectl, text):
    (kubectl / "bin" / "kubectl").write_text(f"#!/bin/bash\ncat >&2 <<'END'\n{text}\nEND\nexit 1")
    with pytest.raises(UserError, match=r"JobSet is not installed in the cluster: kubectl apply --server-side -f http"):
        Kubernetes().alive(cluster())


def test_kubectl_that_is_missing_or_refuses_is_an_error(cluster, kubectl, monkeypatch, tmp_path):
    (kubectl / "bin" / "kubectl").write_text("#!/bin/bash\necho 'no such namespace' >&2; exit 1")
    with pytest.raises(UserError, match="no such namespace"):
        Kubernetes().alive(cluster())
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="kubectl is not installed here"):
        Kubernetes().alive(cluster())


def test_the_machines_see_no_files_of_this_one():
    assert isinstance(find_launcher("kubernetes"), Kubernetes)
    assert not shares_files("kubernetes") and shares_files("slurm")

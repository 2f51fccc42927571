"""The job files of docs/clusters.md: variables of `cosmos-rl node`, SkyPilot's file by its parser, KubeRay's fields."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SKYPILOT = "skypilot==0.14.1"
VARIABLES = {
    "SKYPILOT_NUM_NODES": "4",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4",
    "DSTACK_NODES_NUM": "4",
    "DSTACK_NODE_RANK": "1",
    "DSTACK_MASTER_NODE_IP": "10.0.0.1",
    "LEPTON_JOB_TOTAL_WORKERS": "4",
    "LEPTON_JOB_WORKER_INDEX": "1",
    "LEPTON_JOB_NAME": "10",
    "LEPTON_SUBDOMAIN": "0.1",
}
"""Of the second of four nodes."""
PARSE = """
import sys, yaml, sky
task = sky.Task.from_yaml_config(yaml.safe_load(sys.stdin), secrets_overrides=[("COSMOS_RL_TOKEN", "00" * 32)])
(resources,) = task.resources
print(task.num_nodes, dict(resources.accelerators), sorted(task.storage_mounts), sorted(task.secrets))
"""


def block(title):
    """The first block of code after a title in bold."""
    text = (ROOT / "docs" / "clusters.md").read_text()
    return re.search(rf"\*\*{re.escape(title)}\*\*.*?```\w*\n(.*?)```", text, re.DOTALL)[1]


@pytest.mark.parametrize("title", ["SkyPilot", "dstack", "DGX Cloud Lepton"])
def test_each_file_calls_the_command_with_this_node(title, tmp_path):
    command = re.search(r"cosmos-rl node (.*\n)((?: {4}|  -).*\n)*", block(title))[0]
    if title == "dstack":  # YAML folds the line
        command = command.replace("\n    ", " ")
    (tmp_path / "cosmos-rl").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "cosmos-rl").chmod(0o755)
    environment = {**VARIABLES, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    out = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True).stdout
    words = out.split()
    head = "10-0.0.1" if title == "DGX Cloud Lepton" else "10.0.0.1"
    assert words[:8] == ["node", "gsm8k.toml", "--nodes", "4", "--node", "1", "--head", head]
    assert words[8].startswith("checkpoint.path=")
    assert len(words) == 9


def test_the_job_of_kuberay_has_its_fields():
    text = (ROOT / "docs" / "clusters.md").read_text()
    job = yaml.safe_load(re.search(r"With KubeRay.*?```yaml\n(.*?)```", text, re.DOTALL)[1])
    assert (job["apiVersion"], job["kind"], set(job)) == (
        "ray.io/v1",
        "RayJob",
        {"apiVersion", "kind", "metadata", "spec"},
    )
    spec = job["spec"]
    assert set(spec) == {"entrypoint", "submissionMode", "shutdownAfterJobFinishes", "rayClusterSpec"}
    assert spec["submissionMode"] in ("K8sJobMode", "HTTPMode", "SidecarMode")
    assert shlex.split(spec["entrypoint"])[:2] == ["cosmos-rl", "launch"] and " --on ray " in spec["entrypoint"]
    head, (workers,) = spec["rayClusterSpec"]["headGroupSpec"], spec["rayClusterSpec"]["workerGroupSpecs"]
    assert set(head) == {"rayStartParams", "template"}
    assert set(workers) == {"groupName", "replicas", "rayStartParams", "template"}
    assert all(isinstance(value, str) for value in head["rayStartParams"].values())
    for group in (head, workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert "/shared" in {mount["mountPath"] for mount in container["volumeMounts"]}


@pytest.fixture(scope="module")
def skypilot():
    """The interpreter of an environment with SkyPilot, made on demand and kept in .cache."""
    root = ROOT / ".cache" / "skypilot"
    python = root / "bin" / "python"
    if not (root / ".installed").exists():
        for command in (
            [sys.executable, "-m", "venv", root],
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", SKYPILOT],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{SKYPILOT} could not be installed: {done.stderr.strip().splitlines()[-1]}")
        (root / ".installed").touch()
    return python


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_skypilot_reads_its_file(skypilot, tmp_path):
    def parse(text):
        home = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        return subprocess.run([skypilot, "-c", PARSE], input=text, env=home, capture_output=True, text=True, cwd=ROOT)

    done = parse(block("SkyPilot"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "4 {'H100': 8} ['/runs'] ['COSMOS_RL_TOKEN']"
    assert parse(block("SkyPilot").replace("num_nodes", "nodes")).returncode != 0

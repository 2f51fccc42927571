"""The objects of `cosmos-rl launch --on kubernetes` against Kubernetes' published schemas and the types of kubectl."""

import copy
import json
import shutil
import subprocess

import pytest
import yaml

from cosmos_rl_core.ops.clusters.kubernetes import Kubernetes
from cosmos_rl_core.ops.clusters.launcher import ClusterRun

pytestmark = pytest.mark.slow

VERSIONS = ("1.29", "1.37")


@pytest.fixture(scope="module")
def validate():
    library = pytest.importorskip("kubernetes_validate", reason="tests/cluster/README.md has the install line")
    return lambda one, version: library.validate(one, version, strict=True)


@pytest.fixture
def jobs(tmp_path, bandit, write_recipe):
    """All objects; the Jobs of the JobSet as Jobs."""
    settings = {"image": "none", "claim": "claim", "queue": "robots", "shm_size": "1Gi"}
    tables = bandit(tmp_path / "run", cluster__kubernetes=settings, policy__num_nodes=2, policy__ranks_per_node=2)
    found = []
    for one in yaml.safe_load_all(Kubernetes().plan(ClusterRun.of(write_recipe(tmp_path / "run.toml", tables), []))):
        templates = [job["template"] for job in one["spec"]["replicatedJobs"]] if one["kind"] == "JobSet" else []
        found += [{"apiVersion": "batch/v1", "kind": "Job", **template} for template in templates] or [one]
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_published_schemas_accept_them(jobs, validate, version):
    assert [one["kind"] for one in jobs] == ["Secret", "ConfigMap", "Job", "Job", "Job"]
    for one in jobs:
        validate(one, version)


def test_a_planted_error_is_found(jobs, validate):
    wrong = copy.deepcopy(jobs[-1])
    wrong["spec"]["template"]["spec"]["restartPolcy"] = "Never"
    with pytest.raises(Exception, match="restartPolcy"):
        validate(wrong, VERSIONS[-1])


@pytest.fixture
def decoded():
    """Return an object as kubectl decodes it, without a cluster: it drops fields that its types do not have."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")

    def decode(one):
        command = ["kubectl", "set", "env", "--local", "--filename=-", "ADDED=1", "--output=json"]
        done = subprocess.run(command, input=json.dumps(one), text=True, capture_output=True, check=True)
        return json.loads(done.stdout)

    return decode


def lost(one, other, place=""):
    """Return the places of an object that another one does not have, or has with another value."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [found for key in one for found in lost(one[key], other.get(key), f"{place}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) <= len(other):
        return [found for index, item in enumerate(one) for found in lost(item, other[index], f"{place}[{index}]")]
    return [] if str(one) == str(other) else [place]  # a quantity is a text there


def test_kubectl_decodes_all_fields_of_jobs(jobs, decoded):
    found = [one for one in jobs if one["kind"] == "Job"]
    assert len(found) == 3
    for one in found:
        assert lost(one, decoded(one)) == []
    wrong = copy.deepcopy(found[0])
    wrong["spec"]["template"]["spec"]["restartPolcy"] = "Never"
    assert lost(wrong, decoded(wrong)) == [".spec.template.spec.restartPolcy"]

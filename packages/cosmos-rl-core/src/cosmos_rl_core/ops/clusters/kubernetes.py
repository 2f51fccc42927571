"""Kubernetes: a JobSet with the controller and the policies, and a Job for each rollout replica (`clusters.manifest`).

`plan` returns the text for `kubectl apply -f -`; the other methods call kubectl. Jobs are found by their labels.
"""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.ops.clusters.launcher import ClusterRun, rollouts_of, run_command
from cosmos_rl_core.ops.clusters.manifest import REPLICA_LABEL, RUN_LABEL, KubernetesManifest
from cosmos_rl_core.wire.certificates import make_bundles
from cosmos_rl_core.wire.handshake import TOKEN_BYTES

HAS_SECRETS = "# The Secrets are those of this run: do not publish this text.\n"
READ = "jobsets.jobset.x-k8s.io,jobs.batch"
KINDS = f"{READ},configmaps,secrets"
NO_JOB_SETS = ('resource type "jobsets"', 'no matches for kind "JobSet"')
"""In kubectl's message where JobSet is not installed."""
JOB_SET = "https://github.com/kubernetes-sigs/jobset/releases/latest/download/manifests.yaml"


class KubernetesJob(NamedTuple):
    """A Job of a run."""

    replica: str
    """"controller" or a replica's name."""
    state: str
    ended: bool
    leaving: bool
    """Whether it is being deleted, while its pods save."""


class Kubernetes:
    """Implements `Launcher`."""

    shares_files = False

    def plan(self, run: ClusterRun) -> str:
        """Return the objects as YAML, with the run's secrets: a new token, unless [cluster.kubernetes] has a
        token_secret, and with [tls] new certificates."""
        tls = make_bundles(valid_days=run.config.tls.valid_days) if run.config.tls.enabled else None
        text = to_yaml(KubernetesManifest(run).objects(token=secrets.token_hex(TOKEN_BYTES), tls=tls))
        is_secret = tls is not None or not run.config.cluster.kubernetes.token_secret
        return (HAS_SECRETS if is_secret else "") + text

    def start(self, run: ClusterRun) -> list[str]:
        """Create the objects, after removing those of an earlier launch that has ended."""
        name = KubernetesManifest(run).name
        text = self.plan(run)
        _kubectl(run, "delete", KINDS, f"--selector={RUN_LABEL}={name}", "--cascade=foreground", "--wait=true")
        created = _kubectl(run, "create", "--filename=-", text=text).splitlines()
        job = f"job/{name}-controller-0"
        return [
            *created,
            f"output: {_shown(run, 'logs', '--follow', job)}",
            f"status: {_shown(run, 'exec', job, '--', 'cosmos-rl', 'status', KubernetesManifest(run).directory)}",
        ]

    def alive(self, run: ClusterRun) -> Mapping[str, str]:
        """Return the state of each Job that has not ended: "1 active", "suspended"; while its pods save, "leaving"."""
        return {job.replica: job.state for job in _jobs(run) if not job.ended}

    def scale(self, run: ClusterRun, targets: Mapping[str, int]) -> list[str]:
        """Create Jobs of rollouts, or delete those with the highest numbers, whose prompts others then get."""
        manifest, count = KubernetesManifest(run), rollouts_of(targets, platform="kubernetes")
        rollouts = {job.replica: job for job in _jobs(run) if job.replica.startswith("rollout-")}
        leaving = [name for name, job in rollouts.items() if job.ended or job.leaving]
        surplus, missing = run.rescaled("rollout", count, present=rollouts, leaving=leaving)
        lines = []
        for name in surplus:
            deleted = f"{manifest.name}-{name}"
            lines += _kubectl(run, "delete", "jobs.batch", deleted, "--cascade=foreground", "--wait=false").splitlines()
        if missing:
            text = to_yaml(manifest.rollout(replica) for replica in missing)
            lines += _kubectl(run, "create", "--filename=-", text=text).splitlines()
        return lines

    def stop(self, run: ClusterRun, *, now: bool) -> list[str]:
        """Delete all objects; return a line for each."""
        selector = f"--selector={RUN_LABEL}={KubernetesManifest(run).name}"
        lines = _kubectl(run, "delete", KINDS, selector, "--cascade=foreground", "--wait=false").splitlines()
        if now:
            _kubectl(run, "delete", "pods", selector, "--grace-period=0", "--force", "--wait=false")
        return [line for line in lines if " deleted" in line]


def to_yaml(objects: Iterable[Mapping[str, Any]]) -> str:
    """Return YAML documents. Raises UserError without the extra `kubernetes`."""
    try:
        import yaml
    except ImportError as error:
        raise UserError(f"PyYAML is missing: {pip_install('cosmos-rl-core[kubernetes]')}") from error

    class Dumper(yaml.SafeDumper):
        """Writes texts of several lines as such, and no aliases."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    def text(dumper: Dumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, explicit_start=True, width=120)


def _jobs(run: ClusterRun) -> list[KubernetesJob]:
    """Return the Jobs of a run as the cluster has them, and those that its JobSet has not created yet, or has ended."""
    selector = f"--selector={RUN_LABEL}={KubernetesManifest(run).name}"
    items = json.loads(_kubectl(run, "get", READ, selector, "--output=json"))["items"]
    jobs = [_job(item) for item in items if item["kind"] == "Job"]
    created = {job.replica for job in jobs}
    for item in items:
        if item["kind"] == "JobSet" and not item.get("status", {}).get("terminalState"):
            leaving = "deletionTimestamp" in item["metadata"]
            suspended = item["spec"].get("suspend", False)
            state = "leaving" if leaving else "suspended" if suspended else "no Job yet"
            missing = [one["name"] for one in item["spec"]["replicatedJobs"] if one["name"] not in created]
            jobs += [KubernetesJob(replica=name, state=state, ended=False, leaving=leaving) for name in missing]
    return jobs


def _job(item: Mapping[str, Any]) -> KubernetesJob:
    """Return the state of a Job."""
    status, metadata = item.get("status", {}), item["metadata"]
    true = {one["type"]: one for one in status.get("conditions", []) if one["status"] == "True"}
    end = true.get("Complete") or true.get("Failed")
    state = f"{status.get('active', 0)} active"
    if end is not None:
        state = " ".join(filter(None, (end["type"], end.get("reason"))))
    elif item["spec"].get("suspend"):
        state = "suspended"
    leaving = "deletionTimestamp" in metadata
    return KubernetesJob(
        replica=metadata["labels"][REPLICA_LABEL],
        state="leaving" if leaving else state,
        ended=end is not None and not leaving,
        leaving=leaving,
    )


def _place(run: ClusterRun) -> list[str]:
    namespace = run.config.cluster.kubernetes.namespace
    return [f"--namespace={namespace}"] if namespace else []


def _shown(run: ClusterRun, *arguments: str) -> str:
    return shlex.join(["kubectl", *_place(run), *arguments])


def _kubectl(run: ClusterRun, *arguments: str, text: str | None = None) -> str:
    """Run kubectl with `text` as its input; return its output. Raises UserError with its error message."""
    try:
        return run_command("kubectl", *_place(run), *arguments, text=text, missing="kubectl is not installed here")
    except UserError as error:
        if not any(words in str(error) for words in NO_JOB_SETS):
            raise
        install = f"JobSet is not installed in the cluster: kubectl apply --server-side -f {JOB_SET}"
        raise UserError(f"{error}; {install}") from error

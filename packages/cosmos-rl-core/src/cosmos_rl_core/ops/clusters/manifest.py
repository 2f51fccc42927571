"""The objects of a run on Kubernetes, as dictionaries.

    Secret      NAME-token        the run's token
    Secret      NAME-tls          with [tls], the certificates of the controller and of the workers
    ConfigMap   NAME-recipe       the recipe with all its keys
    JobSet      NAME              controller and policies; it completes with the controller
    Job         NAME-rollout-0    one rollout replica; others can be created while the run is live

A JobSet cannot change its number of Jobs, so the rollouts are not in it. Field names: JobSet v1alpha2, batch/v1, v1.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.ops.clusters.launcher import ClusterRun, Replica
from cosmos_rl_core.recipe.load import dump_resolved
from cosmos_rl_core.wire.handshake import TOKEN_VARIABLE
from cosmos_rl_core.wire.tls import CONTROLLER_TLS_FILE, CONTROLLER_TLS_VARIABLE, TLS_FILE, TLS_VARIABLE, Tls

RUN_LABEL = "cosmos-rl/run"
REPLICA_LABEL = "cosmos-rl/replica"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MAX_NAME = 30
"""Characters of the run's name in an object's name; those of a pod have at most 63."""
CONTAINER = "cosmos-rl"
RECIPE_FOLDER = "/etc/cosmos-rl"
RENDEZVOUS_PORT = 29401
"""Port on the first machine of a policy replica over several machines."""
LEFT = 143
"""Exit code of a worker that leaves after SIGTERM: a Job starts no pod again that has exited with 0."""
PROBE_S = 5
FROZEN_S = 120
"""Age of status.json, which the controller writes each second, at which its container is killed."""
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "hostAliases": "ip",
    "ports": "containerPort",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists whose items a strategic merge patch identifies by a key; other lists are replaced."""
START = """# The arguments are the run's directory, the options of a first start, and the command of the controller.
run=$1 first=$2; shift 2
token=
if [ -r "$run/token" ]; then read -r token < "$run/token"; fi
if [ "$token" != "$COSMOS_RL_TOKEN" ]; then
  set -- "$@" $first
elif [ ! -e "$run/controller.json" ]; then  # a killed one leaves this file
  set -- "$@" --resume auto
fi
exec "$@"
"""
"""An earlier pod of the same launch has left the same token."""
IS_FRESH = 'now=$(date +%s) && then=$(stat -c %Y "$1") && [ $((now - then)) -lt "$2" ]'
REQUIRED = {"image": '"registry.example.com/cosmos-rl:1"', "claim": '"runs", a PersistentVolumeClaim'}
"""Keys of [cluster.kubernetes] without which there is no run, with an example of each."""
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KubernetesManifest:
    """The objects of one run."""

    run: ClusterRun

    @property
    def name(self) -> str:
        """Name of the JobSet and of its Service; other names begin with it. A DNS label that begins with a letter."""
        *words, digits = re.sub(r"[^a-z0-9]+", "-", self.run.label.lower()).strip("-").split("-")
        name = "-".join(words)[:MAX_NAME].strip("-")
        return f"{name}-{digits}" if name[:1].isalpha() else f"run-{name}-{digits}".replace("--", "-")

    @property
    def directory(self) -> str:
        """The run's directory in the pods."""
        return f"{self.run.config.cluster.kubernetes.mount_path}/{self.name}"

    @property
    def controller(self) -> str:
        """Host name and port of the controller: those of the first pod of the Job "controller"."""
        return f"{self.name}-controller-0-0.{self.name}:{self.run.config.cluster.kubernetes.port}"

    def objects(self, *, token: str, tls: tuple[Tls, Tls] | None = None) -> Iterator[Object]:
        """Yield all objects. tls: the bundles of the controller and of the workers, with [tls].

        Raises UserError if [cluster.kubernetes] has no image or no claim.
        """
        settings = self.run.config.cluster.kubernetes
        if missing := [f"{key} (such as {example})" for key, example in REQUIRED.items() if not getattr(settings, key)]:
            raise UserError(f"[cluster.kubernetes] has no {' and no '.join(missing)}")
        if not settings.token_secret:
            yield {"apiVersion": "v1", "kind": "Secret", **self._metadata("-token"), "stringData": {"token": token}}
        if tls is not None:
            bundles = dict(zip((CONTROLLER_TLS_FILE, TLS_FILE), (one.bundle for one in tls), strict=True))
            yield {"apiVersion": "v1", "kind": "Secret", **self._metadata("-tls"), "stringData": bundles}
        recipe = {"run.toml": dump_resolved(self.run.config)}
        yield {"apiVersion": "v1", "kind": "ConfigMap", **self._metadata("-recipe"), "data": recipe}
        yield self.job_set()
        for replica in self.run.rollouts():
            yield self.rollout(replica)

    def rollout(self, replica: Replica) -> Object:
        """Return the Job of a rollout replica."""
        metadata = self._metadata(f"-{replica.name}", replica=replica.name, queued=True)
        return {"apiVersion": "batch/v1", "kind": "Job", **metadata, **self._worker_job(replica)}

    def job_set(self) -> Object:
        """Return the JobSet of the controller and the policies."""
        policies = self.run.policies()
        spec: Object = {
            "network": {"enableDNSHostnames": True, "subdomain": self.name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["controller"]},
        }
        if policies[0].machines > 1:  # a lost machine ends the others of its replica: all its pods are created again
            names = [replica.name for replica in policies]
            rules = [
                {"name": "userError", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                {"name": "lostController", "action": "FailJobSet", "targetReplicatedJobs": ["controller"]},
                {"name": "lostPolicy", "action": "RestartJob", "targetReplicatedJobs": names},
            ]
            spec["failurePolicy"] = {"maxRestarts": self.run.config.elastic.restart_workers, "rules": rules}
        else:
            spec["failurePolicy"] = {"maxRestarts": 0}  # each Job replaces its own pod
        jobs = [("controller", self._controller_job()), *((one.name, self._worker_job(one)) for one in policies)]
        spec["replicatedJobs"] = [
            {"name": name, "replicas": 1, "template": {"metadata": {"labels": self._labels(name)}, **job}}
            for name, job in jobs
        ]
        head = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
        return {**head, **self._metadata("", queued=True), "spec": spec}

    def _controller_job(self) -> Object:
        settings = self.run.config.cluster.kubernetes
        bind = self.run.config.run.bind if "bind" in self.run.config.run.model_fields_set else "0.0.0.0"
        listens = [f"run.bind={bind}", f"run.port={settings.port}", f"run.advertise={self.controller}"]
        arguments = ["controller", f"{RECIPE_FOLDER}/run.toml", f"run.output_dir={self.directory}", *listens]
        start = ["/bin/sh", "-c", START, "sh", self.directory, "--resume auto" if self.run.resume else ""]
        wait_s = self.run.config.cluster.start_wait_s
        check = ["/bin/sh", "-c", IS_FRESH, "sh", f"{self.directory}/status.json", str(FROZEN_S)]
        probe = {"exec": {"command": check}, "periodSeconds": PROBE_S, "timeoutSeconds": PROBE_S}
        probes = {
            "startupProbe": {**probe, "failureThreshold": max(1, math.ceil(wait_s / PROBE_S))},
            "livenessProbe": {**probe, "failureThreshold": 3},
        }
        pod = self._pod("controller", [*start, *self._program(), *arguments, "elastic.controller_moves=true"])
        pod["spec"]["containers"][0] |= probes
        pod["spec"]["volumes"].append({"name": "recipe", "configMap": {"name": f"{self.name}-recipe"}})
        mount = {"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True}
        pod["spec"]["containers"][0]["volumeMounts"].append(mount)
        # 1: a worker has failed; 3: the monitor has ended it; 130: no policy has come. The run is over.
        return self._job(self._merged(pod, "controller"), ends=(1, 2, 3, 130))

    def _worker_job(self, replica: Replica) -> Object:
        run = replace(self.run, folders=())  # folders of this machine
        command = [*self._program(), *run.worker_arguments(replica, controller=f"tcp://{self.controller}")]
        command += ["--left-code", str(LEFT)]
        if replica.machines > 1:
            first = f"{self.name}-{replica.name}-0-0.{self.name}:{RENDEZVOUS_PORT}"
            command += ["--node", "$(MACHINE)", "--rendezvous", first]
        pod = self._pod(replica.role, command)
        container = pod["spec"]["containers"][0]
        if replica.machines > 1:
            index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            container["env"].append({"name": "MACHINE", "valueFrom": {"fieldRef": {"fieldPath": index}}})
        if replica.gpus:
            container["resources"] = {"limits": {self.run.config.cluster.kubernetes.gpu_resource: replica.gpus}}
        return self._job(self._merged(pod, replica.role), ends=(2,), machines=replica.machines)

    def _job(self, pod: Object, *, ends: Sequence[int], machines: int = 1) -> Object:
        """Return {"spec": ...} of a Job. ends: exit codes after which no pod is started again."""
        rules = [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": list(ends)},
            },
        ]
        return {
            "spec": {
                "completionMode": "Indexed",
                "completions": machines,
                "parallelism": machines,
                "backoffLimit": self.run.config.elastic.restart_workers if machines == 1 else 0,
                "podFailurePolicy": {"rules": rules},
                "podReplacementPolicy": "Failed",
                "template": pod,
            }
        }

    def _pod(self, role: str, command: Sequence[str]) -> Object:
        """Return the PodTemplateSpec of a role, without the recipe's own keys."""
        cluster = self.run.config.cluster
        settings, container = cluster.kubernetes, {"name": CONTAINER, "image": cluster.kubernetes.image}
        env = [
            *self._secrets(role),
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            *({"name": name, "value": value} for name, value in self.run.variables.items()),
        ]
        if cluster.setup:
            command = ["/bin/sh", "-c", "\n".join([*cluster.setup, 'exec "$@"']), "sh", *command]
        shm = {"medium": "Memory"} | ({"sizeLimit": settings.shm_size} if settings.shm_size else {})
        volumes: list[Object] = [{"name": "shm", "emptyDir": shm}]
        mounts: list[Object] = [{"name": "shm", "mountPath": "/dev/shm"}]
        remote = "://" in (self.run.config.checkpoint.path or "")
        if role == "controller" or not remote:
            volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": settings.claim}})
            mounts.append({"name": "runs", "mountPath": settings.mount_path})
        return {
            "metadata": {"labels": {RUN_LABEL: self.name}},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": math.ceil(self.run.config.elastic.leave_s) + settings.save_s,
                "containers": [{**container, "command": list(command), "env": env, "volumeMounts": mounts}],
                "volumes": volumes,
            },
        }

    def _secrets(self, role: str) -> list[Object]:
        """Return the variables of a pod with the run's secrets. The controller's certificate is its own."""
        token_secret = self.run.config.cluster.kubernetes.token_secret or f"{self.name}-token"
        secrets = [(TOKEN_VARIABLE, token_secret, "token")]
        if self.run.config.tls.enabled:
            secrets.append((TLS_VARIABLE, f"{self.name}-tls", TLS_FILE))
            if role == "controller":
                secrets.append((CONTROLLER_TLS_VARIABLE, f"{self.name}-tls", CONTROLLER_TLS_FILE))
        return [
            {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
            for variable, secret, key in secrets
        ]

    def _merged(self, pod: Object, role: str) -> Object:
        settings = self.run.config.cluster.kubernetes
        return merged(merged(pod, settings.pod), getattr(settings, f"{role}_pod"))

    def _program(self) -> list[str]:
        return shlex.split(self.run.config.cluster.command) or ["cosmos-rl"]

    def _labels(self, replica: str) -> dict[str, str]:
        return {RUN_LABEL: self.name} | ({REPLICA_LABEL: replica} if replica else {})

    def _metadata(self, suffix: str, *, replica: str = "", queued: bool = False) -> Object:
        """Return {"metadata": ...} of an object with this end of its name."""
        settings = self.run.config.cluster.kubernetes
        place = {"namespace": settings.namespace} if settings.namespace else {}
        labels = self._labels(replica) | ({QUEUE_LABEL: settings.queue} if queued and settings.queue else {})
        return {"metadata": {"name": f"{self.name}{suffix}", **place, "labels": labels}}


def merged(base: Any, patch: Any, *, key: str = "") -> Any:
    """Return `base` with a strategic merge patch of Kubernetes, without its directives such as "$patch".

    Tables are merged key by key, lists of MERGE_KEYS item by item; everything else is replaced. key: name of the list.
    """
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        both = {name: merged(base.get(name), value, key=name) for name, value in patch.items()}
        return {**base, **both}
    by = MERGE_KEYS.get(key)
    if by is None or not (isinstance(base, list) and isinstance(patch, list)):
        return patch
    items = {one[by]: one for one in base}
    for one in patch:
        if by not in one:
            raise UserError(f"[cluster.kubernetes] pod: an item of {key} has no {by}")
        items[one[by]] = merged(items.get(one[by]), one)
    return list(items.values())

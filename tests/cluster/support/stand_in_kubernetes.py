"""A stand-in for a Kubernetes cluster with JobSet: it runs the containers of a manifest as processes of this machine.

    with StandIn(root) as cluster:          # PATH needs root/bin, which has a `kubectl`
        ... cosmos-rl launch FILE --on kubernetes ...
        cluster.pod("policy-0").kill()

It has the rules of Jobs (completions, backoffLimit, podFailurePolicy) and of JobSets (success and failure policies, one
Job that is restarted), graceful deletion, and probes. It refuses fields that `kubernetes_schema` does not have. It has
one namespace, no scheduler and no Kueue, and it creates a failed pod again after BACKOFF_S instead of 10 s and more.
"""

from __future__ import annotations

import contextlib
import json
import os
import socketserver
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from kubernetes_schema import problems
from stand_in_pods import Pod

BACKOFF_S = 0.5
STEP_S = 0.05
LINE = "#stand-in"
"""At the end of each line of a pod's name in /etc/hosts."""
KUBECTL = """#!{python}
import json, socket, sys
reads = any(word == "--filename=-" for word in sys.argv)
with socket.socket(socket.AF_UNIX) as server:
    server.connect("{socket}")
    server.sendall(json.dumps([sys.argv[1:], sys.stdin.read() if reads else ""]).encode() + b"\\n")
    code, out, errors = json.loads(server.makefile().readline())
sys.stdout.write(out)
sys.stderr.write(errors)
sys.exit(code)
"""
PLURALS = {
    "jobsets.jobset.x-k8s.io": "JobSet",
    "jobs.batch": "Job",
    "configmaps": "ConfigMap",
    "secrets": "Secret",
    "pods": "Pod",
}


class Refused(Exception):
    """An error of kubectl."""


@dataclass
class Job:
    """A Job and its pods."""

    name: str
    spec: dict
    labels: dict
    subdomain: str = ""
    """Of its JobSet."""
    pods: dict = field(default_factory=dict)
    succeeded: set = field(default_factory=set)
    failures: int = 0
    end: tuple = ()
    """("Complete", reason) or ("Failed", reason)."""
    deleted: bool = False
    again_at: float = 0.0

    def step(self, cluster):
        """Apply the rules once."""
        for index, pod in list(self.pods.items()):
            pod.poll()
            if pod.exit_code is not None:
                del self.pods[index]
                cluster.ended.append(pod)
                self._count(pod)
        if self.deleted or self.end:
            for pod in self.pods.values():
                pod.terminate()
        elif len(self.succeeded) == self.spec["completions"]:
            self.end = ("Complete", "CompletionsReached")
        elif time.monotonic() >= self.again_at:
            for index in range(self.spec["parallelism"]):
                if index not in self.pods and index not in self.succeeded:
                    self._start(index, cluster)

    def _start(self, index, cluster):
        cluster.starts += 1
        host = f"{self.name}-{index}.{self.subdomain}" if self.subdomain else ""
        name = f"{self.name}-{index}-{cluster.starts:05d}"
        self.pods[index] = Pod(name, self.spec["template"], host=host, index=index, cluster=cluster)

    def _count(self, pod):
        """Count the end of a pod, by the first rule of the podFailurePolicy that applies."""
        if pod.exit_code == 0:
            self.succeeded.add(pod.index)
            return
        self.again_at = time.monotonic() + BACKOFF_S
        for rule in self.spec["podFailurePolicy"]["rules"]:
            if "onPodConditions" in rule:
                applies = pod.disrupted
            else:
                assert rule["onExitCodes"]["operator"] == "In"
                applies = pod.exit_code in rule["onExitCodes"]["values"]
            if applies and rule["action"] == "Ignore":
                return
            if applies:
                assert rule["action"] == "FailJob"
                self.end = ("Failed", "PodFailurePolicy")
                return
        self.failures += 1
        if self.failures > self.spec["backoffLimit"]:
            self.end = ("Failed", "BackoffLimitExceeded")

    def as_json(self):
        active = sum(pod.exit_code is None for pod in self.pods.values())
        metadata = {"name": self.name, "labels": self.labels}
        if self.deleted:
            metadata["deletionTimestamp"] = "now"
        conditions = [{"type": self.end[0], "status": "True", "reason": self.end[1]}] if self.end else []
        status = {"active": active, "conditions": conditions}
        return {"kind": "Job", "metadata": metadata, "spec": {}, "status": status}


@dataclass
class JobSet:
    """A JobSet, whose Jobs are those of the cluster."""

    name: str
    spec: dict
    labels: dict
    restarts: int = 0
    end: str = ""
    deleted: bool = False

    def step(self, cluster):
        """Apply the rules once."""
        names = {
            f"{self.name}-{one['name']}-{i}": one for one in self.spec["replicatedJobs"] for i in range(one["replicas"])
        }
        jobs = {name: cluster.jobs[name] for name in names if name in cluster.jobs}
        if self.deleted or self.end:
            for job in jobs.values():
                job.deleted |= self.deleted or not job.end
            return
        for name in names.keys() - jobs.keys():
            template = names[name]["template"]
            labels = template["metadata"]["labels"]
            subdomain = self.spec["network"]["subdomain"]
            cluster.jobs[name] = Job(name, template["spec"], labels, subdomain)
        for name, job in jobs.items():
            if job.end[:1] == ("Failed",) and not job.deleted and not self.end:
                self._fail(names[name]["name"], job)
        wanted = self.spec["successPolicy"]["targetReplicatedJobs"]
        if all(job.end[:1] == ("Complete",) for name, job in jobs.items() if names[name]["name"] in wanted) and jobs:
            self.end = "Completed"

    def _fail(self, replicated, job):
        """Apply the first rule of the failurePolicy that applies; without one all Jobs are restarted."""
        policy = self.spec["failurePolicy"]
        for rule in policy.get("rules", ()):
            targets, reasons = (
                rule.get("targetReplicatedJobs", [replicated]),
                rule.get("onJobFailureReasons", [job.end[1]]),
            )
            if replicated in targets and job.end[1] in reasons:
                break
        else:
            rule = {"action": "RestartJobSet"}
        self.restarts += 1
        if rule["action"] == "FailJobSet" or self.restarts > policy["maxRestarts"]:
            self.end = "Failed"
            return
        assert rule["action"] == "RestartJob", f"{rule['action']} is not in the stand-in"
        job.deleted = True

    def as_json(self):
        metadata = {"name": self.name, "labels": self.labels} | ({"deletionTimestamp": "now"} if self.deleted else {})
        return {"kind": "JobSet", "metadata": metadata, "spec": self.spec, "status": {"terminalState": self.end}}


class StandIn:
    """The cluster. Its state changes in a thread of its own, every STEP_S."""

    def __init__(self, root):
        self.root = root
        self.objects, self.job_sets, self.jobs = {}, {}, {}
        self.hosts = root / "hosts"
        """/etc/hosts of all pods."""
        self.has_names = True
        """Whether names of running pods resolve; those of a real cluster take seconds."""
        self.ended = []
        """Pods that have ended."""
        self.starts = 0
        """Number of pods so far."""
        self.errors = []
        self._lock = threading.RLock()
        self._over = threading.Event()

    def __enter__(self):
        for folder in ("logs", "pods", "claims", "bin"):
            (self.root / folder).mkdir()
        self.hosts.write_text(Path("/etc/hosts").read_text())
        path, kubectl = str(self.root / "socket"), self.root / "bin" / "kubectl"
        kubectl.write_text(KUBECTL.format(python=sys.executable, socket=path))
        kubectl.chmod(0o755)
        cluster = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                self.wfile.write(json.dumps(cluster._answer(*json.loads(self.rfile.readline()))).encode() + b"\n")

        self._server = socketserver.UnixStreamServer(path, Handler)
        self._threads = [threading.Thread(target=self._server.serve_forever), threading.Thread(target=self._steps)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._server.shutdown()
        for thread in self._threads:
            thread.join()
        self._server.server_close()
        for job in self.jobs.values():
            for pod in job.pods.values():
                pod.close()
        assert not self.errors, self.errors

    def pod(self, replica, index=0):
        """Return a live pod of a replica by its label, or None."""
        with self._running():
            found = [job for job in self.jobs.values() if job.labels["cosmos-rl/replica"] == replica]
            return found[0].pods.get(index) if found else None

    def ends(self):
        """Return the end of each Job by its label: "Complete"; empty for a live one."""
        with self._running():
            return {job.labels["cosmos-rl/replica"]: (job.end or ("",))[0] for job in self.jobs.values()}

    def exit_codes(self, replica):
        """Return the exit codes of the ended pods of a replica, in order."""
        with self._running():
            return [pod.exit_code for pod in self.ended if f"-{replica}-" in pod.name]

    def resolve(self, host):
        """Let a name resolve to a loopback address, the same for a later pod with this name."""
        known = self.hosts.read_text().split()
        if host not in known:
            with self.hosts.open("a") as file:
                file.write(f"127.0.1.{known.count(LINE) + 2} {host} {LINE}\n")

    @contextlib.contextmanager
    def _running(self):
        """Hold the lock. Raises AssertionError after an error in the thread."""
        with self._lock:
            assert not self.errors, self.errors
            yield

    def _steps(self):
        while not self._over.wait(STEP_S):
            with self._lock:
                try:
                    self._step()
                except Exception as error:  # the test fails at the end
                    self.errors.append(repr(error))
                    return

    def _step(self):
        for one in [*self.job_sets.values(), *self.jobs.values()]:
            one.step(self)
        for name, job in list(self.jobs.items()):
            if job.deleted and not job.pods:
                del self.jobs[name]
        for name, one in list(self.job_sets.items()):
            if one.deleted and not any(job.startswith(f"{name}-") and self.jobs[job].subdomain for job in self.jobs):
                del self.job_sets[name]

    # -- kubectl

    def _answer(self, arguments, text):
        """Return exit code, output and errors of a kubectl command."""
        flags = dict(word.removeprefix("--").partition("=")[::2] for word in arguments if word.startswith("--"))
        words = [word for word in arguments if not word.startswith("--")]
        try:
            with self._lock:
                match words:
                    case ["create"]:
                        lines = [self._create(one) for one in yaml.safe_load_all(text)]
                    case ["get", "jobsets.jobset.x-k8s.io,jobs.batch"]:
                        lines = [self._listed(flags["selector"])]
                    case ["delete", "pods"]:
                        lines = self._kill(flags)
                    case ["delete", kinds, *names]:
                        lines = self._delete(kinds.split(","), names, flags.get("selector"))
                    case _:
                        raise Refused(f"the stand-in has no {' '.join(words)}")
            while flags.get("wait") == "true" and self._deleting():
                time.sleep(STEP_S)
        except Refused as error:
            return 1, "", f"Error from server: {error}\n"
        return 0, "".join(f"{line}\n" for line in lines), ""

    def _create(self, one):
        if found := problems(one):
            raise Refused("; ".join(found))
        kind, name, labels = one["kind"], one["metadata"]["name"], one["metadata"]["labels"]
        known = {"JobSet": self.job_sets, "Job": self.jobs}.get(kind)
        key, known = (name, known) if known is not None else ((kind, name), self.objects)
        if key in known:
            raise Refused(f"{kind} {name} already exists")
        classes = {"JobSet": JobSet, "Job": Job}
        known[key] = classes[kind](name, one["spec"], labels) if kind in classes else one
        return f"{kind.lower()} {name} created"

    def _listed(self, selector):
        label, _, value = selector.partition("=")
        every = [*sorted(self.job_sets.items()), *sorted(self.jobs.items())]
        found = [one for _, one in every if one.labels.get(label) == value]
        return json.dumps({"items": [one.as_json() for one in found]})

    def _delete(self, kinds, names, selector):
        label, _, value = (selector or "").partition("=")
        lines = []
        for kind in map(PLURALS.__getitem__, kinds):
            if kind in ("JobSet", "Job"):
                of_kind = self.job_sets if kind == "JobSet" else self.jobs
                for name, one in of_kind.items():
                    if name in names or (selector and one.labels.get(label) == value):
                        one.deleted = True
                        lines.append(f'{kind.lower()} "{name}" deleted')
            else:
                for key, one in list(self.objects.items()):
                    if key[0] == kind and selector and one["metadata"]["labels"].get(label) == value:
                        del self.objects[key]
                        lines.append(f'{kind.lower()} "{key[1]}" deleted')
        return lines or ["No resources found"]

    def _kill(self, flags):
        assert flags["grace-period"] == "0" and "force" in flags
        label, _, value = flags["selector"].partition("=")
        pods = [pod for job in self.jobs.values() for pod in job.pods.values() if pod.labels.get(label) == value]
        for pod in pods:
            pod.kill()
        return [f'pod "{pod.name}" force deleted' for pod in pods]

    def _deleting(self):
        with self._lock:
            return any(one.deleted for one in (*self.jobs.values(), *self.job_sets.values()))


def missing():
    """Return why the stand-in cannot run here; empty if it can."""
    if os.geteuid() != 0:
        return "namespaces of processes and mounts need root"
    return (
        ""
        if os.system("unshare --pid --mount --fork true 2>/dev/null") == 0
        else "namespaces of processes and mounts are not permitted"
    )

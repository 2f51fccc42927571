"""Pods of `stand_in_kubernetes`: containers as processes of this machine.

Each is process 1 of a process namespace, as in a container: SIGTERM without a handler is ignored, and all its processes
end with it. In command and environment, paths of volumes are replaced by folders. The name of a pod resolves, in all
pods, to a loopback address once the pod runs, as the DNS of a cluster does.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

NAMESPACE = ("unshare", "--pid", "--mount", "--fork", "--kill-child=KILL")
WITH_HOSTS = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'
INHERITED = ("HOME", "LANG", "OMP_NUM_THREADS")
INDEX_PATH = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


class Pod:
    """One pod of a Job. `poll` runs its probes and its deadlines."""

    def __init__(self, name, template, *, host, index, cluster):
        spec = template["spec"]
        (self.container,) = spec["containers"]
        self.name, self.index = name, index
        self.labels = template["metadata"]["labels"]
        self.grace_s = spec.get("terminationGracePeriodSeconds", 30)
        self.disrupted = False
        """Whether it has the condition DisruptionTarget, as after an eviction."""
        self.exit_code = None
        self.log = cluster.root / "logs" / f"{name}.log"
        self._cluster = cluster
        self._kill_at = None
        self._killed = False
        self._folders = {}
        """Folder by the path at which it is mounted."""
        self._host = host
        self._folder = cluster.root / "pods" / name
        self._folder.mkdir(parents=True)
        for mount in self.container["volumeMounts"]:
            volume = next(volume for volume in spec["volumes"] if volume["name"] == mount["name"])
            if mount["mountPath"] != "/dev/shm":
                self._folders[mount["mountPath"]] = str(self._mounted(volume))
        self._environment = self._variables()
        self._failures, self._checked_at, self._check = 0, time.monotonic(), None
        self._started = "startupProbe" not in self.container
        self._process = self._run([self._text(word) for word in self.container["command"]])

    def poll(self):
        """Note the end of the container, run probes, and kill it after its grace period."""
        if self.exit_code is not None:
            return
        if self._host and self._cluster.has_names:
            self._cluster.resolve(self._host)
        if (code := self._process.poll()) is not None:
            self.exit_code = 128 + signal.SIGKILL if self._killed else code  # `unshare` ends with 1 after a SIGKILL
            if self._check is not None:
                self._check.kill()
                self._check.wait()
        elif self._kill_at is not None:
            if time.monotonic() >= self._kill_at:
                self.kill()
        else:
            self._probe()

    def terminate(self, *, grace_s=None):
        """Send SIGTERM to process 1, and SIGKILL to all after the grace period."""
        if self.exit_code is None and self._kill_at is None:
            self._kill_at = time.monotonic() + (self.grace_s if grace_s is None else grace_s)
            self._signal(signal.SIGTERM)

    def evict(self):
        """Take the machine away, as `kubectl drain` does."""
        self.disrupted = True
        self.terminate()

    def kill(self):
        """End all processes, as when the machine's memory is used up."""
        self._killed = True
        self._signal(signal.SIGKILL)

    def freeze(self):
        """Stop process 1."""
        self._signal(signal.SIGSTOP)

    def close(self):
        """End all processes and wait."""
        self._killed = True
        self._process.kill()  # the namespace ends with it
        self._process.wait()
        self.poll()

    def _signal(self, number):
        """Signal process 1, the child of `unshare`."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        deadline = time.monotonic() + 10
        while self._process.poll() is None:
            if found := children.read_text().split():
                return os.kill(int(found[0]), number)
            assert time.monotonic() < deadline, f"{self.name} has no process"
            time.sleep(0.01)

    def _run(self, command):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*NAMESPACE, "sh", "-c", WITH_HOSTS, "sh", self._cluster.hosts, *command],
                env={**inherited, "PATH": path, **self._environment},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _probe(self):
        """Run the startup probe until it succeeds, then the liveness probe; too many failures end the container."""
        probe = self.container.get("livenessProbe" if self._started else "startupProbe")
        if probe is None:
            return
        if self._check is not None:
            if (code := self._check.poll()) is None:
                return
            self._check = None
            self._failures = 0 if code == 0 else self._failures + 1
            self._started = self._started or code == 0
            if self._failures >= probe.get("failureThreshold", 3):
                self.terminate()
        elif time.monotonic() - self._checked_at >= probe.get("periodSeconds", 10):
            self._checked_at = time.monotonic()
            self._check = subprocess.Popen([self._text(word) for word in probe["exec"]["command"]])

    def _variables(self):
        found = {}
        for one in self.container["env"]:
            source = one.get("valueFrom", {})
            if "secretKeyRef" in source:
                key = source["secretKeyRef"]
                found[one["name"]] = self._cluster.objects["Secret", key["name"]]["stringData"][key["key"]]
            elif source:
                assert source["fieldRef"]["fieldPath"] == INDEX_PATH, source
                found[one["name"]] = str(self.index)
            else:
                found[one["name"]] = self._replace(one["value"])
        return found

    def _mounted(self, volume):
        """Return the folder of a volume."""
        if "persistentVolumeClaim" in volume:
            folder = self._cluster.root / "claims" / volume["persistentVolumeClaim"]["claimName"]
        else:
            folder = self._folder / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            for name, text in self._cluster.objects["ConfigMap", volume["configMap"]["name"]]["data"].items():
                (folder / name).write_text(text)
        return folder

    def _text(self, word):
        """Expand $(NAME) of the environment, then replace paths."""
        expanded = re.sub(r"\$\((\w+)\)", lambda found: self._environment.get(found[1], found[0]), word)
        return self._replace(expanded)

    def _replace(self, text):
        pattern = "|".join(map(re.escape, sorted(self._folders, key=len, reverse=True)))
        return re.sub(pattern, lambda found: self._folders[found[0]], text) if pattern else text

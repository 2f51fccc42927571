"""A Ray of several nodes on the loopback interface: 127.0.0.2 is the head, 127.0.0.3 and so on are the others."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

SETTINGS = {
    "RAY_AUTH_MODE": "disabled",  # otherwise Ray writes a token into the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_raylet_start_wait_time_s": "240",  # 30 by default; a busy machine needs longer
    "RAY_agent_register_timeout_ms": "240000",  # of ray[default], as above
    "OMP_NUM_THREADS": "1",
}
AGENT_PORTS = {
    "metrics-export-port": "metrics_export_port",
    "runtime-env-agent-port": "runtime_env_agent_port",
    "dashboard-agent-grpc-port": "metrics_agent_port",
    "dashboard-agent-listen-port": "dashboard_agent_listen_port",
}
"""Ports of a node's agents: option of `ray start`, and file of the session."""
OBJECT_STORE = 80 << 20
"""Bytes of each node's object store, the smallest that Ray takes; nothing of a run is in it."""


class LoopbackRay:
    """Start with `with LoopbackRay(nodes=2) as ray:`; commands need `ray.environment`."""

    def __init__(self, *, nodes: int, cpus: int = 4, gpus: int = 2, jobs: bool = False) -> None:
        """gpus: of each node, numbers without devices. jobs: whether `jobs_address` takes `ray job submit`."""
        self.jobs_address = f"http://127.0.0.2:{_free_port('127.0.0.2')}" if jobs else ""
        self.nodes, self.cpus, self.gpus = nodes, cpus, gpus
        self.port = _free_port("127.0.0.2")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for cosmos-rl, also if no environment is active
        self.environment = {**os.environ, **SETTINGS, "PATH": path, "RAY_ADDRESS": f"127.0.0.2:{self.port}"}
        self._temporary = tempfile.mkdtemp(prefix="ray")  # short: Ray's sockets in it have at most 107 characters
        self._daemons: dict[int, subprocess.Popen[bytes]] = {}

    @staticmethod
    def missing(*, jobs: bool = False) -> bool:
        """Whether this environment lacks Ray, or with `jobs` what its dashboard needs."""
        return any(importlib.util.find_spec(name) is None for name in ("ray", *(("aiohttp_cors",) if jobs else ())))

    def __enter__(self) -> LoopbackRay:
        try:
            for index in range(self.nodes):
                self.start_node(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for index in sorted(self._daemons, reverse=True):
            self.lose_node(index)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def start_node(self, index: int, more: Mapping[str, float] | None = None, timeout_s: float = 300.0) -> None:
        """Start a node and wait until Ray has it; node 0 is the head. more: further resources of the node."""
        ports = {name: _free_port(address(index)) for name in AGENT_PORTS}
        role = ["--head", f"--port={self.port}", f"--temp-dir={self._temporary}"]
        port = self.jobs_address.rpartition(":")[2]
        role += ["--dashboard-host=127.0.0.2", f"--dashboard-port={port}"] if port else ["--include-dashboard=false"]
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
            *(role if index == 0 else [f"--address=127.0.0.2:{self.port}"]),
            f"--node-ip-address={address(index)}",
            f"--num-cpus={self.cpus}",
            f"--num-gpus={self.gpus}",
            f"--object-store-memory={OBJECT_STORE}",
            *(f"--{name}={port}" for name, port in ports.items()),
            f"--resources={json.dumps({f'node{index}': 1, **(more or {})})}",
        ]
        environment = {name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"}
        path = Path(self._temporary) / f"node{index}.log"
        with path.open("wb") as log:  # without the lines of an earlier start
            self._daemons[index] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + timeout_s
        while "Ray runtime started" not in path.read_text():
            ended = self._daemons[index].poll()
            assert ended is None and time.monotonic() < deadline, f"node {index} did not start: {path.read_text()}"
            self._write_ports(ports)
            time.sleep(0.1)

    def _write_ports(self, ports: Mapping[str, int]) -> None:
        """Write the agents' ports, which are given, into the files in which the agents write them.

        A node ends itself after 15 s without one of them, and on a busy machine an agent imports for longer.
        """
        for raylet in Path(self._temporary).glob("session_2*/logs/raylet*.out"):
            for node in re.findall(r"Setting node ID node_id=(\w+)", raylet.read_text()):
                for name, port in ports.items():
                    path = raylet.parents[1] / f"{AGENT_PORTS[name]}_{node}"
                    if not path.exists():
                        path.write_text(str(port))

    def lose_node(self, index: int) -> None:
        """Kill a node and all that runs on it, as a machine that lost its power."""
        daemon = self._daemons.pop(index, None)
        if daemon is None:
            return  # it is lost already
        tree = _tree(daemon.pid)
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)  # none of them can start another, or notice the end of another
        for pid in {*tree, *_tree(daemon.pid)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()


def address(index: int) -> str:
    """Return the address of a node."""
    return f"127.0.0.{index + 2}"


def _tree(root: int) -> list[int]:
    """Return a process and all that it has started, directly or not."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]

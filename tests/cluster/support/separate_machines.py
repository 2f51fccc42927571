"""Several machines on this one: network namespaces that cables (pairs of veth interfaces) join.

All but the first one have an empty folder in place of the run's directory; they share the other files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-c", "from cosmos_rl_core.cli.main import main; main()"]
HIDE = 'mount -t tmpfs none "$0" && exec "$@"'


def run(*arguments: str) -> None:
    subprocess.run(arguments, check=True, capture_output=True, text=True)


def missing() -> str:
    """Return the reason why namespaces cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command `ip` is not installed (iproute2)"
    probe = f"crl-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    try:
        mounts = ["ip", "netns", "exec", probe, "sh", "-c", HIDE, "/mnt", "true"]
        done = subprocess.run(mounts, capture_output=True, text=True)
    finally:
        run("ip", "netns", "del", probe)
    return f"no folder can be mounted: {done.stderr.strip()}" if done.returncode else ""


class Machine:
    """One namespace. Its processes are ended by `close`."""

    def __init__(self, name: str, address: str, *, hidden: Path | None, logs: Path) -> None:
        """hidden: a folder whose content the machine does not see."""
        self.name, self.address, self._hidden, self._logs = name, address, hidden, logs
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, log: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
        """Start `cosmos-rl ...`; its output is in the file `log`."""
        hide = [] if self._hidden is None else ["sh", "-c", HIDE, str(self._hidden)]
        with (self._logs / log).open("w") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *hide, *COMMAND, *map(str, arguments)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment},
                text=True,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes:
            with process:
                process.kill()
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        for pid in listed.stdout.split():  # ranks of a killed agent
            subprocess.run(["kill", "-9", pid], check=False)


class SeparateMachines:
    """At 10.77.0.1, 10.77.0.2 and so on of a network that only they see. The first one has the switch."""

    def __init__(self, logs: Path, *, hidden: Path, number: int = 2) -> None:
        """hidden: a folder of which the others have none of the first one's content."""
        logs.mkdir()
        self.all = [
            Machine(f"crl-{os.getpid()}-{index}", f"10.77.0.{index}", hidden=hidden if index > 1 else None, logs=logs)
            for index in range(1, number + 1)
        ]
        self.first, self.second = self.all[:2]

    def __enter__(self) -> SeparateMachines:
        first = self.first.name
        for machine in self.all:
            run("ip", "netns", "add", machine.name)
            run("ip", "-n", machine.name, "link", "set", "lo", "up")
        run("ip", "-n", first, "link", "add", "cable0", "type", "bridge")
        for machine in self.all[1:]:
            port = f"port-{machine.name}"[-15:]
            cable = ("type", "veth", "peer", "name", "cable0", "netns", machine.name)
            run("ip", "-n", first, "link", "add", port, "master", "cable0", *cable)
            run("ip", "-n", first, "link", "set", port, "up")
        for machine in self.all:
            run("ip", "-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "cable0")
            run("ip", "-n", machine.name, "link", "set", "cable0", "up")
        return self

    def cut(self) -> None:
        """Pull the second machine's cable."""
        run("ip", "-n", self.second.name, "link", "set", "cable0", "down")

    def join(self) -> None:
        """Plug it in again."""
        run("ip", "-n", self.second.name, "link", "set", "cable0", "up")

    def __exit__(self, *_: object) -> None:
        for machine in self.all:
            machine.close()
            run("ip", "netns", "del", machine.name)

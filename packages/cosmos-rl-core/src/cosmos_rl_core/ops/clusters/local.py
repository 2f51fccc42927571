"""This machine: `cosmos-rl run` in the background, in a session of its own, so that it outlives the terminal."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Mapping
from pathlib import Path

from cosmos_rl_core.control.address_file import NAME as CONTROLLER_FILE
from cosmos_rl_core.control.status import read_status
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.interrupts import run_to_end
from cosmos_rl_core.ops.clusters.launcher import FOLDER, ClusterRun
from cosmos_rl_core.ops.clusters.operator import operator_of, request_workers
from cosmos_rl_core.processes import ChildProcess, environment, kill_tree, last_lines
from cosmos_rl_core.workers.directory import lock_holder

CHECK_S = 0.1


class Local:
    """Implements `Launcher`."""

    def plan(self, run: ClusterRun) -> str:
        """Return the script that starts the run."""
        flags = ["--resume", "auto"] if (run.directory / "resolved.toml").exists() else []
        flags += ["--checked"] if run.checked else []
        replicas = [*run.policies(), *run.rollouts()]
        return "\n".join(
            [
                "#!/bin/bash",
                f"# starts {', '.join(replica.name for replica in replicas)} on this machine",
                *run.preamble,
                f"exec {shlex.join([run.program, 'run', str(run.file), *run.overrides, *flags])}",
                "",
            ]
        )

    def start(self, run: ClusterRun) -> list[str]:
        """Start the run and return when its controller listens."""
        folder, contact = run.directory / FOLDER, run.directory / CONTROLLER_FILE
        (folder / "run.sh").write_text(self.plan(run))
        contact.unlink(missing_ok=True)  # left by a killed run
        with (folder / "run.log").open("ab") as log:
            process = ChildProcess(["bash", str(folder / "run.sh")], environment=environment(), output=log)
        try:
            while not contact.exists():
                if status := process.wait(CHECK_S):
                    if process.exit_code == 0:
                        break
                    raise UserError(f"the run ended with {status}:\n{last_lines(folder / 'run.log')}")
        except BaseException:  # Ctrl-C, before the process has a lock by which `stop` would find it
            process.kill()
            process.wait()
            raise
        process.release()
        return [f"run: process {process.pid}"]

    def alive(self, run: ClusterRun) -> Mapping[str, str]:
        """Return the process that holds the run's directory, and the states of its workers."""
        if (holder := lock_holder(run.directory)) is None:
            return {}
        states = {"run": f"RUNNING ({holder})"}
        if (run.directory / CONTROLLER_FILE).exists() and (run.directory / "status.json").exists():
            states |= {member.name: member.state for member in read_status(run.directory).members}
        return states

    def scale(self, run: ClusterRun, targets: Mapping[str, int]) -> list[str]:
        """Start or drain workers of any role, and wait until they are ready or gone."""
        lines: list[str] = []
        run_to_end(request_workers(operator_of(run.directory), targets, report=lines.append))
        return lines

    def stop(self, run: ClusterRun, *, now: bool) -> list[str]:
        """Send SIGTERM to the run, or SIGKILL; its workers end with it."""
        return end_process(run.directory, now=now)


def end_process(run_dir: Path, *, now: bool) -> list[str]:
    """Send SIGTERM to the process that holds a run's directory, or kill it and all it has started; return a line.

    A run whose controller has ended gets no SIGTERM: it is leaving. Raises UserError if the process is on another
    machine, or has ended before its workers.
    """
    if (holder := lock_holder(run_dir)) is None:
        return []
    if _is_leaving(run_dir) and not (now and holder.is_alive):
        return ["run: its processes are leaving"]
    if not holder.is_here:
        raise UserError(f"{run_dir} is in use by {holder}: stop the run there, or end that process")
    if not holder.is_alive:
        raise UserError(f"{run_dir} is in use by workers of a killed run ({holder}), which save and leave")
    if now:
        kill_tree(holder.pid)
    else:
        os.kill(holder.pid, signal.SIGTERM)
    return [f"run: {holder} gets {'SIGKILL, and all that it has started' if now else 'SIGTERM'}"]


def _is_leaving(run_dir: Path) -> bool:
    """Return whether the controller has ended, and not just started: then status.json is older than the lock."""
    status = run_dir / "status.json"
    if (run_dir / CONTROLLER_FILE).exists() or not status.exists():
        return False
    return status.stat().st_mtime >= (run_dir / "run.lock").stat().st_mtime

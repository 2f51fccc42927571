"""A Slurm of several nodes on the loopback interface, without systemd, munge and cgroups. Tools: README.md."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

TOOLS = ("slurmctld", "slurmd", "sbatch", "squeue", "scancel", "srun", "scontrol", "sinfo")
CONFIG = """
ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmdSpoolDir={root}/spool/%n
StateSaveLocation={root}/state
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=30
SlurmctldTimeout=30
KillWait=20
JobRequeue=1
DefMemPerCPU=100
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=spot Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
"""
"""slurm.conf: several slurmd of one machine as nodes; each line was needed. `spot` is preempted by `main`."""


class LoopbackSlurm:
    """Start with `with LoopbackSlurm(root, nodes=3) as slurm:`; commands need `slurm.environment`."""

    def __init__(self, root: Path, *, nodes: int, cpus: int = 4, gpus: int = 2) -> None:
        """gpus: of each node, device files that are no GPUs."""
        self.root, self.nodes, self.cpus, self.gpus = root, nodes, cpus, gpus
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for cosmos-rl, also if no environment is active
        self.environment = {**os.environ, "PATH": path, "SLURM_CONF": str(root / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @staticmethod
    def missing() -> list[str]:
        """Tools that this machine lacks."""
        return [tool for tool in TOOLS if shutil.which(tool) is None]

    def __enter__(self) -> LoopbackSlurm:
        (self.root / "state").mkdir(parents=True)
        (self.root / "spool").mkdir()
        host, ports = socket.gethostname(), _free_ports(1 + self.nodes)
        text = CONFIG.format(host=host, port=ports[0], root=self.root, user=getpass.getuser())
        for index, port in enumerate(ports[1:]):
            text += (
                f"NodeName=n{index} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
                f"CPUs={self.cpus} RealMemory=4000 Gres=gpu:{self.gpus} State=UNKNOWN\n"
            )
        (self.root / "slurm.conf").write_text(text)
        for index in range(self.gpus):
            os.mknod(self.root / f"gpu{index}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null
        files = f"File={self.root}/gpu[0-{self.gpus - 1}]"
        lines = [f"NodeName=n{index} Name=gpu {files}\n" for index in range(self.nodes)]
        (self.root / "gres.conf").write_text("AutoDetect=off\n" + "".join(lines))
        self._begin("slurmctld", "slurmctld", "-D", "-i")
        for index in range(self.nodes):
            self._begin(f"n{index}", "slurmd", "-D", "-N", f"n{index}")
        self._wait_until_idle()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self.call("scancel", f"--user={getpass.getuser()}", timeout_s=10)
            deadline = time.monotonic() + 30  # stepds outlive slurmd, and their processes with them
            while self.call("squeue", "--noheader").strip() and time.monotonic() < deadline:
                time.sleep(0.1)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def call(self, *command: str, timeout_s: float = 60.0) -> str:
        """Return the output of a command of Slurm; fails with its message."""
        done = subprocess.run(
            command, env=self.environment, text=True, capture_output=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def lose_node(self, name: str) -> None:
        """Kill a node's daemon, set the node down, and kill what it runs: a machine that lost its power.

        In this order, as Slurm must not hear of the end of the processes.
        """
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()
        self.call("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    variables = (entry / "environ").read_bytes()
                    here = f"SLURMD_NODENAME={name}".encode() in variables.split(b"\0")
                    if here and f"SLURM_CONF={self.root}".encode() in variables:
                        os.kill(int(entry.name), 9)

    def restore_node(self, name: str) -> None:
        """Start a lost node again."""
        self._begin(name, "slurmd", "-D", "-N", name)
        self.call("scontrol", "update", f"nodename={name}", "state=resume")

    def _begin(self, name: str, *command: str) -> None:
        with (self.root / f"{name}.err").open("ab") as log:
            self._daemons[name] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def _wait_until_idle(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            states = subprocess.run(
                ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%T"],
                env=self.environment,
                text=True,
                capture_output=True,
                check=False,
            ).stdout.split()
            if states.count("idle") == self.nodes:
                return
            assert time.monotonic() < deadline, f"Slurm did not start: {states}; see {self.root}"
            time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as sockets:
        bound = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for one in bound:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in bound]

"""Seconds from the command to the first step: `cosmos-rl run`, and `cosmos-rl launch` on this machine, Slurm and Ray.

    .venv/bin/python benchmarks/launch.py [--quick] [--rounds N]

Slurm and Ray run on the loopback interface and are up before the first run. Slurm needs slurmctld, slurmd and the
client's commands, and root; Ray needs the package in this environment (tests/cluster/README.md has the install lines).
A platform that is not installed is left out. The timings need a machine without other work.

A launcher adds the CPU time and the memory of its processes: `cosmos-rl launch`; for Slurm also sbatch, the batch
scripts, srun and slurmstepd; for Ray the actors. Daemons of the cluster, which are there without a run,
are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from _metrics import Figure, report
from _watch import TICKS_PER_S

sys.path.append(str(Path(__file__).parents[1] / "tests/cluster/support"))

from loopback_ray import LoopbackRay
from loopback_slurm import LoopbackSlurm

from cosmos_rl_core.workers.directory import lock_holder

COMMAND = str(Path(sys.executable).with_name("cosmos-rl"))
RUN = "run"
"""The side without a launcher."""
POLL_S = 0.02
LIMIT_S = 600.0
RECIPE = """
[run]
domain = "cosmos_rl_core.testing.tiny:TINY"
name = "launch"
output_dir = "{directory}"
max_steps = 3
[policy]
prompts_per_step = 4
threads = 1
[rollout]
group_size = 4
threads = 1
[rollout.sampling]
max_tokens = 3
[[reward.functions]]
name = "hits"
[logging]
sinks = ["jsonl"]
[cluster]
gpus = false
[cluster.ray]
place_s = 300
"""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A way to start the run."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    is_of_launcher: Callable[[str, str], bool] = lambda name, command: False
    """Whether a process adds to the run, by its name and its command line."""


@dataclass(slots=True)
class Added:
    """The use of a launcher's processes."""

    cpu_s: dict[int, float] = field(default_factory=dict)
    peak: int = 0
    """Bytes, shared pages counted once."""

    def look(self, side: Side, *, memory: bool) -> None:
        total = 0
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                name = (entry / "comm").read_text().strip()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if not side.is_of_launcher(name, command):
                    continue
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                self.cpu_s[int(entry.name)] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
                if memory:
                    lines = (entry / "smaps_rollup").read_text().splitlines()
                    total += 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        self.peak = max(self.peak, total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    with contextlib.ExitStack() as stack:
        sides = list(_sides(stack))
        taken: dict[str, list[tuple[float, float, int]]] = {side.name: [] for side in sides}
        for number in range(1 if flags.quick else flags.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                taken[side.name].append(_measured(side))
                print(f"{side.name}: {taken[side.name][-1][0]:.1f} s", flush=True)
    report("launch", [figure for side in sides for figure in _figures(side.name, taken)])


def _sides(stack: contextlib.ExitStack) -> Iterator[Side]:
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    yield Side(name=RUN, arguments=["run"], environment=shared)

    def of_local(name: str, command: str) -> bool:
        return "--on local" in command

    yield Side(name="local", arguments=["launch", "--on", "local"], environment=shared, is_of_launcher=of_local)
    if LoopbackSlurm.missing() or os.geteuid() != 0:
        print("Slurm is left out: see tests/cluster/README.md")
    else:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm")))
        slurm = stack.enter_context(LoopbackSlurm(root, nodes=2))
        names = ("srun", "slurmstepd", "sbatch", "squeue", "scancel", "slurm_script")

        def of_slurm(name: str, command: str) -> bool:
            return name in names or "--on slurm" in command

        yield Side(
            name="Slurm",
            arguments=["launch", "--on", "slurm"],
            environment={**shared, "SLURM_CONF": slurm.environment["SLURM_CONF"]},
            is_of_launcher=of_slurm,
        )
    if LoopbackRay.missing():
        print("Ray is left out: see tests/cluster/README.md")
    else:
        ray = stack.enter_context(LoopbackRay(nodes=2))

        def of_ray(name: str, command: str) -> bool:
            return command.startswith("ray::Supervisor") or "--on ray" in command

        yield Side(
            name="Ray",
            arguments=["launch", "--on", "ray"],
            environment={**shared, **ray.environment},
            is_of_launcher=of_ray,
        )


def _measured(side: Side) -> tuple[float, float, int]:
    """Run to the end; return seconds to the first step, CPU seconds and bytes that the launcher adds."""
    with tempfile.TemporaryDirectory(prefix="launch") as folder:
        recipe, directory, added = Path(folder, "run.toml"), Path(folder, "run"), Added()
        recipe.write_text(RECIPE.format(directory=directory))
        started, first, due = time.perf_counter(), 0.0, 0.0
        with Path(folder, "output").open("wb") as output:
            process = subprocess.Popen(
                [COMMAND, *side.arguments, str(recipe)], env=dict(side.environment), stdout=output, stderr=output
            )
        try:
            while not (directory / "checkpoints" / "step_3" / "manifest.json").exists() or process.poll() is None:
                now = time.perf_counter() - started
                steps = directory / "metrics.jsonl"
                if not first and steps.exists() and b"\n" in steps.read_bytes():
                    first = now
                added.look(side, memory=now >= due)
                due = now + 0.5 if now >= due else due
                if now > LIMIT_S or process.poll():
                    raise SystemExit(f"{side.name} failed:\n{Path(folder, 'output').read_text()}")
                time.sleep(POLL_S)
            _wait_for_the_end(side, directory)
        finally:
            process.kill()
            process.wait()
    return first, sum(added.cpu_s.values()), added.peak


def _wait_for_the_end(side: Side, directory: Path) -> None:
    """Wait until the platform has nothing of the run left, which would disturb the next one."""
    if side.name == "Slurm":
        while subprocess.check_output(["squeue", "--noheader"], env=dict(side.environment)).strip():
            time.sleep(0.1)
    elif side.name == "local":
        while lock_holder(directory) is not None:
            time.sleep(0.1)


def _figures(name: str, taken: Mapping[str, Sequence[tuple[float, float, int]]]) -> Iterator[Figure]:
    seconds = [first for first, _, _ in taken[name]]
    yield Figure(metric=f"{name}: command to the first step", value=median(seconds), unit="s")
    if name != RUN:
        ratio = median(seconds) / median(first for first, _, _ in taken[RUN])
        yield Figure(metric="  over cosmos-rl run", value=ratio, unit="x")
        yield Figure(metric="  CPU time of the launcher", value=median(cpu for _, cpu, _ in taken[name]), unit="s")
        memory = median(peak for _, _, peak in taken[name]) / 2**20
        yield Figure(metric="  memory of the launcher", value=memory, unit="MiB")


if __name__ == "__main__":
    main()

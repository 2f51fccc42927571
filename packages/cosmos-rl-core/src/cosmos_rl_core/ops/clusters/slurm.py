"""Slurm: controller and policies in one job that submits itself again, each rollout replica in a job of its own.

    run.sbatch       controller and policies: steps of one job. It ends with the run.
    rollout.sbatch   one rollout replica. It may start whenever it gets a machine, and may be preempted.

With [cluster.slurm] gang, rollouts are steps of the first job too. Needs sbatch, squeue and scancel where it is called,
and srun and scontrol on the machines. Jobs are found by their names, LABEL.run and LABEL.rollout-0. In a container only
the processes of the run run; the scripts run outside of it.
"""

from __future__ import annotations

import getpass
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cosmos_rl_core.control.address_file import NAME as CONTROLLER_FILE
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.ops.clusters.launcher import FOLDER, ClusterRun, Replica, rollouts_of, run_command

_NO_GPUS = re.compile(r"generic resource|gres", re.IGNORECASE)
"""In the error of sbatch for a job with GPUs where no machine has any."""
RENDEZVOUS_PORTS = (20000, 12000)
"""First and number of the ports at which the machines of a policy replica meet: below those of outgoing connections."""
LEFTOVER_S = 30
"""Time beyond [elastic] leave_s after which rollouts of a run that has ended are cancelled, in seconds."""
HOLD_S = 600
"""Maximum grace time of a preemption, in seconds."""


class Slurm:
    """Implements `Launcher`."""

    def plan(self, run: ClusterRun) -> str:
        """Return the scripts of all jobs."""
        scripts = [(f"{run.label}.run", run_script(run))]
        if (rollouts := run.rollouts()) and not run.config.cluster.slurm.gang:
            names = f"{run.label}.rollout-0"
            if len(rollouts) > 1:
                names += f" to {run.label}.{rollouts[-1].name}"
            scripts.append((names, rollout_script(run, rollouts[0])))
        return "\n".join(f"# ==== {name}\n{text}" for name, text in scripts)

    def start(self, run: ClusterRun) -> list[str]:
        """Write the scripts into the run's directory and submit them."""
        folder = run.directory / FOLDER
        for mounted in _own_folders(run) if run.config.cluster.slurm.container_image else ():
            Path(mounted).mkdir(parents=True, exist_ok=True)
        (folder / "run.sbatch").write_text(run_script(run))
        rollouts = [] if run.config.cluster.slurm.gang else run.rollouts()
        if rollouts:
            (folder / "rollout.sbatch").write_text(rollout_script(run, rollouts[0]))
        self._keep(run, [replica.name for replica in rollouts])
        lines = [self._submit(run, folder / "rollout.sbatch", replica.name) for replica in rollouts]
        return [*lines, self._submit(run, folder / "run.sbatch", "run")]  # which submits rollouts that are missing

    def alive(self, run: ClusterRun) -> Mapping[str, str]:
        """Return the state of each job of the run that has not ended: "RUNNING", "PENDING (Resources)".

        With `gang`, rollouts have the state of the job that they are in.
        """
        states: dict[str, str] = {}
        for job in _jobs(run):
            states[job.name] = ", ".join(filter(None, (states.get(job.name, ""), job.state)))
        if run.config.cluster.slurm.gang and "run" in states:
            states |= {replica.name: states["run"] for replica in run.rollouts()}
        return states

    def scale(self, run: ClusterRun, targets: Mapping[str, int]) -> list[str]:
        """Submit rollout jobs, or cancel those with the highest numbers, which hand their prompts back."""
        count = rollouts_of(targets, platform="Slurm")
        if run.config.cluster.slurm.gang:
            raise UserError(
                "with [cluster.slurm] gang the rollouts are parts of the run's job; stop the run and launch it with "
                f"--resume rollout.replicas={count}"
            )
        jobs = [job for job in _jobs(run) if job.name.startswith("rollout-")]
        kept = {job.name for job in jobs if not job.is_leaving}
        present = {job.name for job in jobs}
        surplus, missing = run.rescaled("rollout", count, present=present, leaving=present - kept)
        kept -= set(surplus)
        lines = [f"{name}: cancelled" for name in surplus]
        if surplus:
            _call("scancel", *(job.number for job in jobs if job.name in surplus))
        try:
            for replica in missing:
                lines.append(self._submit(run, run.directory / FOLDER / "rollout.sbatch", replica.name))
                kept.add(replica.name)
        finally:
            self._keep(run, sorted(kept, key=lambda name: int(name.rpartition("-")[2])))
        return lines

    def stop(self, run: ClusterRun, *, now: bool) -> list[str]:
        """Cancel all jobs: SIGTERM, and after KillWait SIGKILL. now: SIGKILL."""
        jobs = _jobs(run)
        if jobs and now:
            _call("scancel", "--full", "--signal=KILL", *(job.number for job in jobs))
        if jobs:
            _call("scancel", *(job.number for job in jobs))
        return [f"{name}: {'killed' if now else 'cancelled'}" for name in dict.fromkeys(job.name for job in jobs)]

    def _keep(self, run: ClusterRun, names: Sequence[str]) -> None:
        """Write the names of the rollouts, for a later job of the run."""
        (run.directory / FOLDER / "rollouts").write_text("".join(f"{name}\n" for name in names))

    def _submit(self, run: ClusterRun, script: Path, name: str) -> str:
        try:
            job = _call("sbatch", "--parsable", f"--job-name={run.label}.{name}", str(script)).strip()
        except UserError as error:
            if not _NO_GPUS.search(str(error)):
                raise
            raise UserError(f"{error}; on a cluster without GPUs set [cluster] gpus = false") from error
        return f"{name}: job {job.partition(';')[0]}"


def run_script(run: ClusterRun) -> str:
    """Return the script of the job with the controller and the policies."""
    slurm, policies = run.config.cluster.slurm, run.policies()
    rollouts = run.rollouts() if slurm.gang else []
    gpus = max(replica.gpus for replica in [*policies, *rollouts])
    packed = gpus // rollouts[0].gpus if rollouts and rollouts[0].gpus else 1  # rollouts of a machine
    steps, first = [], 0
    for replica in policies:
        steps.append(f"policy {_step(run, replica, first=first)} &")
        first += replica.machines
    for index, replica in enumerate(rollouts):
        here = first + index // packed
        steps.append(f"keep {_step(run, replica, first=here, slot=index % packed if packed > 1 else None)} &")
    first += -(-len(rollouts) // packed)
    # A policy over several machines that loses one is lost, but not the others and the rollouts.
    outlasts = len(policies) > 1 or (first > 1 and policies[0].machines == 1)
    controller = shlex.join([_program(run), *run.controller_arguments()])
    return "\n".join(
        [
            *_head(
                run,
                machines=first,
                gpus=gpus,
                partition=slurm.partition,
                outlasts=outlasts,
                processes=min(packed, len(rollouts)) or 1,
            ),
            *_functions(run, "run.sbatch"),
            *_ROLLOUTS.format(**_names(run), policies=len(policies), grace=_grace_s(run)).splitlines(),
            *(_MACHINES.format(*RENDEZVOUS_PORTS).splitlines() if policies[0].machines > 1 else ()),
            "# A job that was queued again: the workers wait for its controller, not for the last one.",
            f'[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || rm -f {shlex.quote(str(run.directory / CONTROLLER_FILE))}',
            *steps,
            "over='0 2 3'",
            "first='--resume auto'  # after a crash it takes over from itself instead",
            "# The controller runs on the first machine. It is started again unless it ends with 0, 1, 2, 3 or 130.",
            f'main "0 1 2 3 130" --nodes=1 --ntasks=1 --relative=0 {_MAIN} {controller}',
            "",
        ]
    )


def rollout_script(run: ClusterRun, replica: Replica) -> str:
    """Return the script of a job with one rollout replica, whose name is the end of the job's name."""
    slurm = run.config.cluster.slurm
    step = _step(run, replica, first=0, prefix=f"{_MAIN} ").replace(
        f"--name {replica.name} ", '--name "${SLURM_JOB_NAME##*.}" '
    )
    return "\n".join(
        [
            *_head(run, machines=1, gpus=replica.gpus, partition=slurm.rollout_partition or slurm.partition),
            *_functions(run, "rollout.sbatch"),
            "over=2 first= ; ended() { :; }  # after a 0 the run may go on: it has left",
            f'main "0 2" {step}',
            "",
        ]
    )


def _head(
    run: ClusterRun, *, machines: int, gpus: int, partition: str, outlasts: bool = False, processes: int = 1
) -> list[str]:
    """Return the lines of a script before its functions: options of sbatch, variables, and the user's lines.

    outlasts: whether the job goes on without a machine other than its first. processes: maximum number of replicas of a
    machine, which share its CPUs.
    """
    slurm = run.config.cluster.slurm
    cpus = (slurm.cpus_per_task or 0) * processes
    options = [f"--nodes={machines}", "--ntasks-per-node=1", "--requeue", "--open-mode=append"]
    options += ["--no-kill"] if outlasts else []  # without it Slurm queues the job again
    options += [f"--chdir={run.folders[-1]}"] if run.folders else []
    options += [f"--output={run.directory / FOLDER}/%x-%j.log"]
    options += [f"--gpus-per-node={gpus}"] if gpus else []
    options += [f"--signal=B:USR1@{slurm.save_before_s}"] if slurm.save_before_s else []
    by_option = {
        "partition": partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time,
        "cpus-per-task": cpus,
    }
    options += [f"--{name}={value}" for name, value in by_option.items() if value]
    srun = ["srun", "--overlap", "--kill-on-bad-exit=0", "--wait=0", "--no-kill"]
    if slurm.container_image:
        own = [f"{folder}:{folder}" for folder in _own_folders(run)]
        mounts = ",".join(filter(None, [slurm.container_mounts, *own]))
        srun += [f"--container-image={slurm.container_image}", f"--container-mounts={mounts}"]
        srun += [f"--container-workdir={run.folders[-1]}"] if run.folders else []
    srun += [f"--cpus-per-task={cpus}"] if cpus else []
    return [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in (*options, *slurm.extra)),
        *run.preamble,
        f"step=({shlex.join(srun)})",
    ]


def _own_folders(run: ClusterRun) -> list[str]:
    """Return the folders that the processes need at the same paths in a container, without those inside of another."""
    saved = run.config.checkpoint.path or ""
    paths = [*run.folders, str(run.directory), *([] if "://" in saved or not saved else [saved])]
    return [
        path
        for path in dict.fromkeys(paths)
        if not any(other != path and Path(path).is_relative_to(other) for other in paths)
    ]


def _program(run: ClusterRun) -> str:
    """Return the command of cosmos-rl, by default that of the container if there is one."""
    in_image = run.config.cluster.slurm.container_image and not run.config.cluster.command
    return "cosmos-rl" if in_image else run.program


def _grace_s(run: ClusterRun) -> int:
    return int(run.config.elastic.leave_s) + LEFTOVER_S


def _functions(run: ClusterRun, script: str) -> list[str]:
    values = {**_names(run), "script": script, "restarts": run.config.elastic.restart_workers, "hold": HOLD_S}
    return _FUNCTIONS.format(**values).splitlines()


def _names(run: ClusterRun) -> dict[str, str]:
    return {
        "folder": shlex.quote(str(run.directory / FOLDER)),
        "run": shlex.quote(str(run.directory)),
        "label": shlex.quote(run.label),
    }


def _step(run: ClusterRun, replica: Replica, *, first: int, prefix: str = "", slot: int | None = None) -> str:
    """Return the options of srun and the command for a replica whose first machine has this index in the job.

    slot: number of the replica on its machine, if it may share it; None: it has all GPUs that it asks for.
    """
    size = [f"--nodes={replica.machines}", f"--ntasks={replica.machines}", f"--relative={first}"]
    command = shlex.join([_program(run), *run.worker_arguments(replica)])
    if slot is not None:  # steps that overlap get the same GPUs
        begin = slot * replica.gpus + 1
        own = f"export CUDA_VISIBLE_DEVICES=$(cut -d, -f{begin}-{begin + replica.gpus - 1} <<< $CUDA_VISIBLE_DEVICES)"
        command = f"bash -c {shlex.quote(f'{own}; exec {command}')}"
    elif replica.gpus:
        size += [f"--gpus-per-node={replica.gpus}"]
    if replica.machines > 1:
        rendezvous = f'"${{machines[{first}]}}:$((port + {first}))"'
        command = f"bash -c {shlex.quote(f'exec {command} --node $SLURM_PROCID --rendezvous $0')} {rendezvous}"
    return f"{shlex.join(size)} {prefix}{command}"


_FUNCTIONS = """
# Starts a worker, and starts it again after a crash. Its exit code 2 is an error of the user.
keep() {{
  local left={restarts} code
  while true; do
    "${{step[@]}}" "$@"; code=$?
    case $code in 0|2) return $code ;; esac
    if [ $stopping = 1 ] || [ $left = 0 ] || [ -e "$PID_FILE".ended ]; then return $code; fi
    left=$((left - 1)); sleep 1
  done
}}

# Runs the step that the job ends with, and starts it again unless it ends with one of the codes in $1. The first start
# has the arguments of $first too.
main() {{
  local last="$1" left={restarts} code; shift
  "${{step[@]}}" "$@" $first & process=$!
  while true; do
    wait $process; code=$?
    if kill -0 $process 2>/dev/null; then continue; fi  # a signal has ended the wait
    case " $last " in *" $code "*) break ;; esac
    if [ $stopping = 1 ] || [ $left = 0 ] || [ -e "$PID_FILE".lost ]; then break; fi
    left=$((left - 1)); sleep 1
    "${{step[@]}}" "$@" & process=$!
  done
  touch "$PID_FILE".ended
  if [ -e "$PID_FILE".lost ]; then  # the codes 0 to 3 are of its own
    case $code in 0|1|2|3) ;; *) code=$(cat "$PID_FILE".lost) ;; esac
  fi
  case $code in 0|3|130) wait ;; esac  # policies save; after an error the end of this script ends the other steps
  if [ $again = 1 ]; then
    case " $over " in *" $code "*) ;; *) submit; exit 0 ;; esac
    if [ -s "$PID_FILE".next ]; then scancel $(cat "$PID_FILE".next); fi
  fi
  # The step has left before the end of the run, as Slurm cancels or preempts the job. Only a job that Slurm itself ends
  # is queued again.
  if [ ! -e "$PID_FILE".lost ] && {{ [ $code = 130 ] || [ -e {run}/controller.json ]; }}; then
    sleep {hold} & wait $!
  fi
  ended
  exit $code
}}

# Submits this job again, which starts when this one has ended, also if Slurm ends it while it saves.
submit() {{
  local next
  if [ -s "$PID_FILE".next ]; then return; fi
  if next=$(sbatch --parsable --dependency=afterany:$SLURM_JOB_ID --job-name="$SLURM_JOB_NAME" {folder}/{script}); then
    echo "${{next%;*}}" > "$PID_FILE".next
  fi
}}

# Slurm sends USR1 before the time limit: the step saves and ends, and the job is submitted again to continue, unless
# the step ends with one of the codes in $over.
# It sends TERM to all steps and to this script when the job is cancelled or preempted.
export PID_FILE={folder}/$SLURM_JOB_ID.pid
rm -f "$PID_FILE" "$PID_FILE".ended "$PID_FILE".gone "$PID_FILE".lost  # of the job before it was queued again
process= stopping=0 again=0
trap 'again=1 stopping=1; submit; kill -TERM $(cat "$PID_FILE")' USR1
trap 'stopping=1' TERM
"""
_MAIN = """bash -c 'echo $$ > "$PID_FILE"; exec "$@"' --"""
"""Records the process of the step that the job ends with: srun would kill the step at a TERM."""
_ROLLOUTS = """
# The run has ended: cancels rollouts that never started, and others that have not left in time: one that has just
# started waits for a controller. After an error all of them.
ended() {{
  local names end=$((SECONDS + {grace}))
  names=$(sed 's/^/'{label}'./' {folder}/rollouts | paste -sd ,)
  if [ -z "$names" ]; then return; fi
  if [ $code = 0 ]; then
    cancel --state=PENDING
    while squeue --noheader --me --name="$names" | grep -q .; do
      if [ $SECONDS -ge $end ]; then cancel; break; fi
      sleep 2
    done
  else
    cancel
  fi
}}

cancel() {{
  while read -r name; do scancel "$@" --name={label}."$name"; done < {folder}/rollouts
}}

# Keeps a policy. When all are given up the run ends, with the exit code of the last one.
policy() {{
  local code
  keep "$@"; code=$?
  if [ $code = 0 ] || [ -e "$PID_FILE".ended ]; then return; fi
  echo >> "$PID_FILE".gone
  if [ $(wc -l < "$PID_FILE".gone) = {policies} ]; then
    echo $code > "$PID_FILE".lost
    until [ -s "$PID_FILE" ]; do sleep 1; done
    kill -TERM $(cat "$PID_FILE")
  fi
}}

# Rollouts that ended with an earlier job of the run are submitted again.
while read -r name; do
  if ! squeue --noheader --me --states=PENDING,RUNNING --name={label}."$name" | grep -q .; then
    sbatch --job-name={label}."$name" {folder}/rollout.sbatch
  fi
done < {folder}/rollouts
"""


_MACHINES = """
machines=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
port=$(({} + SLURM_JOB_ID * 32 % {}))  # runs whose jobs share a machine meet at different ports
"""


class SlurmJob(NamedTuple):
    """A job of a run in the queue."""

    number: str
    name: str
    """Without the run's label."""
    state: str
    is_leaving: bool
    """Whether it was cancelled or has ended, and its processes have not."""


def _jobs(run: ClusterRun) -> list[SlurmJob]:
    """Return the jobs of the run; before a time limit two have the same name."""
    text = _call("squeue", "--noheader", f"--user={getpass.getuser()}", "--format=%A|%j|%T|%r")
    jobs = []
    for line in text.splitlines():
        job, name, state, reason = line.strip().split("|")
        label, _, short = name.rpartition(".")
        if label == run.label:
            reasons = "" if reason in ("None", "") else f" ({reason})"
            jobs.append(SlurmJob(job, short, f"{state}{reasons}", is_leaving=state == "COMPLETING"))
    return jobs


def _call(*command: str) -> str:
    """Run a command of Slurm and return its output. Raises UserError with the command's error message."""
    missing = f"{command[0]} is not installed here: run this on a machine that submits jobs to Slurm"
    return run_command(*command, missing=missing)

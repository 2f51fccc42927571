"""Slurm: controller and policies in one job that submits itself again, each rollout replica in a job of its own.

    run.sbatch       controller and policies: steps of one job. It ends with the run.
    rollout.sbatch   one rollout replica. It may start whenever it gets a machine, and may be preempted.

With [cluster.slurm] gang, rollouts are steps of the first job too. Needs sbatch, squeue and scancel where it is called,
and srun and scontrol on the machines. Jobs are found by their names, LABEL.run and LABEL.rollout-0.
"""

from __future__ import annotations

import getpass
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from cosmos_rl_core.clusters.launcher import FOLDER, ClusterRun, Replica, rollouts_of
from cosmos_rl_core.control.address_file import NAME as CONTROLLER_FILE
from cosmos_rl_core.errors import UserError

COMMAND_TIMEOUT_S = 60.0
RENDEZVOUS_PORT = 29400
"""Port on the first machine of a policy replica over several machines; those of later replicas follow it."""
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
        (folder / "run.sbatch").write_text(run_script(run))
        rollouts = [] if run.config.cluster.slurm.gang else run.rollouts()
        if rollouts:
            (folder / "rollout.sbatch").write_text(rollout_script(run, rollouts[0]))
        self._keep(run, [replica.name for replica in rollouts])
        lines = [self._submit(run, folder / "rollout.sbatch", replica.name) for replica in rollouts]
        return [*lines, self._submit(run, folder / "run.sbatch", "run")]  # which submits rollouts that are missing

    def alive(self, run: ClusterRun) -> Mapping[str, str]:
        """Return the state of each job of the run that has not ended: "RUNNING", "PENDING (Resources)"."""
        return {name: state for name, (_, state) in _jobs(run).items()}

    def scale(self, run: ClusterRun, wanted: Mapping[str, int]) -> list[str]:
        """Submit rollout jobs, or cancel those with the highest numbers, which hand their prompts back."""
        count, jobs = rollouts_of(wanted, platform="Slurm"), _jobs(run)
        there = sorted((name for name in jobs if name.startswith("rollout-")), key=_number)
        lines = [f"{name}: cancelled" for name in there[count:]]
        if lines:
            _call("scancel", *(jobs[name][0] for name in there[count:]))
        taken = set(there)
        for replica in run.rollouts(count + len(there)):
            if len(taken) >= count:
                break
            if replica.name not in taken:
                taken.add(replica.name)
                lines.append(self._submit(run, run.directory / FOLDER / "rollout.sbatch", replica.name))
        self._keep(run, sorted(taken.difference(there[count:]), key=_number))
        return lines

    def stop(self, run: ClusterRun, *, now: bool) -> list[str]:
        """Cancel all jobs: SIGTERM, and after KillWait SIGKILL. now: SIGKILL."""
        jobs = _jobs(run)
        if jobs and now:
            _call("scancel", "--full", "--signal=KILL", *(job for job, _ in jobs.values()))
        if jobs:
            _call("scancel", *(job for job, _ in jobs.values()))
        return [f"{name}: {'killed' if now else 'cancelled'}" for name in jobs]

    def _keep(self, run: ClusterRun, names: Sequence[str]) -> None:
        """Write the names of the rollouts, for a later job of the run."""
        (run.directory / FOLDER / "rollouts").write_text("".join(f"{name}\n" for name in names))

    def _submit(self, run: ClusterRun, script: Path, name: str) -> str:
        job = _call("sbatch", "--parsable", f"--job-name={run.label}.{name}", str(script)).strip()
        return f"{name}: job {job.partition(';')[0]}"


def run_script(run: ClusterRun) -> str:
    """Return the script of the job with the controller and the policies."""
    slurm, policies = run.config.cluster.slurm, run.policies()
    replicas = [*policies, *(run.rollouts() if slurm.gang else [])]
    steps, first = [], 0
    for replica in replicas:
        steps.append(f"keep {_step(run, replica, first=first)} &")
        first += replica.machines
    gpus = max(replica.gpus for replica in replicas)
    controller = shlex.join([run.program, *run.controller_arguments()])
    return "\n".join(
        [
            *_head(run, machines=first, gpus=gpus, partition=slurm.partition),
            *_functions(run, "run.sbatch"),
            *_ROLLOUTS.format(**_names(run)).splitlines(),
            "# A job that was queued again: the workers wait for its controller, not for the last one.",
            f'[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || rm -f {shlex.quote(str(run.directory / CONTROLLER_FILE))}',
            *steps,
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
            "first= ; ended() { :; }",
            f'main "0 2" {step}',
            "",
        ]
    )


def _head(run: ClusterRun, *, machines: int, gpus: int, partition: str) -> list[str]:
    """Return the lines of a script before its functions: options of sbatch, variables, and the user's lines."""
    slurm = run.config.cluster.slurm
    options = [f"--nodes={machines}", "--ntasks-per-node=1", "--requeue", "--open-mode=append"]
    options += ["--no-kill"] if machines > 1 else []  # a lost machine ends its replica, not the job
    options += [f"--output={run.directory / FOLDER}/%x-%j.log"]
    options += [f"--gpus-per-node={gpus}"] if gpus else []
    options += [f"--signal=B:USR1@{slurm.save_before_s}"] if slurm.save_before_s else []
    given = {
        "partition": partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time,
        "cpus-per-task": slurm.cpus_per_task,
    }
    options += [f"--{name}={value}" for name, value in given.items() if value]
    container = {"container-image": slurm.container_image, "container-mounts": slurm.container_mounts}
    srun = ["srun", "--overlap", "--kill-on-bad-exit=0", "--wait=0", "--no-kill"]
    srun += [f"--{name}={value}" for name, value in container.items() if value]
    srun += [f"--cpus-per-task={slurm.cpus_per_task}"] if slurm.cpus_per_task else []
    return [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in (*options, *slurm.extra)),
        *run.preamble,
        f"step=({shlex.join(srun)})",
    ]


def _functions(run: ClusterRun, script: str) -> list[str]:
    values = {**_names(run), "script": script, "restarts": run.config.elastic.restart_workers, "hold": HOLD_S}
    return _FUNCTIONS.format(**values).splitlines()


def _names(run: ClusterRun) -> dict[str, str]:
    return {
        "folder": shlex.quote(str(run.directory / FOLDER)),
        "run": shlex.quote(str(run.directory)),
        "label": shlex.quote(run.label),
    }


def _step(run: ClusterRun, replica: Replica, *, first: int, prefix: str = "") -> str:
    """Return the options of srun and the command for a replica whose first machine has this index in the job."""
    size = [f"--nodes={replica.machines}", f"--ntasks={replica.machines}", f"--relative={first}"]
    size += [f"--gpus-per-node={replica.gpus}"] if replica.gpus else []
    command = shlex.join([run.program, *run.worker_arguments(replica)])
    if replica.machines > 1:
        port = RENDEZVOUS_PORT + first
        head = f'$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1):{port}'
        command = f"bash -c {shlex.quote(f'exec {command} --node $SLURM_PROCID --rendezvous {head}')}"
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
    if [ $stopping = 1 ] || [ $left = 0 ]; then break; fi
    left=$((left - 1)); sleep 1
    "${{step[@]}}" "$@" & process=$!
  done
  touch "$PID_FILE".ended
  case $code in 0|3|130) wait ;; esac  # policies save; after an error the end of this script ends the other steps
  if [ $again = 1 ]; then
    exec sbatch --dependency=afterany:$SLURM_JOB_ID --job-name="$SLURM_JOB_NAME" {folder}/{script}
  fi
  # The step has left before the end of the run, as Slurm cancels or preempts the job. Only a job that Slurm itself ends
  # is queued again.
  if [ $code = 130 ] || [ -e {run}/controller.json ]; then sleep {hold} & wait $!; fi
  ended
  exit $code
}}

# Slurm sends USR1 before the time limit: the step saves and ends, and the job is submitted again to continue.
# It sends TERM to all steps and to this script when the job is cancelled or preempted.
export PID_FILE={folder}/$SLURM_JOB_ID.pid
rm -f "$PID_FILE".ended  # of the job before it was queued again
process= stopping=0 again=0
trap 'again=1 stopping=1; kill -TERM $(cat "$PID_FILE")' USR1
trap 'stopping=1' TERM
"""
_MAIN = """bash -c 'echo $$ > "$PID_FILE"; exec "$@"' --"""
"""Records the process of the step that the job ends with: srun would kill the step at a TERM."""
_ROLLOUTS = """
# The run has ended: cancels rollouts that never started, and after an error all of them.
ended() {{
  local name only=
  if [ $code = 0 ]; then only=--state=PENDING; fi
  while read -r name; do scancel $only --name={label}."$name"; done < {folder}/rollouts
}}

# Rollouts that ended with an earlier job of the run are submitted again.
while read -r name; do
  if ! squeue --noheader --me --states=PENDING,RUNNING --name={label}."$name" | grep -q .; then
    sbatch --job-name={label}."$name" {folder}/rollout.sbatch
  fi
done < {folder}/rollouts
"""


def _jobs(run: ClusterRun) -> dict[str, tuple[str, str]]:
    """Return number and state of each job of the run by its name."""
    text = _call("squeue", "--noheader", f"--user={getpass.getuser()}", "--format=%A|%j|%T|%r")
    found = {}
    for line in text.splitlines():
        job, name, state, reason = line.strip().split("|")
        label, _, short = name.rpartition(".")
        if label == run.label:
            found[short] = job, state if reason in ("None", "") else f"{state} ({reason})"
    return found


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _call(*command: str) -> str:
    """Run a command of Slurm and return its output. Raises UserError with the command's error message."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise UserError(
            f"{command[0]} is not installed here: run this on a machine that submits jobs to Slurm"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{shlex.join(command)} did not answer within {COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise UserError(f"{shlex.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout

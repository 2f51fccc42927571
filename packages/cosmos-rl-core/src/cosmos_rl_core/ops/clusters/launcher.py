"""The interface of a platform, and the processes of a run that it has to start.

cluster = ClusterRun.of("gsm8k.toml", ["run.max_steps=10"])
print(find_launcher("slurm").plan(cluster))       # the text that `launch` submits
launch("slurm", cluster, resume=False)

launched = Launched.of(run_dir)                   # later, in another process
launched.alive()                                  # {"run": "RUNNING", "rollout-0": "PENDING (Resources)"}
launched.scale({"rollout": 4})
launched.stop(now=False)
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import msgspec

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import add_folders, import_from
from cosmos_rl_core.launch.gpus import gpus_per_rollout
from cosmos_rl_core.observe.record import LAUNCH, STOPPED
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.recipe.load import dump_resolved, load, load_config
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.supervisor import USER_ERROR, ProcessSpec

FOLDER = "launch"
"""Folder for what a platform executes and writes, in the run's directory."""
CONTROLLER = "controller"
"""Name of the controller's process."""
COMMAND_TIMEOUT_S = 60.0
INTERRUPTED = 130
"""Exit code of a run that was interrupted."""
_FILE, _RECIPE = "cluster.json", "recipe.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One replica of a role."""

    role: str
    name: str
    machines: int
    ranks: int
    """Processes on each machine."""
    gpus: int
    """GPUs on each machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRun:
    """A recipe that a platform starts."""

    file: Path
    overrides: tuple[str, ...]
    config: RunConfig
    directory: Path
    """The run's directory, which all machines see at this path."""
    folders: tuple[str, ...]
    """Folders for "module:attribute" names."""
    engine: str = ""
    """The engine that was chosen, and why; empty where the recipe names one."""
    resume: bool = False
    """Whether the run may continue an earlier one in its directory."""
    platform: str = ""
    """The name of its launcher."""
    checked: bool = False
    """Whether this process has made the checks of `cosmos-rl run` before its start."""

    @classmethod
    def of(cls, file: Path, overrides: Sequence[str], *, external: bool = True) -> ClusterRun:
        """Read a recipe. external: the platform starts the workers, not `cosmos-rl run`. Raises ConfigError."""
        folders = import_from(file)
        placed = [*overrides, *(["run.placement=external"] if external else [])]
        loaded = load(file, placed, continues=True, launched=external)
        config = loaded.valid()
        return cls(
            file=file.resolve(),
            overrides=tuple(overrides),
            config=config,
            directory=config.run.directory.resolve(),
            folders=folders,
            engine=loaded.engine,
        )

    @property
    def label(self) -> str:
        """A name for the platform: that of the run and six digits of its directory."""
        digits = hashlib.sha256(str(self.directory).encode()).hexdigest()[:6]
        return f"{re.sub(r'[^A-Za-z0-9.-]', '-', self.config.run.name)}-{digits}"

    @property
    def program(self) -> str:
        """The command of cosmos-rl on the machines."""
        here = Path(sys.executable).with_name("cosmos-rl")
        return self.config.cluster.command or (str(here) if here.exists() else "cosmos-rl")

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of all processes: [cluster] env, and the command that has started the run."""
        words = ["cosmos-rl", "launch", str(self.file), *self.overrides, "--on", self.platform]
        return {**self.config.cluster.env, **({LAUNCH: shlex.join(words)} if self.platform else {})}

    @property
    def preamble(self) -> list[str]:
        """Lines of shell before the processes start: variables, and [cluster] setup."""
        exports = (f"export {name}={shlex.quote(value)}" for name, value in self.variables.items())
        return [*exports, *self.config.cluster.setup]

    def must_be_new(self, *, resume: bool) -> None:
        """Raise UserError if the directory has an earlier run that shall not be resumed."""
        if (self.directory / "resolved.toml").exists() and not resume:
            raise UserError(
                f"{self.directory} contains an earlier run; continue it with --resume, or choose another "
                "[run] output_dir"
            )

    def policies(self) -> list[Replica]:
        """Return the policy replicas."""
        section = self.config.policy
        dims = ParallelDims.of(section.parallel, world_size=section.world_size)
        ranks = dims.world_size // section.num_nodes
        return [
            Replica(
                role="policy",
                name=f"policy-{index}",
                machines=section.num_nodes,
                ranks=ranks,
                gpus=ranks if self.config.cluster.gpus else 0,
            )
            for index in range(section.replicas)
        ]

    def rollouts(self, count: int | None = None) -> list[Replica]:
        """Return the first `count` rollout replicas, by default those of the recipe; none in supervised fine-tuning."""
        if self.config.is_sft:
            return []
        gpus = gpus_per_rollout(self.config) if self.config.cluster.gpus else 0
        number = self.config.rollout.replicas if count is None else count
        return [Replica(role="rollout", name=f"rollout-{i}", machines=1, ranks=1, gpus=gpus) for i in range(number)]

    def replicas(self, role: str, count: int) -> list[Replica]:
        """Return the first `count` replicas of a role, also beyond those of the recipe. Raises UserError."""
        if role == "rollout" and not self.config.is_sft:
            return self.rollouts(count)
        if role == "policy":
            return [replace(self.policies()[0], name=f"policy-{index}") for index in range(count)]
        raise UserError(f"{role}={count}: this run has no {role} workers")

    def rescaled(
        self, role: str, count: int, *, present: Collection[str], leaving: Collection[str] = ()
    ) -> tuple[list[str], list[Replica]]:
        """Return the surplus replicas of a role, those with the highest numbers, and the missing ones.

        present: the names of those that have not ended. leaving: of these, the ones that end.
        """
        staying = [name for name in present if name.startswith(f"{role}-") and name not in leaving]
        staying.sort(key=lambda name: int(name.rpartition("-")[2]))
        free = (replica for replica in self.replicas(role, count + len(present)) if replica.name not in present)
        return staying[count:], list(islice(free, max(0, count - len(staying))))

    def process(self, name: str, arguments: Sequence[str], *, log: str = "") -> ProcessSpec:
        """Return a process of this run that a supervisor starts again after crashes. log: as in ProcessSpec."""
        is_controller = name == CONTROLLER
        return ProcessSpec(
            name=name,
            command=(self.program, *arguments),
            first=("--resume", "auto") if is_controller else (),  # after a crash it takes over from itself instead
            preamble=("exec 2>&1", *self.preamble),
            log=log,
            restarts=self.config.elastic.restart_workers,
            last=(0, 1, USER_ERROR, STOPPED, INTERRUPTED) if is_controller else (0, USER_ERROR),
        )

    def controller_arguments(self) -> list[str]:
        """Return the arguments of `cosmos-rl` for the controller."""
        listens = [] if "bind" in self.config.run.model_fields_set else ["run.bind=0.0.0.0"]
        chosen = [f"rollout.engine={self.config.rollout.engine}"] if self.engine else []
        return ["controller", str(self.file), *self.overrides, *chosen, *listens]

    def worker_arguments(self, replica: Replica, *, controller: str = "") -> list[str]:
        """Return the arguments of `cosmos-rl` for each machine of a replica, without --node and --rendezvous.

        controller: its address, for machines that do not see the run's directory.
        """
        config = self.config
        place = ["--controller", controller] if controller else ["--run", str(self.directory)]
        arguments = ["worker", "--role", replica.role, "--name", replica.name, *place]
        arguments += ["--wait-s", str(config.cluster.start_wait_s)]
        arguments += ["--python-path", os.pathsep.join(dict.fromkeys(self.folders))] if self.folders else []
        threads = config.policy.threads if replica.role == "policy" else config.rollout.threads
        if threads:
            arguments += ["--threads", str(max(1, threads // replica.ranks))]
        if replica.role == "policy":
            arguments += ["--collective-timeout-s", f"{config.policy.collective_timeout_s:g}"]
            arguments += ["--ranks-per-node", str(replica.ranks), "--num-nodes", str(replica.machines)]
        return arguments


class Launcher(Protocol):
    """A platform. `launch` and `Launched` call it.

    Every method raises UserError with the platform's own message where the platform refuses.
    `testing.conformance.check_launcher` has the checks of an implementation. One whose machines do not see the files of
    this machine has the attribute `shares_files = False`: the recipe's files are then not checked before the start. One
    whose `cosmos-rl launch` stays has a method `follow(run) -> int`, which prints the logs until the end of the run and
    returns its exit code; Ctrl-C and SIGTERM stop the run.
    """

    def plan(self, run: ClusterRun) -> str:
        """Return the text that `start` submits. It has the name of each policy and rollout replica."""
        ...

    def start(self, run: ClusterRun) -> list[str]:
        """Submit the run and return a line for each submitted job. Nothing of the run is alive before."""
        ...

    def alive(self, run: ClusterRun) -> Mapping[str, str]:
        """Return the state of each job by its name, as the platform calls it; of rollout replicas by their names.

        Jobs that have ended are not in it.
        """
        ...

    def scale(self, run: ClusterRun, targets: Mapping[str, int]) -> list[str]:
        """Start or stop replicas until there are as many of each role as wanted; return a line for each change.

        A role that is not in `targets` stays as it is. Raises UserError for a role that the platform cannot change.
        """
        ...

    def stop(self, run: ClusterRun, *, now: bool) -> list[str]:
        """End all jobs, and return a line for each. Does not wait for their end.

        The processes get SIGTERM, and the platform's usual time to save. now: they are killed.
        """
        ...


def run_command(*command: str, missing: str, text: str | None = None) -> str:
    """Run a command of a platform with `text` as its input, and return its output.

    Raises UserError: with `missing` if it is not installed here, and with its own error message.
    """
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise UserError(missing) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{shlex.join(command)} did not answer within {COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise UserError(f"{shlex.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def find_launcher(platform: str) -> Launcher:
    """Return the launcher of a platform: an installed one, or "module:attribute". Raises UserError."""
    launcher_type: type[Launcher] = plugins.load("cosmos_rl.launchers", platform)
    return launcher_type()


def shares_files(platform: str) -> bool:
    """Return whether the machines of a platform see the files of this one, which a launcher denies by an attribute."""
    return getattr(find_launcher(platform), "shares_files", True)


def rollouts_of(targets: Mapping[str, int], *, platform: str) -> int:
    """Return the wanted number of rollouts, for a platform that scales them alone. Raises UserError."""
    for role, number in targets.items():
        if role != "rollout":
            raise UserError(
                f"{role}={number}: on {platform} the number of policies is that of the recipe; stop the run "
                f"and launch it with --resume policy.replicas={number}"
            )
    return targets["rollout"]


def launch(platform: str, run: ClusterRun, *, resume: bool) -> list[str]:
    """Start a run on a platform and return a line for each job.

    Raises UserError if the directory has an earlier run and `resume` is false, if jobs of the run are alive, or if the
    platform refuses. After any error, and Ctrl-C, the jobs that it has accepted are cancelled.
    """
    launcher = find_launcher(platform)
    run.must_be_new(resume=resume)
    if alive := {**_alive_of_earlier(run), **launcher.alive(run)}:
        jobs = ", ".join(f"{name} {state}" for name, state in alive.items())
        raise UserError(f"{run.directory} has jobs already: {jobs}; end them with cosmos-rl stop {run.directory}")
    Launched(platform=platform, file=str(run.file), overrides=run.overrides, folders=run.folders).write(run)
    try:
        return launcher.start(replace(run, resume=resume, platform=platform))
    except BaseException:  # Ctrl-C too
        with contextlib.suppress(UserError):  # the first error has the reason
            launcher.stop(run, now=True)
        raise


def _alive_of_earlier(run: ClusterRun) -> Mapping[str, str]:
    """Return the states of the jobs of an earlier launch. Raises UserError if its platform does not answer."""
    earlier = Launched.of(run.directory)
    if earlier is None:
        return {}
    try:
        return earlier.alive()
    except UserError as error:
        raise UserError(
            f"it is not known whether jobs of the last launch, on {earlier.platform}, are alive: {error}; if that "
            f"cluster is gone, remove {run.directory / FOLDER / _FILE}"
        ) from error


class Launched(msgspec.Struct, kw_only=True):
    """The content of `<run>/launch/cluster.json`: a run that a platform has started. Its recipe is `recipe.toml` beside
    it, as the user may edit or remove his own file while the run is live."""

    platform: str
    file: str
    overrides: tuple[str, ...]
    folders: tuple[str, ...]
    """Folders for "module:attribute" names."""
    directory: str = ""
    """Set by `of`: the directory in which the file was found."""
    at: float = 0.0
    """Set by `of`: the time of the launch, in Unix seconds."""

    @classmethod
    def of(cls, run_dir: Path) -> Launched | None:
        """Return the launch of a run, or None if no platform has started it. Raises UserError."""
        path = run_dir / FOLDER / _FILE
        try:
            launched = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        launched.directory, launched.at = str(run_dir.resolve()), path.stat().st_mtime
        return launched

    def write(self, run: ClusterRun) -> None:
        """Create the folder and the files."""
        run.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = run.directory / FOLDER
        folder.mkdir(exist_ok=True)
        (folder / _RECIPE).write_text(dump_resolved(run.config), encoding="utf-8")
        (folder / _FILE).write_bytes(msgspec.json.encode(self))

    @property
    def shares_files(self) -> bool:
        """Whether the machines of the platform see the files of this one."""
        return shares_files(self.platform)

    def alive(self) -> Mapping[str, str]:
        """Return the state of each job by its name, as the platform calls it. Raises UserError."""
        return find_launcher(self.platform).alive(self._run())

    def scale(self, targets: Mapping[str, int]) -> list[str]:
        """Start or stop replicas; return a line for each change. Raises UserError."""
        for role, number in targets.items():
            if number < 1:
                raise UserError(f"{role}=0: at least one {role} worker must stay; cosmos-rl stop ends the run")
        return find_launcher(self.platform).scale(self._run(), targets)

    def stop(self, *, now: bool) -> list[str]:
        """End all jobs; return a line for each. Raises UserError."""
        return find_launcher(self.platform).stop(self._run(), now=now)

    def _run(self) -> ClusterRun:
        add_folders(self.folders)
        return ClusterRun(
            file=Path(self.file),
            overrides=self.overrides,
            config=load_config(Path(self.directory, FOLDER, _RECIPE)),
            directory=Path(self.directory),
            folders=self.folders,
            platform=self.platform,
        )

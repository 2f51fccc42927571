"""The processes of `cosmos-rl run`: a controller that dies is started again, while its workers go on.

launcher       the command: owns the other processes, passes Ctrl-C and SIGTERM on
  controller   the run; `supervised.link` is between the two
  workers      started and killed by the launcher when the controller says so

A later controller takes the run over by its journal. The controller ends with the launcher, and then the workers leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from cosmos_rl_core.control.address_file import NAME
from cosmos_rl_core.imports import PYTHON, add_folders
from cosmos_rl_core.launch.observer import RunResult
from cosmos_rl_core.launch.open_recipe import OpenRecipe
from cosmos_rl_core.launch.placement import STOP_GRACE_S
from cosmos_rl_core.launch.run import control, explained, opened, run_opened
from cosmos_rl_core.launch.supervised.link import (
    CRASHED,
    ControllerTask,
    ForgetWorker,
    InterruptNext,
    KillWorkers,
    LauncherLink,
    Request,
    StartWorkers,
    TakesSignals,
)
from cosmos_rl_core.observe.reporting import Ending
from cosmos_rl_core.processes import GRACE_S, child_variables, end_with, unnamed_memory
from cosmos_rl_core.recipe.load import load_config, tables_of
from cosmos_rl_core.supervisor import ProcessEnd, ProcessSpec, ProcessSupervisor
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed, adopt
from cosmos_rl_core.workers.directory import RunDirectory

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
CONTROLLER = "controller"
COMMAND = (*PYTHON, "-c", "from cosmos_rl_core.cli.main import main; main()", "control")
"""The hidden command of a controller; the descriptors of its link and of its task follow."""


def run_supervised(recipe: OpenRecipe, *, resume: str | None, overwrite: bool) -> RunResult:
    """As `run.run_opened`, with a controller in a process of its own that is started again after its death.

    This process ends with the exit code of the last controller. Without [elastic] restart_controller, and for other
    placements, it is `run_opened`.
    """
    restarts = recipe.config.elastic.restart_controller
    if sys.platform != "linux" or recipe.config.run.placement != "local" or not restarts:
        return run_opened(recipe, resume=resume, overwrite=overwrite)
    with opened(recipe.config, resume=resume, overwrite=overwrite) as directory:
        launcher = ControllerLauncher(recipe, directory, resume=resume, overwrite=overwrite)
        raise SystemExit(asyncio.run(launcher.run(restarts)))


def control_supervised(link: int, task: int) -> RunResult:
    """Control a run in this process, which a `ControllerLauncher` has started with these descriptors."""
    inherited = socket.socket(fileno=link)
    end_with(inherited, grace_s=0.0)
    with os.fdopen(task, "rb") as file:
        job = msgspec.msgpack.decode(file.read(), type=ControllerTask)
    sys.argv = list(job.command)  # for the record of the run's start
    add_folders(job.python_path)
    recipe = OpenRecipe(config=load_config(job.recipe), python_path=job.python_path, notes=job.notes)
    lock = os.fdopen(job.lock, "a+")
    directory = RunDirectory(Path(job.directory), lock, job.directory_notes, job.is_orphaned)
    with explained(recipe.config), contextlib.closing(directory):
        return control(
            recipe, directory, resume=job.resume, overwrite=job.overwrite, supervised=LauncherLink(job, inherited)
        )


class ControllerLauncher:
    """The process of the command: one controller after the other, and the workers of all of them."""

    def __init__(self, recipe: OpenRecipe, directory: RunDirectory, *, resume: str | None, overwrite: bool) -> None:
        self._recipe, self._opened = recipe, directory
        self._directory = directory.path.resolve()
        self._resume, self._overwrite = resume, overwrite
        self._processes = ProcessSupervisor()
        self._workers: dict[str, ProcessSpec] = {}
        self._ended: dict[str, ProcessEnd] = {}
        """Ends that no controller has dealt with."""
        self._link: Connection | None = None
        self._began = False
        """Whether any worker was ever started."""
        self._interrupted = False
        self._is_ready = True
        """Whether the controller may get signals: a later one not before it handles them."""
        self._waiting: signal.Signals | None = None
        """A signal that came before."""

    async def run(self, restarts: int) -> int:
        """Run controllers until the last one has ended, and return its exit code."""
        loop = asyncio.get_running_loop()
        for number in INTERRUPTS:
            loop.add_signal_handler(number, self._interrupt, number)
        try:
            return await self._control(restarts)
        finally:
            (self._directory / NAME).unlink(
                missing_ok=True
            )  # left over by a killed controller: without it workers leave
            for number in INTERRUPTS:
                loop.add_signal_handler(number, self._processes.kill)
            await self._processes.stop(grace_s=STOP_GRACE_S)

    async def _control(self, restarts: int) -> int:
        for left in range(restarts, -1, -1):
            end = await self._run_controller(is_first=left == restarts, can_restart=left > 0)
            if end.exit_code >= 0 and end.exit_code != CRASHED:
                return end.exit_code
            status = "crashed" if end.exit_code == CRASHED else f"died ({end.status})"
            if not left or not (self._directory / NAME).exists():  # it has not served yet, or has finished
                break
            _say(f"the controller {status}; starting it again")
        if end.exit_code == -signal.SIGINT and self._interrupted:  # before Python was ready for it
            return 128 + signal.SIGINT
        _say(f"error: the controller {status}. Its workers leave; go on with --resume auto")
        Ending(self._directory).killed(f"the controller {status}")
        return 1

    async def _run_controller(self, *, is_first: bool, can_restart: bool) -> ProcessEnd:
        """Start a controller, work for it, and return its end when its last requests were done."""
        ours, theirs = socket.socketpair()
        self._link = await adopt(ours, decode=Request, name=CONTROLLER)
        # Nothing is awaited from here to its start: the end of a worker is in the task, or is sent over the link.
        task = self._task(is_first=is_first, can_restart=can_restart)
        with theirs, os.fdopen(unnamed_memory(), "w+b") as file:
            file.write(msgspec.msgpack.encode(task))
            file.seek(0)
            descriptors = theirs.fileno(), file.fileno()
            spec = ProcessSpec(
                name=CONTROLLER,
                command=(*COMMAND, *map(str, descriptors)),
                variables=child_variables(self._recipe.python_path),
                inherited=(task.lock, *descriptors),
            )
            self._is_ready, self._waiting = is_first, None
            self._processes.start([spec])
        serving = asyncio.create_task(self._serve(self._link))
        while (end := await self._processes.next_end()).name != CONTROLLER:
            self._ended[end.name] = end
            with contextlib.suppress(ConnectionClosed):  # it is ending
                self._link.post(end)
        await asyncio.wait([serving], timeout=GRACE_S)  # its socket has ended too, unless a child of it has it
        self._link.close()
        await serving
        return end

    def _task(self, *, is_first: bool, can_restart: bool) -> ControllerTask:
        recipe, directory = self._recipe, self._opened
        if not is_first:
            directory, recipe = replace(directory, notes=(), is_orphaned=True), replace(recipe, notes=())
        return ControllerTask(
            command=tuple(sys.argv),
            recipe=tables_of(recipe.config),
            python_path=recipe.python_path,
            notes=recipe.notes,
            directory=str(directory.path),
            directory_notes=directory.notes,
            is_orphaned=directory.is_orphaned,
            lock=directory.lock,
            resume=self._resume,
            overwrite=self._overwrite,
            launcher=os.getpid(),
            interrupted=self._interrupted,
            can_restart=can_restart,
            began=self._began,
            workers=tuple(self._workers.values()),
            ended=tuple(self._ended.values()),
        )

    async def _serve(self, link: Connection) -> None:
        """Work for a controller until its end; an error here ends it."""
        try:
            await link.consume(self._handle)
        except ConnectionClosed:
            return
        except BaseException:
            self._processes.kill([CONTROLLER])
            raise

    def _handle(self, request: Request) -> None:
        match request:
            case TakesSignals():
                self._is_ready = True
                if self._waiting is not None:
                    self._interrupt(self._waiting)
            case InterruptNext():
                self._interrupted = True
            case StartWorkers(workers):
                self._began = True
                for spec in workers:
                    self._workers[spec.name] = spec
                    self._ended.pop(spec.name, None)
                self._processes.start(workers)
            case KillWorkers(names):
                self._processes.kill(names)
            case ForgetWorker(name):
                self._workers.pop(name, None)
                self._ended.pop(name, None)
                self._processes.forget(name)

    def _interrupt(self, number: signal.Signals) -> None:
        self._interrupted = True
        if self._is_ready:
            self._processes.send(CONTROLLER, number)
        else:
            self._waiting = number


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  the observer is the controller's

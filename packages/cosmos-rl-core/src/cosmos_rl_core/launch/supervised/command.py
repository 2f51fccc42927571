"""The processes of `cosmos-rl run` beside its workers: a controller that dies is started again.

launcher     the command: keeps the worker processes, passes Ctrl-C and SIGTERM on
  supervisor   forked from it, without threads: forks the controllers, one after the other
    controller   the run

They share the memory of the imports. A later controller takes the run over by its journal. The controller ends with the
launcher, and then the workers leave.
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

from cosmos_rl_core.control.address_file import NAME
from cosmos_rl_core.launch.observer import RunResult
from cosmos_rl_core.launch.open_recipe import OpenRecipe
from cosmos_rl_core.launch.placement import STOP_GRACE_S
from cosmos_rl_core.launch.run import control, prepared, run_opened
from cosmos_rl_core.launch.supervised.keeper import ProcessKeeper
from cosmos_rl_core.launch.supervised.link import CRASHED, SupervisedKeeper, link, serve_controllers
from cosmos_rl_core.observe.reporting import Ending
from cosmos_rl_core.processes import end_with

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


def run_supervised(given: OpenRecipe, *, resume: str | None, overwrite: bool) -> RunResult:
    """As `run.run_opened`, with a controller that is started again after its death.

    Returns in the controller's process alone. The calling process keeps the workers, and ends with the exit code of the
    last controller. Without [elastic] restart_controller, and for other placements, it is `run_opened`.
    """
    restarts = given.config.elastic.restart_controller
    if sys.platform != "linux" or given.config.run.placement != "local" or not restarts:
        return run_opened(given, resume=resume, overwrite=overwrite)
    with prepared(given, resume=resume, overwrite=overwrite) as directory:
        ours, theirs = link()
        sys.stdout.flush()
        sys.stderr.flush()
        if supervisor := os.fork():
            theirs.close()
            keeper = ProcessKeeper(
                log_dir=directory.path.resolve() / "logs",
                python_path=given.python_path,
                policy_keeps=(directory.lock,),
            )
            raise SystemExit(asyncio.run(_launch(supervisor, ours, keeper, directory.path.resolve())))
        ours.close()
        supervised, is_first = _next_controller(theirs, restarts, directory.path.resolve())
        if not is_first:
            directory, given = replace(directory, notes=(), is_orphaned=True), replace(given, notes=())
        return control(given, directory, resume=resume, overwrite=overwrite, supervised=supervised)


async def _launch(supervisor: int, ours: socket.socket, keeper: ProcessKeeper, directory: Path) -> int:
    """Keep the workers until the last controller has ended, and return its exit code."""
    loop = asyncio.get_running_loop()
    for number in INTERRUPTS:
        loop.add_signal_handler(number, _pass_on, supervisor, number)
    serving = asyncio.create_task(serve_controllers(ours, keeper))
    ended = asyncio.create_task(asyncio.to_thread(os.waitpid, supervisor, 0))
    try:
        await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_EXCEPTION)
        if not ended.done():  # an error here
            os.killpg(supervisor, signal.SIGKILL)
        _, status = await ended
        await serving
    finally:
        (directory / NAME).unlink(missing_ok=True)  # left over by a killed controller: without it, workers leave
        for number in INTERRUPTS:
            loop.add_signal_handler(number, keeper.kill_all)
        await keeper.all_ended(grace_s=STOP_GRACE_S)
    return max(1, code) if (code := os.waitstatus_to_exitcode(status)) else 0


def _pass_on(supervisor: int, number: int) -> None:
    """Send a signal to the controller, which is in the supervisor's process group; the supervisor blocks it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(supervisor, number)


def _next_controller(theirs: socket.socket, restarts: int, directory: Path) -> tuple[SupervisedKeeper, bool]:
    """Fork controllers, one after the death of the other; return in each of them, with whether it is the first.

    The supervisor itself ends with the exit code of the last one.
    """
    supervisor = os.getpid()
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    for left in range(restarts, -1, -1):
        interrupted = not signal.sigpending().isdisjoint(INTERRUPTS)
        pid = os.fork()
        if not pid:
            end_with(theirs, grace_s=0.0)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
            supervised = SupervisedKeeper(
                socket=theirs, supervisor=supervisor, interrupted=interrupted, can_restart=left > 0
            )
            return supervised, left == restarts
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code >= 0 and code != CRASHED:
            os._exit(code)
        status = "crashed" if code == CRASHED else f"died (signal {signal.Signals(-code).name})"
        if not left or not (directory / NAME).exists():  # it has not served yet, or has finished
            break
        _say(f"the controller {status}; starting it again")
    _say(f"error: the controller {status}. Its workers leave; go on with --resume auto")
    Ending(directory).killed(f"the controller {status}")
    os._exit(1)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  the observer is the controller's

"""The commands `scale`, `stop` and `status`, for a run that is live. Imports only typer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cosmos_rl_core.ops.clusters.launcher import Launched

CHECK_S = 0.5
Wanted = Annotated[
    list[str],
    typer.Argument(
        metavar="[RUN_DIR] ROLE=NUMBER...",
        help="The run's directory, and the number of workers of a role: rollout=4, policy=2.",
    ),
]
Run = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")]
Controller = Annotated[
    str,
    typer.Option(metavar="ADDRESS", help="Instead of RUN_DIR: address of the controller, such as tcp://10.0.0.1:4000."),
]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the run's token. Default: COSMOS_RL_TOKEN, or that of RUN_DIR.")
]
TlsFile = Annotated[Path | None, typer.Option(help="File tls.pem of a run with TLS. Default: COSMOS_RL_TLS, likewise.")]


def scale(
    arguments: Wanted, *, controller: Controller = "", token_file: TokenFile = None, tls_file: TlsFile = None
) -> None:
    """Start or drain workers of a live run, and wait until they are ready or gone; on a cluster, submit their jobs."""
    import asyncio

    from cosmos_rl_core.ops.clusters.launcher import Launched
    from cosmos_rl_core.ops.clusters.operator import operator_of, request_workers

    run_dir = None if "=" in arguments[0] else Path(arguments[0])
    numbers = parse(arguments if run_dir is None else arguments[1:])
    if run_dir is not None and (launched := Launched.of(run_dir)) is not None and launched.alive():
        typer.echo("\n".join(launched.scale(numbers)) or "nothing to change")
        return
    operator = operator_of(run_dir, controller=controller, token_file=token_file, tls_file=tls_file)
    present = asyncio.run(request_workers(operator, numbers, report=typer.echo))
    typer.echo(f"ready: {', '.join(f'{number} {role}' for role, number in present.items() if number)}")


def stop(
    run_dir: Annotated[Path | None, typer.Argument(metavar="[RUN_DIR]", help="The run's directory.")] = None,
    *,
    now: Annotated[bool, typer.Option("--now", help="End the processes at once; nothing is saved.")] = False,
    controller: Controller = "",
    token_file: TokenFile = None,
    tls_file: TlsFile = None,
) -> None:
    """End a run after the step in work, which is saved; a second time, or with --now, at once."""
    import asyncio

    from cosmos_rl_core.control.address_file import NAME as CONTROLLER_FILE
    from cosmos_rl_core.errors import UserError
    from cosmos_rl_core.ops.clusters.launcher import Launched
    from cosmos_rl_core.ops.clusters.local import end_process
    from cosmos_rl_core.ops.clusters.operator import Unreachable, operator_of, request_end
    from cosmos_rl_core.workers.directory import lock_holder

    operator = partial(operator_of, run_dir, controller=controller, token_file=token_file, tls_file=tls_file)
    if run_dir is None:
        asyncio.run(request_end(operator(), now=now, report=typer.echo))
        typer.echo("the run has ended")
        return
    launched, refused = Launched.of(run_dir), None
    listens = (run_dir / CONTROLLER_FILE).exists()
    try:
        asyncio.run(request_end(operator(), now=now, report=typer.echo))
    except UserError as error:  # it does not listen, it hangs, or this machine does not reach it
        refused = error
    if launched is not None and launched.alive():
        lines = launched.stop(now=now)
    elif refused is None:
        lines = []
    elif isinstance(refused, Unreachable) or (not listens and lock_holder(run_dir) is not None):
        typer.echo(str(refused), err=True)
        lines = end_process(run_dir, now=now)
    elif listens or not is_run(run_dir):
        raise refused
    else:
        lines = []  # it has ended before
    for line in lines:
        typer.echo(line)
    while (launched is not None and launched.alive()) or (lines and lock_holder(run_dir) is not None):
        time.sleep(CHECK_S)
    typer.echo("the run has ended")


def status(run_dir: Run) -> None:
    """Show the jobs, members, samples and waits of a run."""
    from cosmos_rl_core.control.status import live_controller, read_status, render
    from cosmos_rl_core.errors import UserError
    from cosmos_rl_core.observe.record import read_outcome
    from cosmos_rl_core.ops.clusters.launcher import Launched

    launched, jobs = Launched.of(run_dir), {}
    try:
        jobs = launched.alive() if launched is not None else {}
    except UserError as error:  # the platform's commands are on other machines
        typer.echo(f"the states of the jobs are not known here: {error}", err=True)
    if jobs:
        typer.echo("\n".join(["jobs:", *(f"  {name}: {state}" for name, state in jobs.items()), ""]))
    if waits := without_controller(run_dir, launched, has_jobs=bool(jobs)):
        typer.echo(waits)
        return
    recorded, outcome = read_status(run_dir), read_outcome(run_dir)
    now = time.time()
    controller = live_controller(run_dir, seen_s=now - recorded.time)
    typer.echo(render(run_dir, recorded, controller=controller, now=now, outcome=outcome))


def without_controller(run_dir: Path, launched: Launched | None, *, has_jobs: bool) -> str:
    """Return a sentence about a run whose controller has not written a status; empty if it has one, or is no run."""
    from cosmos_rl_core.workers.directory import lock_holder

    written = run_dir / "status.json"
    if written.exists() and (launched is None or written.stat().st_mtime >= launched.at or not has_jobs):
        return ""
    if launched is None:
        holder = lock_holder(run_dir)
        return f"{run_dir}: no controller yet: {holder} starts it" if holder is not None else ""
    if not launched.shares_files:
        return f"{run_dir}: launched on {launched.platform}; its controller writes the status into the run's volume"
    if has_jobs:
        return f"{run_dir}: no controller yet: it starts with its job"
    return f"{run_dir}: launched on {launched.platform}, and ended without a controller: see its launch/*.log"


def is_run(run_dir: Path) -> bool:
    """Return whether a run was ever started in a directory, or launched from it."""
    return any((run_dir / name).exists() for name in ("status.json", "run.lock", "launch/cluster.json"))


def parse(texts: Sequence[str]) -> dict[str, int]:
    """Return the number of workers by role. Raises UserError."""
    from cosmos_rl_core.errors import UserError

    numbers: dict[str, int] = {}
    for text in texts:
        role, _, number = text.partition("=")
        if not number.isdecimal():
            raise UserError(f"{text}: give a role and its number of workers, such as rollout=4")
        if role in numbers:
            raise UserError(f"{text}: {role} is given twice")
        numbers[role] = int(number)
    if not numbers:
        raise UserError("give a role and its number of workers, such as rollout=4")
    return numbers

"""The commands `scale` and `stop`, for a live run. Imports only typer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

CHECK_S = 0.5
Wanted = Annotated[
    list[str], typer.Argument(metavar="ROLE=NUMBER...", help="Number of workers of a role: rollout=4, policy=2.")
]
Run = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")]


def scale(run_dir: Run, wanted: Wanted) -> None:
    """Start or drain workers of a live run, and wait until they are ready or gone; on a cluster, submit their jobs."""
    import asyncio

    from cosmos_rl_core.clusters.launcher import Launched
    from cosmos_rl_core.clusters.operator import operator_of, request_workers

    numbers = parse(wanted)
    if (launched := Launched.of(run_dir)) is not None and launched.alive():
        typer.echo("\n".join(launched.scale(numbers)) or "nothing to change")
        return
    present = asyncio.run(request_workers(operator_of(run_dir), numbers, report=typer.echo))
    typer.echo(f"ready: {', '.join(f'{number} {role}' for role, number in present.items() if number)}")


def stop(
    run_dir: Run,
    *,
    now: Annotated[bool, typer.Option("--now", help="End the processes at once; nothing is saved.")] = False,
) -> None:
    """End a run after the step in work, which is saved; a second time, or with --now, at once."""
    import asyncio
    import time

    from cosmos_rl_core.clusters.launcher import Launched
    from cosmos_rl_core.clusters.local import end_process
    from cosmos_rl_core.clusters.operator import Unreachable, operator_of, request_end
    from cosmos_rl_core.errors import UserError

    launched, refused = Launched.of(run_dir), None
    try:
        asyncio.run(request_end(operator_of(run_dir), now=now, report=typer.echo))
    except UserError as error:  # it has not started, it hangs, or this machine does not reach it
        refused = error
    if launched is not None and launched.alive():
        lines = launched.stop(now=now)
    elif isinstance(refused, Unreachable):
        typer.echo(str(refused), err=True)
        lines = end_process(run_dir, now=now)
    elif refused is not None:
        raise refused
    else:
        lines = []
    for line in lines:
        typer.echo(line)
    while launched is not None and launched.alive():
        time.sleep(CHECK_S)
    typer.echo("the run has ended")


def parse(wanted: Sequence[str]) -> dict[str, int]:
    """Return the number of workers by role. Raises UserError."""
    from cosmos_rl_core.errors import UserError

    numbers: dict[str, int] = {}
    for text in wanted:
        role, _, number = text.partition("=")
        if not number.isdecimal():
            raise UserError(f"{text}: give a role and its number of workers, such as rollout=4")
        if role in numbers:
            raise UserError(f"{text}: {role} is given twice")
        numbers[role] = int(number)
    return numbers

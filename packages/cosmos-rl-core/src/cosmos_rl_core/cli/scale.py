"""The command `scale`: more or fewer workers of a live run. Imports only typer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

CONNECT_TIMEOUT_S = 10.0
Wanted = Annotated[
    list[str], typer.Argument(metavar="ROLE=NUMBER...", help="Number of workers of a role: rollout=4, policy=2.")
]


def scale(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")], wanted: Wanted
) -> None:
    """Start or drain workers of a live run, and wait until they are ready or gone; on a cluster, submit their jobs."""
    import asyncio

    from cosmos_rl_core.clusters.launcher import Launched

    numbers = parse(wanted)
    if (launched := Launched.of(run_dir)) is not None:
        typer.echo("\n".join(launched.scale(numbers)) or "nothing to change")
        return
    present = asyncio.run(_request(run_dir, numbers))
    typer.echo(f"ready: {', '.join(f'{number} {role}' for role, number in present.items() if number)}")


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


async def _request(run_dir: Path, wanted: dict[str, int]) -> dict[str, int]:
    """Send the request to the run's controller, print its progress, return the ready workers. Raises UserError."""
    from cosmos_rl_core.control import protocol as p
    from cosmos_rl_core.control.address_file import NAME as CONTROLLER_FILE
    from cosmos_rl_core.errors import UserError
    from cosmos_rl_core.launch.scaling import OPERATOR
    from cosmos_rl_core.wire.channel import ConnectionClosed, Hello, connect
    from cosmos_rl_core.workers.node import WorkerAddress

    if not (run_dir / CONTROLLER_FILE).exists():
        cause = "the run has not started, or has ended" if run_dir.is_dir() else "there is no such directory"
        raise UserError(f"{run_dir}: {cause} (no {CONTROLLER_FILE} in it)")
    operator = WorkerAddress(role=OPERATOR, name=OPERATOR, run=run_dir).resolved()
    hello = Hello(name=operator.name, role=operator.role)
    try:
        connection = await connect(
            operator.controller,
            token=operator.token(),
            hello=hello,
            decode=p.ToOperator,
            timeout_s=CONNECT_TIMEOUT_S,
        )
    except ConnectionClosed as error:
        raise UserError(f"{run_dir}: its controller does not answer: {error}") from error
    try:
        await connection.send(p.Scale(wanted))
        while isinstance(message := await connection.receive(), p.Progress):
            typer.echo(message.text)
    except ConnectionClosed as error:
        raise UserError(f"{run_dir}: the run has ended, or its controller: {error}") from error
    connection.close()
    if isinstance(message, p.Refused):
        raise UserError(message.reason)
    return message.present

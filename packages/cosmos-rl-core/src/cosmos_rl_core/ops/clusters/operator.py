"""Requests to the controller of a live run: `cosmos-rl scale` and `cosmos-rl stop`.

operator = operator_of(run_dir)
present = asyncio.run(request_workers(operator, {"rollout": 4}, report=print))     # {"policy": 1, "rollout": 4}
asyncio.run(request_end(operator, now=False, report=print))                       # returns when the run has ended
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.address_file import NAME as CONTROLLER_FILE
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.scaling import OPERATOR
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed, Hello, connect
from cosmos_rl_core.workers.node import WorkerAddress

CONNECT_TIMEOUT_S = 10.0


class Unreachable(UserError):
    """The controller of a run does not answer."""


def operator_of(
    run_dir: Path | None, *, controller: str = "", token_file: Path | None = None, tls_file: Path | None = None
) -> WorkerAddress:
    """Return the controller's address and token of a live run, of its directory or as given. Raises UserError."""
    if run_dir is None and not controller:
        raise UserError("give the run's directory, or --controller tcp://host:port")
    if run_dir is not None and not (controller or (run_dir / CONTROLLER_FILE).exists()):
        cause = "the run has not started, or has ended" if run_dir.is_dir() else "there is no such directory"
        raise UserError(f"{run_dir}: {cause} (no {CONTROLLER_FILE} in it)")
    address = WorkerAddress(
        role=OPERATOR, name=OPERATOR, run=run_dir, controller=controller, token_file=token_file, tls_file=tls_file
    )
    return address.resolved()


async def request_workers(
    operator: WorkerAddress, targets: Mapping[str, int], *, report: Callable[[str], None]
) -> Mapping[str, int]:
    """Change the number of workers by role; return the ready ones when they are there or gone.

    report: called with a line for each change. Raises UserError for a number that the run cannot have, and Unreachable.
    """
    connection = await _connect(operator)
    try:
        await connection.send(p.Scale(dict(targets)))
        while isinstance(message := await connection.receive(), p.Progress):
            report(message.text)
    except ConnectionClosed as error:
        raise UserError(f"{operator.controller}: the run has ended, or its controller: {error}") from error
    connection.close()
    if isinstance(message, p.Refused):
        raise UserError(message.reason)
    return message.present


async def request_end(operator: WorkerAddress, *, now: bool, report: Callable[[str], None]) -> None:
    """End the run, after the step in work or at once, and wait until it is over. Raises Unreachable.

    A second request while the first one waits ends the run at once.
    """
    connection = await _connect(operator)
    try:
        await connection.send(p.StopRun(now=now))
        while isinstance(message := await connection.receive(), p.Progress):
            report(message.text)
    except ConnectionClosed:
        return


async def _connect(operator: WorkerAddress) -> Connection:
    hello = Hello(name=operator.name, role=operator.role)
    try:
        return await connect(
            operator.controller,
            token=operator.token(),
            tls=operator.tls(),
            hello=hello,
            decode=p.ToOperator,
            timeout_s=CONNECT_TIMEOUT_S,
        )
    except ConnectionClosed as error:
        raise Unreachable(f"the controller does not answer: {error}") from error

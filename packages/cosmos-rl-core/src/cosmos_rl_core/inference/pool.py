"""The processes of `cosmos-rl generate` and `eval`: start, receive, stop; and the messages.

    pool.add(task, gpus=["0"])
    async with pool:
        async for answer in pool.answers(): ...

    command   --InstanceTask-->               instance      over a socket pair, open as long as the command runs
              <--RowResult, ChildFailed--

An instance ends when its rows are done or its connection closes, also because this process died.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cosmos_rl_core.connected_process import ChildFailed, ConnectedProcess
from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.imports import PYTHON
from cosmos_rl_core.processes import environment
from cosmos_rl_core.wire.frames import ConnectionClosed

MAX_MESSAGE_BYTES = 2**30
"""Maximum size of a message; a task contains all of its rows."""


class PromptRow(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt."""

    sample: int
    """Index in the list, from 0; determines the seed."""
    columns: dict[str, Any]
    origin: str


class InstanceTask(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one instance."""

    name: str
    recipe: dict[str, Any]
    """The resolved recipe, section by section."""
    checkpoint: str
    """Folder or URL of the checkpoint; empty for the weights of the recipe's model."""
    averaged: bool
    """Whether to use the average of the weights, if the checkpoint has one."""
    version: int
    """Number of optimizer steps in those weights."""
    rows: list[PromptRow]
    num_samples: int
    """Rollouts per row."""
    rows_at_once: int | None
    """Rows in work at the same time; None: 1 if rollouts are media, `TEXTS_AT_ONCE` if they are text."""
    scored: bool
    """Whether to compute the rewards of [reward]."""
    media: str
    """Folder for images and videos; empty: none are written."""
    threads: int
    """CPU threads for tensor work."""


class RowResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The result of one row."""

    sample: int
    lines: list[dict[str, Any]]
    """One line per rollout, or a single one with `error`."""


Reply = RowResult | ChildFailed


LEAVE_S = 10.0
"""Maximum seconds for an instance to close its engine after its connection was closed."""


@dataclass(slots=True)
class Pool:
    """The instances of one command, one per task."""

    logs: Path
    """Folder for their output."""
    python_path: tuple[str, ...] = ()
    """Folders for a recipe's "module:attribute" names."""
    tasks: list[InstanceTask] = field(default_factory=list)
    _gpus: list[Sequence[str]] = field(default_factory=list)
    """GPUs visible to each instance."""
    _instances: list[ConnectedProcess] = field(default_factory=list)

    def add(self, task: InstanceTask, *, gpus: Sequence[str]) -> None:
        """Add an instance, with these GPUs visible."""
        self.tasks.append(task)
        self._gpus.append(gpus)

    async def __aenter__(self) -> Pool:
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            for task, gpus in zip(self.tasks, self._gpus, strict=True):
                instance = ConnectedProcess(
                    [*PYTHON, "-m", "cosmos_rl_core.inference.worker"],
                    name=task.name,
                    environment=environment(self.python_path, threads=task.threads, gpus=gpus),
                    log=self._log(task),
                )
                self._instances.append(instance)
                await instance.open(decode=Reply, max_frame_bytes=MAX_MESSAGE_BYTES)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def answers(self) -> AsyncGenerator[RowResult, None]:
        """Yield answers as they arrive. Raises UserError or WorkerFailed with the failure of an instance."""
        received: asyncio.Queue[RowResult | BaseException | None] = asyncio.Queue()

        async def listen(task: InstanceTask, instance: ConnectedProcess) -> None:
            try:
                await self._serve(task, instance, received)
                received.put_nowait(None)
            except (UserError, WorkerFailed) as error:
                received.put_nowait(error)

        serving = zip(self.tasks, self._instances, strict=True)
        listeners = [asyncio.create_task(listen(task, instance)) for task, instance in serving]
        working = len(listeners)
        try:
            while working:
                match await received.get():
                    case None:
                        working -= 1
                    case RowResult() as answer:
                        yield answer
                    case error:
                        raise error
        finally:
            for listener in listeners:
                listener.cancel()
            await asyncio.gather(*listeners, return_exceptions=True)

    async def _serve(
        self, task: InstanceTask, instance: ConnectedProcess, received: asyncio.Queue[RowResult | BaseException | None]
    ) -> None:
        """Send an instance its task and queue its answers, until it ends."""
        num_left = len(task.rows)
        try:
            await instance.connection.send(task)
            while True:
                reply: Reply = await instance.connection.receive()
                if isinstance(reply, ChildFailed):
                    where = f"{task.name}: {reply.reason}"
                    raise UserError(where) if reply.user else WorkerFailed(f"{where}. See {self._log(task)}")
                received.put_nowait(reply)
                num_left -= 1
        except ConnectionClosed:
            status = await instance.close(grace_s=LEAVE_S)
        if num_left or instance.process.exit_code:
            raise WorkerFailed(
                f"{instance.died(status)}, {num_left} rows are left. The end of {self._log(task)}:\n"
                f"{instance.last_output}"
            )

    def _log(self, task: InstanceTask) -> Path:
        return self.logs / f"{task.name}.log"

    async def _stop(self) -> None:
        """Close the connections, wait, and kill the instances that do not end, with all their children."""
        await asyncio.gather(*(instance.close(grace_s=LEAVE_S) for instance in self._instances))

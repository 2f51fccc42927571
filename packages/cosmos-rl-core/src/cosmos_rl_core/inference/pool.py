"""The processes of `cosmos-rl generate` and `eval`: start, receive, stop; and the messages.

    pool.add(task, gpus=["0"])
    async with pool:
        async for answer in pool.answers(): ...

    command   --Task-->               instance      over a socket pair, open as long as the command runs
              <--Answer, Failed--

An instance ends when its rows are done or its connection closes, also because this process died.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.imports import PYTHON
from cosmos_rl_core.processes import ChildProcess, all_ended, environment, last_lines
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed, adopt

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


class InstanceFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The instance failed."""

    message: str
    user: bool
    """True: an error that the user can fix."""


Reply = RowResult | InstanceFailed


LEAVE_S = 10.0
"""Maximum seconds for an instance to close its engine after its connection was closed."""


@dataclass(frozen=True, slots=True)
class _Instance:
    """One process and its task."""

    task: InstanceTask
    process: ChildProcess
    connection: Connection


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
    _instances: list[_Instance] = field(default_factory=list)

    def add(self, task: InstanceTask, *, gpus: Sequence[str]) -> None:
        """Add an instance, with these GPUs visible."""
        self.tasks.append(task)
        self._gpus.append(gpus)

    async def __aenter__(self) -> Pool:
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            for task, gpus in zip(self.tasks, self._gpus, strict=True):
                self._instances.append(await self._start(task, gpus))
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def answers(self) -> AsyncGenerator[RowResult, None]:
        """Yield answers as they arrive. Raises UserError or WorkerFailed with the failure of an instance."""
        received: asyncio.Queue[RowResult | BaseException | None] = asyncio.Queue()

        async def listen(instance: _Instance) -> None:
            try:
                await self._serve(instance, received)
                received.put_nowait(None)
            except (UserError, WorkerFailed) as error:
                received.put_nowait(error)

        listeners = [asyncio.create_task(listen(instance)) for instance in self._instances]
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

    async def _serve(self, instance: _Instance, received: asyncio.Queue[RowResult | BaseException | None]) -> None:
        """Send an instance its task and queue its answers, until it ends."""
        name, num_left = instance.task.name, len(instance.task.rows)
        try:
            await instance.connection.send(instance.task)
            while True:
                reply: Reply = await instance.connection.receive()
                if isinstance(reply, InstanceFailed):
                    where = f"{name}: {reply.message}"
                    raise UserError(where) if reply.user else WorkerFailed(f"{where}. See {self._log(name)}")
                received.put_nowait(reply)
                num_left -= 1
        except ConnectionClosed:
            status = await instance.process.ended()
        if instance.process.exit_code or num_left:
            log = self._log(name)
            raise WorkerFailed(
                f"{name} died ({status}), {num_left} rows are left. The end of {log}:\n{last_lines(log)}"
            )

    async def _start(self, task: InstanceTask, gpus: Sequence[str]) -> _Instance:
        with self._log(task.name).open("wb") as log:
            process, ours = ChildProcess.connected(
                [*PYTHON, "-m", "cosmos_rl_core.inference.worker"],
                environment=environment(self.python_path, threads=task.threads, gpus=gpus),
                output=log,
            )
        connection = await adopt(ours, decode=Reply, name=task.name, max_frame_bytes=MAX_MESSAGE_BYTES)
        return _Instance(task, process, connection)

    def _log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    async def _stop(self) -> None:
        """Close the connections, wait, and kill the instances that do not end, with all their children."""
        processes = [instance.process for instance in self._instances]
        for instance in self._instances:
            instance.connection.close()
        try:
            await all_ended(processes, timeout_s=LEAVE_S)
        finally:  # a second Ctrl-C does not wait
            for process in processes:
                if process.exit_code is None:
                    process.kill()
            await all_ended(processes)

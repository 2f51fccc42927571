"""The processes of `cosmos-rl generate` and `eval`: start, receive, stop; and the messages.

    await Pool(file=file, logs=logs, python_path=(), say=print).run([(task, ["0"])])

    command   --InstanceTask-->               instance      over a socket pair, open as long as the command runs
              <--RowResult, ChildFailed--

An instance ends when its rows are done or its connection closes, also because this process died.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cosmos_rl_core.connected_process import ChildFailed, ConnectedProcess
from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.imports import PYTHON
from cosmos_rl_core.inference.rollouts_file import RolloutsFile
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
PROGRESS_S = 5.0
"""Seconds between progress messages."""


@dataclass(slots=True, kw_only=True)
class Pool:
    """The instances of one command, one per task."""

    file: RolloutsFile
    logs: Path
    """Folder for their output."""
    python_path: Sequence[str]
    """Folders for a recipe's "module:attribute" names."""
    say: Callable[[str], None]
    """For progress messages."""
    _num_done: int = 0
    _reported_at: float = 0.0

    async def run(self, tasks: Sequence[tuple[InstanceTask, Sequence[str]]]) -> None:
        """Write the results of all tasks, each with the GPUs that its instance sees, as they arrive.

        All instances have ended afterwards. Raises UserError or WorkerFailed with the failure of an instance.
        """
        num_rows = sum(len(task.rows) for task, _ in tasks)
        self.say(f"rows: {num_rows}, processes: {len(tasks)}")
        self._reported_at = time.monotonic()
        self.logs.mkdir(parents=True, exist_ok=True)
        instances: list[ConnectedProcess] = []
        serving: list[asyncio.Task[None]] = []
        try:
            for task, gpus in tasks:
                instances.append(self._start(task, gpus))
                serving.append(asyncio.create_task(self._serve(task, instances[-1], num_rows)))
            await asyncio.gather(*serving)
        finally:
            for one in serving:
                one.cancel()
            try:
                await asyncio.gather(*serving, return_exceptions=True)
            finally:  # a second Ctrl-C cancels the wait, and `close` then kills them at once
                await asyncio.gather(*(instance.close(grace_s=LEAVE_S) for instance in instances))

    def _start(self, task: InstanceTask, gpus: Sequence[str]) -> ConnectedProcess:
        return ConnectedProcess(
            [*PYTHON, "-m", "cosmos_rl_core.inference.worker"],
            name=task.name,
            environment=environment(self.python_path, threads=task.threads, gpus=gpus),
            log=self.logs / f"{task.name}.log",
        )

    async def _serve(self, task: InstanceTask, instance: ConnectedProcess, num_rows: int) -> None:
        """Send an instance its task and write its results, until it ends."""
        num_left, log = len(task.rows), self.logs / f"{task.name}.log"
        try:
            connection = await instance.open(decode=Reply, max_frame_bytes=MAX_MESSAGE_BYTES)
            await connection.send(task)
            while True:
                reply: Reply = await connection.receive()
                if isinstance(reply, ChildFailed):
                    failed = f"{task.name}: {reply.reason}"
                    raise UserError(failed) if reply.user else WorkerFailed(f"{failed}. See {log}")
                self._add(reply, num_rows)
                num_left -= 1
        except ConnectionClosed:
            status = await instance.close(grace_s=LEAVE_S)
        if num_left or instance.process.exit_code:
            reason = f"{instance.died(status)}, {num_left} rows are left"
            raise WorkerFailed(f"{reason}. The end of {log}:\n{instance.last_output}")

    def _add(self, result: RowResult, num_rows: int) -> None:
        self.file.add(result.lines)
        self._num_done += 1
        if time.monotonic() - self._reported_at > PROGRESS_S:
            self.say(f"{self._num_done} of {num_rows} rows")
            self._reported_at = time.monotonic()

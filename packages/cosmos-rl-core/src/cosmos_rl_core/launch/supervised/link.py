"""The connection between the launcher of `cosmos-rl run` and its controller, which may be replaced.

launcher   --ControllerTask-->                                    in a file, when it starts a controller
           <--TakesSignals, StartWorkers, KillWorkers, ForgetWorker--
           --ProcessEnd-->                                        of a worker

A worker's end is in the task of a controller, or is sent to it, until a controller has started the worker again or has
forgotten it. So a later controller gets what a dead one has not dealt with.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.supervisor import ProcessEnd, ProcessSpec
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed, adopt

CRASHED = 70
"""Exit code of a controller that ended with an unexpected exception: EX_SOFTWARE of sysexits.h."""


class ControllerTask(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a controller shall control, and what there is of it."""

    command: tuple[str, ...]
    """The user's command line."""
    recipe: dict[str, Any]
    python_path: tuple[str, ...]
    notes: tuple[str, ...]
    directory: str
    directory_notes: tuple[str, ...]
    is_orphaned: bool
    """Whether an earlier controller has died."""
    lock: int
    """Inherited descriptor of the directory's lock."""
    resume: str | None
    overwrite: bool
    launcher: int
    """Process of the launcher."""
    interrupted: bool
    """Whether the user has interrupted an earlier controller."""
    can_restart: bool
    """Whether another controller would follow this one."""
    began: bool
    """Whether any worker was ever started."""
    workers: tuple[ProcessSpec, ...]
    """The oldest first, including those that have ended and were not forgotten."""
    ended: tuple[ProcessEnd, ...]


class TakesSignals(msgspec.Struct, frozen=True, tag=True):
    """The controller handles signals."""


class InterruptNext(msgspec.Struct, frozen=True, tag=True):
    """Interrupt a later controller of this run as well."""


class StartWorkers(msgspec.Struct, frozen=True, tag=True):
    """Start these workers, all or none if the controller dies meanwhile."""

    workers: tuple[ProcessSpec, ...]


class KillWorkers(msgspec.Struct, frozen=True, tag=True):
    names: tuple[str, ...]


class ForgetWorker(msgspec.Struct, frozen=True, tag=True):
    name: str


Request = TakesSignals | InterruptNext | StartWorkers | KillWorkers | ForgetWorker


@dataclass(slots=True)
class LauncherLink:
    """A controller's side. For `local.LocalWorkers` it takes the place of a `ProcessSupervisor`."""

    task: ControllerTask
    socket: socket.socket
    _connection: Connection = field(init=False)

    async def open(self) -> None:
        """Connect to the launcher, in the event loop of the run; other methods need it."""
        self._connection = await adopt(self.socket, decode=ProcessEnd, name="launcher")

    def ready(self) -> None:
        """Let the launcher pass signals on."""
        self._connection.post(TakesSignals())

    def start(self, specs: Sequence[ProcessSpec]) -> None:
        self._connection.post(StartWorkers(tuple(specs)))

    def kill(self, names: Collection[str]) -> None:
        self._connection.post(KillWorkers(tuple(names)))

    def forget(self, name: str) -> None:
        self._connection.post(ForgetWorker(name))

    async def next_end(self) -> ProcessEnd:
        return await self._connection.receive()

    def interrupt_next(self) -> None:
        with contextlib.suppress(ConnectionClosed):  # the launcher has ended
            self._connection.post(InterruptNext())

    def crash_at(self, error: Exception) -> None:
        """End this process at once after an unexpected error, so that the next controller continues with the workers.

        Return for errors that a restart would repeat, and if no other controller would follow.
        """
        if self.task.can_restart and not isinstance(error, UserError | WorkerFailed | OSError):
            traceback.print_exception(error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(CRASHED)

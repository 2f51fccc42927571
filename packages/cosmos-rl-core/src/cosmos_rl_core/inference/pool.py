"""The processes of `cosmos-rl generate` and `eval`: started, heard, stopped.

    pool.add(task, gpus=["0"])
    async with pool:
        async for answer in pool.answers(): ...

An instance ends when its rows are done or its standard input is closed, which also happens when this process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.inference.messages import LINE_BYTES, Answer, Failed, Reply, Task
from cosmos_rl_core.launch.local import last_lines
from cosmos_rl_core.python_path import PYTHON, child_environment
from cosmos_rl_core.workers.gpus import VISIBLE

LEAVE_S = 10.0
"""Longest that an instance may take to put its engine away once it was told to stop."""


@dataclass(slots=True)
class Pool:
    """Instances of one command, one a task."""

    logs: Path
    """Folder for what they print."""
    python_path: tuple[str, ...] = ()
    """Folders a recipe's "module:attribute" names are looked up in."""
    tasks: list[Task] = field(default_factory=list)
    _gpus: list[Sequence[str]] = field(default_factory=list)
    """Those that each instance sees."""
    _processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    def add(self, task: Task, *, gpus: Sequence[str]) -> None:
        """Plan one more instance, which will see these GPUs."""
        self.tasks.append(task)
        self._gpus.append(gpus)

    async def __aenter__(self) -> Pool:
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            for task, gpus in zip(self.tasks, self._gpus, strict=True):
                self._processes.append(await self._start(task, gpus))
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def answers(self) -> AsyncGenerator[Answer, None]:
        """Yield answers as they come. Raises UserError or WorkerFailed with what an instance failed of."""
        heard: asyncio.Queue[Answer | BaseException | None] = asyncio.Queue()

        async def listen(task: Task, process: asyncio.subprocess.Process) -> None:
            try:
                await self._talk(task, process, heard)
                heard.put_nowait(None)
            except (UserError, WorkerFailed) as error:
                heard.put_nowait(error)

        listeners = [asyncio.create_task(listen(*pair)) for pair in zip(self.tasks, self._processes)]
        working = len(listeners)
        try:
            while working:
                match await heard.get():
                    case None:
                        working -= 1
                    case Answer() as answer:
                        yield answer
                    case error:
                        raise error
        finally:
            for listener in listeners:
                listener.cancel()
            await asyncio.gather(*listeners, return_exceptions=True)

    async def _talk(
        self, task: Task, process: asyncio.subprocess.Process, heard: asyncio.Queue[Answer | BaseException | None]
    ) -> None:
        """Give an instance its task and pass on its answers, until it ends."""
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(ConnectionError):  # it has ended; its exit says why
            process.stdin.write(msgspec.json.encode(task) + b"\n")
            await process.stdin.drain()
        async for line in process.stdout:
            reply = msgspec.json.decode(line, type=Reply)
            if isinstance(reply, Failed):
                where = f"{task.name}: {reply.message}"
                raise UserError(where) if reply.user else WorkerFailed(f"{where}. See {self._log(task)}")
            heard.put_nowait(reply)
        if code := await process.wait():
            status = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            log = self._log(task)
            raise WorkerFailed(f"{task.name} died ({status}). The end of {log}:\n{last_lines(log)}")

    async def _start(self, task: Task, gpus: Sequence[str]) -> asyncio.subprocess.Process:
        environment = {
            **os.environ,
            **child_environment(self.python_path),
            "OMP_NUM_THREADS": str(task.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONUNBUFFERED": "1",
        }
        if gpus:
            environment[VISIBLE] = ",".join(gpus)
        with self._log(task).open("wb") as log:
            return await asyncio.create_subprocess_exec(
                *(*PYTHON, "-m", "cosmos_rl_core.inference.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                limit=LINE_BYTES,
                start_new_session=True,  # Ctrl-C in the terminal is for the command, which decides who stops
            )

    def _log(self, task: Task) -> Path:
        return self.logs / f"{task.name}.log"

    async def _stop(self) -> None:
        """Close the inputs, wait, and end what does not leave, with all that it has started."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        waiting = [asyncio.create_task(process.wait()) for process in self._processes]
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.gather(*waiting)), LEAVE_S)
        except TimeoutError:
            pass
        finally:  # a second Ctrl-C does not wait
            for process in self._processes:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
            await asyncio.gather(*waiting)

"""One worker process as the server sees it: start, ask, kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.python_path import child_environment
from cosmos_rl_core.reward.service.frames import Answer, Ask, ChannelClosed, Refused, ServerEnd
from cosmos_rl_core.reward.service.settings import ServedReward

SECRETS = ("WFM_REWARD_TOKEN", "REMOTE_REWARD_TOKEN")
"""Variables that are the server's business and not its rewards'."""

_LAST_MOMENTS_S = 2.0


class WorkerDied(Exception):
    """The process has ended, or was killed because it took too long. Says how."""


class WorkerProcess:
    """A process that has built its reward.

    process = await WorkerProcess.start(settings, python_path=())
    answer = await process.ask(ask, descriptors)                    # WorkerDied
    await process.ended.wait()
    """

    def __init__(self, process: asyncio.subprocess.Process, end: ServerEnd, *, timeout_s: float) -> None:
        self._process = process
        self._end = end
        self._timeout_s = timeout_s
        self.ended = asyncio.Event()
        self._watcher = asyncio.create_task(self._watch())

    @staticmethod
    async def start(settings: ServedReward, *, python_path: Sequence[str] = ()) -> WorkerProcess:
        """Start one and wait until its reward is built.

        Raises UserError where the reward refuses, and WorkerDied where the process ends or takes too long.
        """
        process = await _spawn(settings, python_path)
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                first = await process._end.receive()
        except (ChannelClosed, TimeoutError) as error:
            timed_out = isinstance(error, TimeoutError)
            why = f"took longer than start_timeout_s = {settings.start_timeout_s:g}" if timed_out else "ended"
            how = await (process.kill() if timed_out else process.end())
            raise WorkerDied(f"the worker {why} while it was building the reward ({how})") from error
        except asyncio.CancelledError:
            await process.kill()
            raise
        if isinstance(first, Refused):
            await process.kill()
            raise UserError(f"[[rewards]] {settings.name}: {first.reason}")
        return process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, ask: Ask, descriptors: Sequence[int]) -> Answer:
        """Return the worker's answer. Raises WorkerDied; a worker that takes longer than `timeout_s` is killed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._end.ask(ask, descriptors)
                answer = await self._end.receive()
        except TimeoutError as error:
            await self.kill()
            raise WorkerDied(f"the worker took longer than timeout_s = {self._timeout_s:g} and was killed") from error
        except ChannelClosed as error:
            raise WorkerDied(f"the worker died ({await self.end()})") from error
        if not isinstance(answer, Answer) or len(answer.results) != len(ask.items):
            await self.kill()
            raise WorkerDied("the worker answered out of turn and was killed")
        return answer

    async def end(self) -> str:
        """Let a process that closed its end come to its own, and return how; kill it where it does not."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_MOMENTS_S):
                await self.ended.wait()
        return await self.kill()

    async def kill(self) -> str:
        """End the process, and what it has started, and return how it ended: "exit code 1" or "signal SIGKILL"."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # Popen.kill would reap it before its watcher does
        await self.ended.wait()
        self._end.close()
        code = self._process.returncode
        assert code is not None
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def _watch(self) -> None:
        await self._process.wait()
        self.ended.set()


async def _spawn(settings: ServedReward, python_path: Sequence[str]) -> WorkerProcess:
    python = settings.python or sys.executable
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, "-P", "-m", "cosmos_rl_core.reward.service.worker", "--descriptor", str(theirs.fileno())),
                *("--name", settings.name, "--label", settings.called, "--options", json.dumps(settings.options)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # what a reward prints stands with the server's messages
                env=_environment(settings.env, python_path),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in the terminal is for the server
            )
        except OSError as error:
            ours.close()
            raise UserError(f"[[rewards]] {settings.name}: cannot run {python}: {error.strerror}") from error
    return WorkerProcess(process, ServerEnd(ours), timeout_s=settings.timeout_s)


def _environment(own: Mapping[str, str], python_path: Sequence[str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in SECRETS}
    return {**kept, **child_environment(python_path), "PYTHONUNBUFFERED": "1", **own}

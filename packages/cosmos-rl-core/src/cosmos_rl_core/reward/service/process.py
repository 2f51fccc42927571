"""The server's side of a worker process: start, send requests, kill."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.processes import GRACE_S, ChildProcess, all_ended, environment
from cosmos_rl_core.reward.service.messages import Answer, Ask, Build, FromWorker, Refused, send_descriptors
from cosmos_rl_core.reward.service.settings import ServedReward
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed, adopt

SECRETS = ("WFM_REWARD_TOKEN", "REMOTE_REWARD_TOKEN")
"""Environment variables of the server that rewards must not see."""


class WorkerDied(Exception):
    """The process ended, or was killed after a timeout. The message is its exit status."""


class WorkerProcess:
    """A worker process with its reward built.

    worker = await WorkerProcess.start(settings, python_path=())
    answer = await worker.ask(ask, descriptors)                    # WorkerDied
    status = await worker.process.ended()
    """

    def __init__(self, process: ChildProcess, connection: Connection, pair: socket.socket, *, timeout_s: float) -> None:
        self.process = process
        self._connection = connection
        self._socket = pair
        self._timeout_s = timeout_s

    @staticmethod
    async def start(settings: ServedReward, *, python_path: Sequence[str] = ()) -> WorkerProcess:
        """Start a process and wait until its reward is built.

        Raises UserError if the reward cannot be built, and WorkerDied if the process ends or takes too long.
        """
        worker = await _spawn(settings, python_path)
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                build = Build(name=settings.name, label=settings.called, options=settings.options)
                await worker._connection.send(build)
                first: FromWorker = await worker._connection.receive()
        except (ConnectionClosed, TimeoutError) as error:
            timed_out = isinstance(error, TimeoutError)
            why = f"took longer than start_timeout_s = {settings.start_timeout_s:g}" if timed_out else "ended"
            how = await (worker.kill() if timed_out else worker.end())
            raise WorkerDied(f"the worker {why} while it was building the reward ({how})") from error
        except asyncio.CancelledError:
            await worker.kill()
            raise
        if isinstance(first, Refused):
            await worker.kill()
            raise UserError(f"[[rewards]] {settings.name}: {first.reason}")
        return worker

    async def ask(self, ask: Ask, descriptors: Sequence[int]) -> Answer:
        """Return the worker's answer. Raises WorkerDied; a worker that takes longer than `timeout_s` is killed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                send_descriptors(self._socket, descriptors)  # nothing else is in flight, so the buffer has room
                await self._connection.send(ask)
                answer: FromWorker = await self._connection.receive()
        except TimeoutError as error:
            await self.kill()
            raise WorkerDied(f"the worker took longer than timeout_s = {self._timeout_s:g} and was killed") from error
        except (ConnectionClosed, OSError) as error:
            raise WorkerDied(f"the worker died ({await self.end()})") from error
        if not isinstance(answer, Answer) or len(answer.results) != len(ask.items):
            await self.kill()
            raise WorkerDied("the worker answered out of turn and was killed")
        return answer

    async def end(self) -> str:
        """Wait for a process that closed its socket and return its exit status; kill it if it does not end."""
        await all_ended([self.process], timeout_s=GRACE_S)
        return await self.kill()

    async def kill(self) -> str:
        """Kill the process and its children, and return its exit status: "exit code 1" or "signal SIGKILL"."""
        self.process.kill()
        self._connection.close()
        return await self.process.ended()


async def _spawn(settings: ServedReward, python_path: Sequence[str]) -> WorkerProcess:
    python = settings.python or sys.executable
    variables = {name: value for name, value in environment(python_path).items() if name not in SECRETS}
    try:
        process, ours = ChildProcess.connected(
            [python, "-P", "-m", "cosmos_rl_core.reward.service.worker"],
            environment={**variables, **settings.env},
            output=2,  # a reward's output is written to the server's stderr
        )
    except OSError as error:
        raise UserError(f"[[rewards]] {settings.name}: cannot run {python}: {error.strerror}") from error
    connection = await adopt(ours, decode=FromWorker, name=settings.called)
    return WorkerProcess(process, connection, ours, timeout_s=settings.timeout_s)

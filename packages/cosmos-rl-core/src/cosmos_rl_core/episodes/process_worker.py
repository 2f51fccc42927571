"""The process that plays episodes for another one: imports beside the environment msgspec and numpy.

parent -> process   BuildEnvironment
process -> parent   EnvironmentBuilt, or ChildFailed and the end
parent -> process   EnvironmentCall, many at once, of an episode one after the other; but `close` at any time
process -> parent   EnvironmentAnswer, in any order
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import socket
import sys
from contextlib import suppress
from functools import partial

from cosmos_rl_core.connected_process import ChildFailed
from cosmos_rl_core.episodes.build import Environments, environments_of
from cosmos_rl_core.episodes.interfaces import Environment
from cosmos_rl_core.episodes.process import (
    EnvironmentAnswer,
    EnvironmentBuilt,
    EnvironmentCall,
    ToEnvironments,
    decode_turn,
)
from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.processes import GRACE_S, end_with, inherited_socket
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed, adopt

MAX_ERROR_CHARS = 2000


class EpisodeWorker:
    """Answers calls, each in a task of its own."""

    def __init__(self, environments: Environments, connection: Connection) -> None:
        self._environments, self._connection = environments, connection
        self._episodes: dict[int, Environment] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Of each episode, its call in work."""

    async def run(self) -> None:
        """Answer until the parent closes the connection."""
        while True:
            call = await self._connection.receive()
            before = self._tasks.get(call.episode)
            task = asyncio.create_task(self._answer(call, before))
            self._tasks[call.episode] = task
            task.add_done_callback(partial(self._forget, call.episode))

    def _forget(self, episode: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(episode) is task:
            del self._tasks[episode]

    async def _answer(self, call: EnvironmentCall, before: asyncio.Task[None] | None) -> None:
        """before: the episode's call in work, if it has not ended: its caller has given it up."""
        if before is not None:
            if not self._environments.has_plain_methods:  # nothing but the parent's deadline ends a plain function
                before.cancel()
            await asyncio.wait([before])
        try:
            await self._connection.send(await self._called(call))
        except ConnectionClosed:
            return
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # user code may raise anything
            is_final = isinstance(error, SampleError) and error.final
            raised = f"{self._environments.label}.{call.method} raised {type(error).__name__}: {error}"[
                :MAX_ERROR_CHARS
            ]
            await self._connection.send(EnvironmentAnswer(call=call.call, error=raised, is_final=is_final))

    async def _called(self, call: EnvironmentCall) -> EnvironmentAnswer:
        if call.method == "reset":
            environment = self._episodes[call.episode] = self._environments.make()
            observation = await environment.reset(call.row)
            tools = [dict(tool) for tool in environment.tools]
            return EnvironmentAnswer(call=call.call, observation=observation, tools=tools)
        if call.method == "step":
            observation = await self._episodes[call.episode].step(call.said, decode_turn(call.turn))
            return EnvironmentAnswer(call=call.call, observation=observation)
        if (environment := self._episodes.pop(call.episode, None)) is not None:
            await environment.close()
        return EnvironmentAnswer(call=call.call)


def _end_if_stuck(loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
    """End this process if its event loop stands still, also in C code that keeps Python's lock, without a parent."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    loop.call_later(limit_s / 4, _end_if_stuck, loop, limit_s)


async def _serve(inherited: socket.socket) -> int:
    parent = await adopt(inherited, decode=ToEnvironments, name="the parent")
    build = await parent.receive()
    try:
        environments = environments_of(build.target, build.options)
    except UserError as error:
        await parent.send(ChildFailed(reason=str(error), user=True))
        return 2
    await parent.send(EnvironmentBuilt())
    _end_if_stuck(asyncio.get_running_loop(), build.timeout_s + 2 * GRACE_S)
    with suppress(ConnectionClosed):
        await EpisodeWorker(environments, parent).run()
    return 0


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach all processes of the terminal; the parent decides
        signal.signal(number, signal.SIG_IGN)
    inherited = inherited_socket()
    end_with(inherited)
    sys.exit(asyncio.run(_serve(inherited)))

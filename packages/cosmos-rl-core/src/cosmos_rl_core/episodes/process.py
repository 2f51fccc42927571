"""Environments in a process of another interpreter, which plays many episodes at once and is replaced when it ends.

    ProcessEnvironment.step --EnvironmentCall--> the process --> Environment.step, in its event loop or a thread
                            <--EnvironmentAnswer--      |
                                                        +-- dies, or is killed after timeout_s: each of its episodes
                                                            raises ProcessDied; the next episode starts another process

The interpreter needs numpy and msgspec. Packages of ours are loaded from where they are here, and nothing that is
installed beside them, so that the other environment keeps its own versions.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from itertools import count
from typing import Any, Literal

import msgspec
import numpy as np

from cosmos_rl_core.connected_process import ChildFailed, ConnectedProcess, ProcessDied, TimeLimit
from cosmos_rl_core.episodes.interfaces import Environment, Observation
from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.imports import PACKAGES
from cosmos_rl_core.processes import GRACE_S, environment
from cosmos_rl_core.types import ToolCall, Turn
from cosmos_rl_core.wire.channel import ConnectionClosed

START_S = 300.0
"""Maximum seconds until a process has imported the class and built it."""
_BEGIN = """\
import sys
from importlib.util import module_from_spec, spec_from_file_location
for argument in sys.argv[1:-1]:
    name, _, file = argument.partition("=")
    spec = spec_from_file_location(name, file)
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
from cosmos_rl_core.episodes.process_worker import main
main()
"""
"""Loads packages of ours, given as NAME=FILE: their folder on the path would offer all that is installed in it."""
_PACKAGES = {name.replace("-", "_") for name in PACKAGES}
_ARRAYS = {"terms": np.int32, "logprobs": np.float32, "versions": np.int32}
"""Those of a turn."""


Method = Literal["reset", "step", "close"]


class BuildEnvironment(msgspec.Struct, frozen=True, tag=True):
    """The first message to the process."""

    target: str
    """The class, as "module:attribute"."""
    options: dict[str, Any]
    timeout_s: float


class EnvironmentBuilt(msgspec.Struct, frozen=True, tag=True):
    """The class can be built with its options."""


class EnvironmentCall(msgspec.Struct, frozen=True, tag=True):
    """A call of a method of an episode's environment."""

    call: int
    episode: int
    method: Method
    row: dict[str, Any] = {}
    said: str = ""
    turn: dict[str, Any] = {}
    """As of `encode_turn`."""


class EnvironmentAnswer(msgspec.Struct, frozen=True, tag=True):
    """The end of a call."""

    call: int
    observation: Observation | None = None
    tools: list[dict[str, Any]] = []
    """The environment's, after `reset`."""
    error: str = ""
    """Raised by the method."""
    is_final: bool = False
    """Whether the episode would fail again."""


ToEnvironments = BuildEnvironment | EnvironmentCall
FromEnvironments = EnvironmentBuilt | EnvironmentAnswer | ChildFailed


def encode_turn(turn: Turn) -> dict[str, Any]:
    """Return a turn's fields, its arrays as bytes."""
    arrays = {name: getattr(turn, name).astype(kind).tobytes() for name, kind in _ARRAYS.items()}
    return {field.name: getattr(turn, field.name) for field in fields(turn)} | arrays


def decode_turn(encoded: Mapping[str, Any]) -> Turn:
    """Return the turn of `encode_turn`."""
    arrays = {name: np.frombuffer(encoded[name], kind) for name, kind in _ARRAYS.items()}
    calls = tuple(ToolCall(**call) for call in encoded["calls"])
    return Turn(**{**encoded, **arrays, "calls": calls})


class EnvironmentHost:
    """Starts the process of environments when an episode needs one."""

    def __init__(self, build: BuildEnvironment, *, python: str, label: str) -> None:
        """python: the interpreter. label: the environment's name, for messages."""
        self._build, self._python, self._label = build, python, label
        self._numbers = count()
        self._starting: asyncio.Task[_Process] | None = None
        """Of the newest process. It goes on when the episodes that wait for it are given up."""

    def make(self) -> Environment:
        """Return the environment of an episode."""
        return ProcessEnvironment(self, next(self._numbers))

    async def started(self) -> _Process:
        """Return the process, once it has built the environment. Raises UserError where it cannot, and ProcessDied."""
        last = self._starting
        if last is None or (last.done() and (last.exception() is not None or last.result().death is not None)):
            last = self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(last)

    async def close(self) -> None:
        """End the process."""
        if self._starting is not None:
            self._starting.cancel()
            (process,) = await asyncio.gather(self._starting, return_exceptions=True)
            if isinstance(process, _Process):
                await process.close()

    async def _start(self) -> _Process:
        names = ["cosmos_rl_core", *{self._build.target.partition(".")[0]} & _PACKAGES]
        packages = [f"{name}={_file_of(name)}" for name in dict.fromkeys(names)]
        variables = {name: value for name, value in environment().items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        process = ConnectedProcess(
            [self._python, "-P", "-c", _BEGIN, *packages],
            name=f"the process of environment {self._label}",
            environment=variables,
        )
        await process.open(decode=FromEnvironments)
        try:
            await process.ask(self._build, limit=TimeLimit("the limit for its start", START_S))
        except ProcessDied as death:
            raise await asyncio.to_thread(_cause, self._python, death) from death
        return _Process(process, timeout_s=self._build.timeout_s)


def _file_of(package: str) -> str:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(f"package {package} is not installed")
    return spec.origin


def _cause(python: str, death: ProcessDied) -> UserError | ProcessDied:
    """Return why an interpreter's process has died at its start."""
    command = [
        python,
        "-P",
        "-c",
        "import msgspec, numpy, sys; assert sys.version_info >= (3, 11), 'below Python 3.11'",
    ]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    if tried.returncode == 0:
        return death
    last_line = tried.stderr.strip().rpartition("\n")[2]
    return UserError(
        f"[environment] python = {python!r} cannot run environments ({last_line}): "
        f"{python} -m pip install numpy msgspec"
    )


class _Process:
    """A started process with its calls in flight. It dies once."""

    def __init__(self, process: ConnectedProcess, *, timeout_s: float) -> None:
        self.death: ProcessDied | None = None
        """Raised by all calls, once it has ended."""
        self._process, self._limit = process, TimeLimit("timeout_s", timeout_s)
        self._numbers = count()
        self._calls: dict[int, tuple[asyncio.Future[EnvironmentAnswer], asyncio.TimerHandle]] = {}
        self._reading = asyncio.create_task(self._read(), name=process.name)

    @property
    def pid(self) -> int:
        return self._process.process.pid

    async def call(
        self, episode: int, method: Literal["reset", "step", "close"], **arguments: Any
    ) -> EnvironmentAnswer:
        """Return the answer. Raises ProcessDied, and the method's error as SampleError.

        A call that is cancelled goes on in the process; the deadline remains.
        """
        if self.death is not None:
            raise self.death
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        answered = loop.create_future()
        deadline = loop.call_later(self._limit.seconds + GRACE_S, self._kill)
        self._calls[number] = answered, deadline
        try:
            await self._process.connection.send(
                EnvironmentCall(call=number, episode=episode, method=method, **arguments)
            )
        except ConnectionClosed:
            pass  # the reader says why
        except BaseException:  # such as a row that cannot be sent
            deadline.cancel()
            del self._calls[number]
            raise
        answer = await answered
        if answer.error:
            raise SampleError(answer.error, final=answer.is_final)
        return answer

    async def close(self) -> None:
        """End the process."""
        self._process.connection.close()
        await self._reading

    async def _read(self) -> None:
        """Receive answers until the process ends."""
        try:
            while True:
                answer = await self._process.connection.receive()
                answered, deadline = self._calls.pop(answer.call)
                deadline.cancel()
                if not answered.done():  # cancelled with its caller
                    answered.set_result(answer)
        except ConnectionClosed:
            pass
        finally:
            status = await self._process.close()
            self.death = self.death or self._process.died(status)
            for answered, deadline in self._calls.values():
                deadline.cancel()
                if not answered.done():
                    answered.set_exception(self.death)
            self._calls.clear()

    def _kill(self) -> None:
        """End a process in which a call hangs, for instance in a plain function, which nothing else can end."""
        self.death = self._process.late(self._limit)
        self._process.process.kill()


class ProcessEnvironment(Environment):
    """An episode's environment in the process of a host."""

    def __init__(self, host: EnvironmentHost, number: int) -> None:
        self._host, self._number = host, number
        self._process: _Process | None = None

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self._process = await self._host.started()
        answer = await self._process.call(self._number, "reset", row=dict(row))
        self.tools: Sequence[Mapping[str, Any]] = answer.tools
        assert answer.observation is not None
        return answer.observation

    async def step(self, said: str, turn: Turn) -> Observation:
        assert self._process is not None, "reset comes first"
        answer = await self._process.call(self._number, "step", said=said, turn=encode_turn(turn))
        assert answer.observation is not None
        return answer.observation

    async def close(self) -> None:
        if self._process is not None and self._process.death is None:
            await self._process.call(self._number, "close")

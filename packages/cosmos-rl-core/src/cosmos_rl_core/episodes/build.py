"""Makes the environments of episodes from [environment]: one for each episode, in this process or in another.

environments = build_environments(section)          # UserError: no such class, options that it does not take
environment = environments.make()                   # every method is awaited, every observation is checked
await environment.reset(row) ...
await environments.close()
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from cosmos_rl_core import plugins
from cosmos_rl_core.connected_process import ProcessDied
from cosmos_rl_core.episodes.interfaces import Environment, Observation
from cosmos_rl_core.episodes.process import BuildEnvironment, EnvironmentHost
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.reward.build import build
from cosmos_rl_core.types import Turn

if TYPE_CHECKING:  # a process of environments has no pydantic
    from cosmos_rl_core.episodes.config import EnvironmentSection

GROUP = "cosmos_rl.environments"
_encode = msgspec.msgpack.Encoder().encode
_MAX_THREADS = 1000
"""Threads of methods that do not return are not used again."""


class Environments:
    """Makes the environment of each episode. Used by one event loop."""

    def __init__(
        self,
        build_one: Callable[[], Environment],
        *,
        label: str,
        has_plain_methods: bool = False,
        host: EnvironmentHost | None = None,
    ) -> None:
        """build_one: makes an environment. label: its name, for messages. host: has the process that it runs in."""
        self.label = label
        self.has_plain_methods = has_plain_methods
        """Whether some run in threads, which nothing ends."""
        self._build_one, self._host = build_one, host
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="environment")

    def make(self) -> Environment:
        """Return the environment of an episode. Its methods may all be awaited: plain functions run in threads."""
        return _Checked(self._build_one(), label=self.label, threads=self._threads)

    async def close(self) -> None:
        """Free what the environments have in common, once their episodes have ended."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._host is not None:
            await self._host.close()


class _Checked(Environment):
    """An environment whose plain methods run in threads, and whose observations are checked."""

    def __init__(self, environment: Environment, *, label: str, threads: ThreadPoolExecutor) -> None:
        self._environment, self._label, self._threads = environment, label, threads

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:  # type: ignore[override]  # may be set by `reset`
        return self._environment.tools

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        return checked(await self._call(self._environment.reset, row), where=f"{self._label}.reset")

    async def step(self, said: str, turn: Turn) -> Observation:
        return checked(await self._call(self._environment.step, said, turn), where=f"{self._label}.step")

    async def close(self) -> None:
        await self._call(self._environment.close)

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(_plain, method), *arguments)


def _plain(method: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return method(*arguments)
    except StopIteration as error:  # a future cannot hold it and would never be done
        raise RuntimeError("StopIteration") from error


def build_environments(section: EnvironmentSection) -> Environments:
    """Return what makes the environments of a run.

    Raises UserError for a class that there is not, and for options that it does not take; with `python`, where the
    class is imported by the process of its episodes alone, the first `reset` does, and `check_section`.
    """
    if not section.python:
        return environments_of(section.name, section.options)
    host = _host(section)
    return Environments(host.make, label=section.name, host=host)


def check_section(section: EnvironmentSection) -> None:
    """Raise UserError for a class that cannot be imported or built with its options, before a run."""
    if not section.python:
        build_environments(section)
        return

    async def start() -> None:
        host = _host(section)
        try:
            await host.started()
        except ProcessDied as death:
            raise UserError(f"{death}: its last lines are above") from death
        finally:
            await host.close()

    asyncio.run(start())


def _host(section: EnvironmentSection) -> EnvironmentHost:
    target = plugins.locate(GROUP, section.name)  # here: another interpreter has no entry points of ours
    build = BuildEnvironment(target=target, options=dict(section.options), timeout_s=section.timeout_s)
    return EnvironmentHost(build, python=section.python, label=section.name)


def environments_of(name: str, options: Mapping[str, Any]) -> Environments:
    """Return what makes environments in this process. Raises UserError as `environment_class` and `build`."""
    kind = environment_class(name)
    build_one = partial(build, kind, options, where=f"environment {name}")
    build_one()  # its options are wrong now, not in the first episode
    is_plain = not all(map(inspect.iscoroutinefunction, (kind.reset, kind.step, kind.close)))
    return Environments(build_one, label=kind.__name__, has_plain_methods=is_plain)


def environment_class(name: str) -> type[Environment]:
    """Import the class of an environment, installed or "module:attribute". Raises UserError where it is none."""
    kind = plugins.load(GROUP, name)
    if not (inspect.isclass(kind) and issubclass(kind, Environment)):
        raise UserError(f"environment {name} is {kind!r}: name a class derived from cosmos_rl_core.Environment")
    if kind.__abstractmethods__:
        raise UserError(f"environment {name} lacks {' and '.join(sorted(kind.__abstractmethods__))}: define them")
    return kind


def checked(observation: Any, *, where: str) -> Observation:
    """Return an observation. Raises TypeError or ValueError for one that an episode cannot record."""
    if not isinstance(observation, Observation):
        raise TypeError(f"{where} returned {_short(observation)}: return an Observation")
    for messages in (observation.messages, observation.history or ()):
        for message in () if isinstance(messages, str) else messages:
            if not (isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message):
                raise TypeError(f'{where} returned the message {_short(message)}: give it "role" and "content"')
        try:
            _encode(messages)
        except (TypeError, UnicodeEncodeError, OverflowError, RecursionError) as error:
            raise TypeError(f"{where} returned {_short(messages)}, which is not JSON: {error}") from error
    numbers = {"a reward": observation.reward, **observation.metrics}
    for name, number in numbers.items():
        if number is not None and not math.isfinite(number):
            raise ValueError(f"{where} returned {number!r} as {name}: return a finite number, or none")
    reward = None if observation.reward is None else float(observation.reward)  # of numpy, too
    metrics = {name: float(number) for name, number in observation.metrics.items()}
    return replace(observation, reward=reward, done=bool(observation.done), metrics=metrics)


def _short(value: Any, *, most: int = 80) -> str:
    written = repr(value)
    return written if len(written) <= most else f"{written[:most]}..."

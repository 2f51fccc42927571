"""A reward inside a worker: built once, then scores one or many groups per call."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.reward.rubric import checked_values
from cosmos_rl_core.types import RolloutGroup

Scores = dict[str, list[float]]
"""Scores by the reward's name, or by "reward.part"; one finite float per rollout."""


@runtime_checkable
class BatchReward(Protocol):
    """A reward that scores a batch of groups in one call, as a network does. A class, constructed with the options.

    Called once per batch instead of `__call__`; the groups may differ in sizes and shapes.
    """

    def score_groups(self, groups: Sequence[RolloutGroup]) -> Sequence[Any]:
        """Return for each group the result of a RewardFn: one float per rollout, or a mapping of parts."""
        ...


def build(name: str, options: Mapping[str, Any]) -> Any:
    """Return a reward by its name in recipes: an installed one, "domain:reward", or "module:attribute".

    The first two, and classes, are called with the options; any other attribute is the reward itself. Raises UserError
    for an unknown name, and for options that the reward does not accept.
    """
    domain_name, _, own = name.rpartition(":")
    is_domains = ":" in domain_name or domain_name in plugins.names("cosmos_rl.domains")
    factory = _of_domain(domain_name, own) if is_domains else plugins.load("cosmos_rl.rewards", name)
    if not callable(factory):
        raise UserError(f"reward {name} is {factory!r}, not a function")
    if ":" in name and not is_domains and not inspect.isclass(factory):
        return partial(factory, **options) if options else factory
    try:
        return factory(**options)
    except (TypeError, ValueError) as error:  # pydantic's errors are ValueErrors
        raise UserError(f"reward {name} does not accept options {dict(options)}: {error}") from error


def _of_domain(name: str, reward: str) -> Callable[..., Any]:
    found: Any = plugins.load("cosmos_rl.domains", name)
    domain: Any = found() if inspect.isclass(found) else found
    factory = domain.reward(reward)
    if factory is None:
        known = ", ".join(domain.rewards)
        raise UserError(f"domain {name} has no reward called {reward!r}; known: {known}")
    return factory


class Served:
    """A reward with its options, and an event loop for async rewards.

    scores = served.score([group, group, ...])          # one Scores per group, or the error as text
    """

    def __init__(self, name: str, *, label: str, options: Mapping[str, Any]) -> None:
        """Build the reward. Raises UserError like `build`."""
        self._label = label
        self._reward = build(name, options)
        self._runner = asyncio.Runner()

    def score(self, groups: Sequence[RolloutGroup]) -> list[Scores | str]:
        """Return each group's scores or its error; a failed group does not affect the others."""
        try:
            values = self._values(groups)
            if len(values) != len(groups):
                raise SampleError(f"{self._label} returned {len(values)} results for {len(groups)} groups")
        except Exception as error:  # user code may raise anything; it is reported as an error
            if len(groups) > 1:
                return [scored for group in groups for scored in self.score([group])]
            return [self._reason(error)]
        return [self._checked(value, group) for value, group in zip(values, groups, strict=True)]

    def _values(self, groups: Sequence[RolloutGroup]) -> Sequence[Any]:
        if isinstance(self._reward, BatchReward):
            return self._reward.score_groups(groups)
        if _is_async(self._reward):
            return self._runner.run(_gathered(self._reward, groups))
        return [self._reward(group) for group in groups]

    def _checked(self, values: Any, group: RolloutGroup) -> Scores | str:
        size = len(group.rollouts)
        parts = values if isinstance(values, Mapping) else {"": values}
        try:
            named = {f"{self._label}.{part}" if part else self._label: column for part, column in parts.items()}
            return {name: checked_values(column, expected=size, where=name) for name, column in named.items()}
        except SampleError as error:
            return error.reason

    def _reason(self, error: Exception) -> str:
        if isinstance(error, SampleError):
            return error.reason
        return f"{self._label} raised {type(error).__name__}: {error}"


async def _gathered(reward: Any, groups: Sequence[RolloutGroup]) -> Sequence[Any]:
    return await asyncio.gather(*(reward(group) for group in groups))


def _is_async(reward: Any) -> bool:
    function = reward.func if isinstance(reward, partial) else reward
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

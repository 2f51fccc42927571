"""Checks of what a reward returns or raises, in this process or in another."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.types import Rollout, RolloutGroup


def is_async(function: Any) -> bool:
    """Whether a reward is called on an event loop."""
    function = function.func if isinstance(function, partial) else function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def place(reward: str, group: RolloutGroup) -> str:
    """A reward and its group, for messages."""
    return f"reward '{reward}' on {name_of(group)}"


def too_long(timeout_s: float) -> str:
    """The end of a message about a reward that did not return in time."""
    return f"took longer than [reward] timeout_s = {timeout_s:g}"


def failure(error: BaseException, *, where: str) -> SampleError:
    """The error of a sample whose reward has raised `error`."""
    again = isinstance(error, ConnectionError | TimeoutError)  # a retry may reach its server
    final = error.final if isinstance(error, SampleError) else not again
    return SampleError(f"{where} raised {type(error).__name__}: {error}", final=final)


def name_of(group: RolloutGroup) -> str:
    """The group's row, for messages."""
    return group.prompt.origin or f"sample {group.prompt.sample_id}"


def checked_steps(values: Any, *, rollouts: Sequence[Rollout], where: str) -> list[np.ndarray]:
    """Like `checked_values`: arrays [S] for episodes with one reward per step, [1] for all others."""
    if all(rollout.episode is None for rollout in rollouts) or not isinstance(values, Sequence):
        return [np.array([value]) for value in checked_values(values, expected=len(rollouts), where=where)]
    totals = checked_values(
        [value.sum() if _is_vector(value) else value for value in values], expected=len(rollouts), where=where
    )
    checked = []
    for i, (rollout, value, total) in enumerate(zip(rollouts, values, totals, strict=True)):
        steps = np.asarray(value, np.float64) if _is_vector(value) else np.array([total])
        if _is_vector(value) and (rollout.episode is None or len(steps) != rollout.episode.num_steps):
            have = "no steps" if rollout.episode is None else f"{rollout.episode.num_steps} steps"
            raise SampleError(f"{where} returned {len(steps)} values for rollout {i}, which has {have}", final=True)
        checked.append(steps)
    return checked


def checked_values(values: Any, *, expected: int, where: str) -> list[float]:
    """Return the values of a reward as floats. Raises SampleError with the problem of the first invalid value."""
    if isinstance(values, str | bytes) or (not isinstance(values, Sequence) and not _is_vector(values)):
        raise SampleError(
            f"{where} returned {type(values).__name__}; it must return one number per rollout", final=True
        )
    if len(values) != expected:
        raise SampleError(f"{where} returned {len(values)} values for {expected} rollouts", final=True)
    checked = []
    for i, value in enumerate(values):
        try:
            number = float(value) if not isinstance(value, str | bytes) else math.nan
        except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: torch's for a complex one
            number = math.nan
        if not math.isfinite(number):
            raise SampleError(f"{where} returned {value!r} for rollout {i}; it must be a finite number", final=True)
        checked.append(number)
    return checked


def _is_vector(values: Any) -> bool:
    """Whether the values are a 1-D numpy array or torch tensor."""
    return getattr(values, "ndim", None) == 1

"""A chunk: up to H steps after one decision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_vla.sims.base import SimulatorError, Stepped


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkResult:
    """Results of the H actions of one decision. Substeps after the first that ended the episode were not executed."""

    rewards: NDArray[np.float32]
    """[H], 0 for substeps not executed."""
    valid: NDArray[np.bool_]
    """[H], the executed substeps: ones, then zeros."""
    terminated: bool
    """The last executed substep ended the episode."""
    truncated: bool
    """The last executed substep was at the step limit; the observation after it is the final one."""
    success: bool
    """The task was done at an executed substep."""

    @property
    def steps(self) -> int:
        return int(self.valid.sum())

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


def run_chunk(step: Callable[[NDArray[np.float32]], Stepped], actions: NDArray[np.float32]) -> ChunkResult:
    """Execute actions [H, D] until the first that ends the episode.

    Raises SimulatorError for a reward that is not finite.
    """
    tally = _Tally(len(actions))
    for action in actions:
        if tally.add(step(action)):
            break
    return tally.result()


def run_chunks(
    step: Callable[[Sequence[int], NDArray[np.float32]], Sequence[Stepped | SimulatorError]],
    slots: Sequence[int],
    actions: NDArray[np.float32],
) -> list[ChunkResult | SimulatorError]:
    """Execute actions [n, H, D] in n slots side by side; a slot whose episode is over is not stepped further.

    The result of a slot that broke, or returned a reward that is not finite, is the error.
    """
    tallies = [_Tally(actions.shape[1]) for _ in slots]
    broken: dict[int, SimulatorError] = {}
    running = list(range(len(slots)))
    for substep in range(actions.shape[1]):
        if not running:
            break
        steps = step([slots[row] for row in running], actions[running, substep])
        running = [row for row, stepped in zip(running, steps, strict=True) if _goes_on(row, stepped, tallies, broken)]
    return [broken[row] if row in broken else tally.result() for row, tally in enumerate(tallies)]


def _goes_on(
    row: int, stepped: Stepped | SimulatorError, tallies: Sequence[_Tally], broken: dict[int, SimulatorError]
) -> bool:
    try:
        if isinstance(stepped, SimulatorError):
            raise stepped
        return not tallies[row].add(stepped)
    except SimulatorError as error:
        broken[row] = error
        return False


class _Tally:
    def __init__(self, horizon: int) -> None:
        self._rewards = np.zeros(horizon, np.float32)
        self._valid = np.zeros(horizon, np.bool_)
        self._steps = 0
        self._terminated = self._truncated = self._success = False

    def add(self, stepped: Stepped) -> bool:
        """Count one step. Returns whether the episode is over."""
        if not math.isfinite(stepped.reward):
            raise SimulatorError(f"the reward is {stepped.reward}")
        self._rewards[self._steps] = stepped.reward
        self._valid[self._steps] = True
        self._steps += 1
        self._terminated, self._truncated = stepped.terminated, stepped.truncated and not stepped.terminated
        self._success |= stepped.success
        return stepped.terminated or stepped.truncated

    def result(self) -> ChunkResult:
        return ChunkResult(
            rewards=self._rewards,
            valid=self._valid,
            terminated=self._terminated,
            truncated=self._truncated,
            success=self._success,
        )

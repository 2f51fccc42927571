"""Rows of a [data] section: episodes to run, or frames of demonstrations. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.config import VLADataConfig
from cosmos_rl_vla.sims.base import GROUP, HELD_OUT, BatchSimulator, Worded


class TaskRows(Sequence[Mapping[str, Any]]):
    """Every task with every initial state, tasks alternating: {"task", "init", "instruction", "perturb"}."""

    def __init__(self, data: VLADataConfig, instructions: Mapping[str, str]) -> None:
        self._data = data
        self._instructions = instructions

    def __len__(self) -> int:
        return self._data.num_inits * len(self._data.tasks) * len(self._data.perturb)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        data = self._data
        turn, perturbed = divmod(range(len(self))[place], len(data.perturb))
        number, task = divmod(turn, len(data.tasks))
        perturb = data.perturb[perturbed]
        instructed = (task + 1) % len(data.tasks) if perturb == "swap_instruction" else task
        return {
            "task": data.tasks[task],
            "init": data.first_init + number + (HELD_OUT if data.split == "held_out" else 0),
            "instruction": self._instructions[data.tasks[instructed]],
            "perturb": perturb,
        }


def load_rows(data: VLADataConfig) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Return rows and their origin for messages.

    Raises UserError for a simulator that is not installed, an unknown task, and a damaged dataset.
    """
    if data.demos:
        from cosmos_rl_vla.data.demos import demonstrated_rows

        return demonstrated_rows(data), data.demos
    own = [task for task in data.tasks if task not in data.instructions]
    described = describe(data.simulator, own, options=data.options)
    return TaskRows(data, {**described, **data.instructions}), data.simulator


def describe(simulator: str, tasks: Sequence[str], *, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the instruction of each task. Builds nothing without tasks.

    Raises UserError for an unknown simulator, invalid options, or an unknown task.
    """
    if not tasks:
        return {}
    factory = plugins.load(GROUP, simulator)
    if isinstance(factory, type) and issubclass(factory, Worded):
        return {task: factory.instruction(task) for task in tasks}
    if isinstance(factory, type) and issubclass(factory, BatchSimulator):
        raise UserError(f"[data] simulator {simulator!r} has no instructions before it runs; set [data.instructions]")
    try:
        sim = factory(**options)
    except TypeError as error:
        raise UserError(f"[data] simulator {simulator!r}: {error}") from error
    try:
        return {task: sim.instruction(task) for task in tasks}
    finally:
        sim.close()

"""LIBERO's 130 tasks in five suites; a task's name is its instruction."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

from cosmos_rl_core.errors import UserError

MAX_STEPS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
"""Step limits of openvla-oft by suite: somewhat more than the longest demonstration."""

_SCENE = re.compile(r"^[A-Z_]+SCENE\d+_")
"""Prefix of the task names of libero_10 and libero_90."""


class LiberoTask(NamedTuple):
    """A task: its suite and its name in it."""

    suite: str
    name: str

    @property
    def sentence(self) -> str:
        """Return the instruction."""
        return _SCENE.sub("", self.name).replace("_", " ")


@functools.cache
def suites() -> Mapping[str, Sequence[str]]:
    """Return the names of the tasks of each suite, in LIBERO's order."""
    return json.loads((files("cosmos_rl_vla.sims") / "libero_tasks.json").read_text())


def find_task(task: str) -> LiberoTask:
    """Return the task written as "suite/name" or "suite/number", the number in LIBERO's order.

    Raises UserError for one that LIBERO does not have.
    """
    suite, _, name = task.partition("/")
    if suite not in suites():
        raise UserError(
            f"LIBERO has no suite {suite!r}: write a task as libero_goal/open_the_middle_drawer_of_the_cabinet or "
            f"libero_goal/0; suites: {', '.join(suites())}"
        )
    names = suites()[suite]
    if name.isdecimal() and int(name) < len(names):
        return LiberoTask(suite, names[int(name)])
    if name in names:
        return LiberoTask(suite, name)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {len(names)}, from {suite}/0 to {suite}/{len(names) - 1}"
    raise UserError(f"{suite} has no task {name!r}; {hint}")

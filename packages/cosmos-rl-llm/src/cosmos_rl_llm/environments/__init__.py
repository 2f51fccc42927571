"""Environments of other projects, each a class of its own, and rows for those that make their tasks themselves.

    [data]
    rows = "cosmos_rl_llm.environments:rows"      # {"index": 0}, {"index": 1}, ...; limit = 512 takes the first
    [environment]
    name = "reasoning_gym"
    options = { task = "leg_counting" }
    python = "envs/reasoning/bin/python"          # where the project is installed

They import core, numpy and the project alone, so that they run in another interpreter's process.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install

NUM_ROWS = 100_000


def rows() -> Iterator[dict[str, Any]]:
    """Return rows of a number each, for [data] rows: an environment makes a task of the number."""
    return ({"index": index} for index in range(NUM_ROWS))


def imported(module: str, *, requirement: str) -> Any:
    """Import a module of a project. Raises UserError with the line that installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: {pip_install(requirement)}, or name another interpreter with `python`") from error

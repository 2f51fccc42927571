"""Environments of other projects, each a class of its own.

    [environment]
    name = "reasoning_gym"
    options = { task = "leg_counting" }
    python = "envs/reasoning/bin/python"          # where the project is installed

They import core, numpy and the project alone, so that they run in another interpreter's process.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install


def imported(module: str, *, requirement: str) -> Any:
    """Import a module of a project. Raises UserError with the line that installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: {pip_install(requirement)}, or name another interpreter with `python`") from error

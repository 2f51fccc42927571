"""The import path of a recipe's "module:attribute" names: its own folder, after everything that is installed.

A recipe's folder comes last: token.py or types.py beside a recipe must not hide Python's own modules. PYTHONPATH would
put it first, so child processes get it in a variable of ours, which `plugins.load` reads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "COSMOS_RL_PYTHON_PATH"
"""Folders for child processes, as PYTHONPATH lists them."""
PYTHON = (sys.executable, "-P")
"""Begins the command line of a child process: -P keeps the current directory off the front of sys.path."""


def import_from(recipe: Path) -> tuple[str, str]:
    """Let "module:attribute" name a file beside the recipe or in the current directory; return the two."""
    folders = str(recipe.resolve().parent), str(Path.cwd())
    add_folders(folders)
    return folders


def add_folders(folders: Sequence[str] = ()) -> None:
    """Append `folders`, and those that this process was started with, to sys.path where they are missing."""
    inherited = filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))
    sys.path += [folder for folder in dict.fromkeys([*folders, *inherited]) if folder not in sys.path]


def child_environment(folders: Sequence[str]) -> dict[str, str]:
    """Return the variables that let a child process import from folders, then from the current directory."""
    inherited = filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))
    return {VARIABLE: os.pathsep.join(dict.fromkeys([*filter(None, folders), *inherited, str(Path.cwd())]))}

"""Imports of modules: the path of a recipe's "module:attribute" names, lazy exports of a package, silent libraries, and
the command that installs a missing package.

A recipe's folder comes last: token.py or types.py beside a recipe must not hide Python's own modules. PYTHONPATH would
put it first, so child processes get it in a variable of ours, which `plugins.load` reads.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

VARIABLE = "COSMOS_RL_PYTHON_PATH"
"""Folders for child processes, as PYTHONPATH lists them."""
PYTHON = (sys.executable, "-P")
"""Begins the command line of a child process: -P keeps the current directory off the front of sys.path."""
WORKER = (*PYTHON, "-m", "cosmos_rl_core.workers.main")
"""The first words of a worker's command line; the arguments of `cosmos-rl worker` follow."""


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


def lazy_exports(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for the `__init__` of `package`.

    homes: public names by the module that defines them, relative to the package.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home_of[name]}"), name)

    def names() -> list[str]:
        return [*vars(sys.modules[package]), *home_of]

    return get, names


def quiet_torchao() -> None:
    """Keep torchao's log lines at import out of the log: CUDA kernels that it cannot load here."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def pip_install(requirement: str) -> str:
    """Return the command that installs one of our packages, such as "cosmos-rl-llm[vllm]".

    From where this package came: pip records the folder or the wheel that it installed (PEP 610), and the others are
    beside it. A package of an index is installed by its name.
    """
    name, bracket, extras = requirement.partition("[")
    try:
        record = metadata.distribution("cosmos-rl-core").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # imported from a folder on PYTHONPATH
        record = None
    source = Path(unquote(urlsplit(json.loads(record)["url"]).path)) if record else None
    if source is not None and (source.parent / name / "pyproject.toml").is_file():
        return f"pip install '{source.parent / name}{bracket}{extras}'"
    if source is not None and source.suffix == ".whl" and name.startswith("cosmos-rl"):
        return f"pip install --find-links '{source.parent}' '{requirement}'"
    return f"pip install '{requirement}'"

"""Imports of modules: the path of a recipe's "module:attribute" names, lazy exports of a package, silent libraries, and
the command that installs a missing package.

A recipe's folder comes last: token.py or types.py beside a recipe must not hide Python's own modules. PYTHONPATH would
put it first, so child processes get it in a variable of ours, which `plugins.load` reads.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
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


PACKAGES = ("cosmos-rl-core", "cosmos-rl-transfer", "cosmos-rl-llm", "cosmos-rl-vla", "cosmos-rl-wfm")


def installed_versions(names: Iterable[str], version: Callable[[str], str] = metadata.version) -> dict[str, str]:
    """Return the versions of the distributions that are installed. version: reads that of one."""
    versions: dict[str, str] = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = version(name)
    return versions


_BENEATH = PACKAGES[:2]
"""Packages of ours that the others require, from the lowest up."""


def pip_install(*requirements: str) -> str:
    """Return the command that installs packages: of ours, such as "cosmos-rl-llm[vllm]", or of an index.

    Ours are on no index. They are installed from where this package came: from folders of a clone, with those that they
    require, or from a folder of wheels.
    """
    arguments: Sequence[str] = requirements
    if any(requirement.startswith("cosmos-rl-") for requirement in requirements):
        source, is_editable = _source()
        if (source / "pyproject.toml").is_file():
            paths = [str(source.parent / requirement) for requirement in _with_required(requirements)]
            arguments = [part for path in paths for part in (("-e", path) if is_editable else (path,))]
        else:
            arguments = ["--find-links", str(source.parent) if source.suffix == ".whl" else "dist", *requirements]
    return " ".join([_pip(), *map(shlex.quote, arguments)])


def _with_required(requirements: Sequence[str]) -> list[str]:
    """Put the packages of ours that these require before them: pip would search an index for them."""
    parts = [requirement.partition("==")[0].partition("[") for requirement in requirements]
    extras = dict.fromkeys(_BENEATH, "") | {name: bracket + rest for name, bracket, rest in parts}
    last = max(list(extras).index(name) for name, _, _ in parts)
    return [name + extra for name, extra in extras.items()][: last + 1]


def _source() -> tuple[Path, bool]:
    """Return the folder or wheel that this package was installed from, and whether the folder is used in place."""
    folder = Path(__file__).parents[2]  # of the source tree, unless it was copied to site-packages
    try:
        record = json.loads(metadata.distribution("cosmos-rl-core").read_text("direct_url.json") or "{}")  # PEP 610
    except metadata.PackageNotFoundError:  # imported from a folder on PYTHONPATH
        record = {}
    url = urlsplit(record.get("url", ""))
    return Path(unquote(url.path)) if url.scheme == "file" else folder, (folder / "pyproject.toml").is_file()


def _pip() -> str:
    """Return how to call pip so that it installs into this environment, also in a shell that did not activate it."""
    # Not find_spec("pip"): setuptools watches for that name, and would then refuse to be imported in this process.
    if next(iter(metadata.distributions(name="pip")), None) is None:
        return f"uv pip install --python {shlex.quote(sys.executable)}"
    if sys.prefix in (sys.base_prefix, os.environ.get("VIRTUAL_ENV")):
        return "pip install"
    return f"{shlex.quote(sys.executable)} -m pip install"

"""Installed libraries that are older than the versions this project is tested with.

pip enforces the floors, but images for GPUs often bring a torch of their own that is kept with `--no-deps`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata
from typing import TypeVar

from cosmos_rl_core.imports import PACKAGES, pip_install

T = TypeVar("T")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?>=([0-9.]+)")


def too_old(
    *,
    requires: Callable[[str], list[str] | None] = metadata.requires,
    version: Callable[[str], str] = metadata.version,
) -> list[str]:
    """Return a sentence for each library below the floor of an installed package of this project.

    Libraries and packages that are not installed are left out. requires, version: read the installed metadata.
    """
    floors: dict[str, tuple[str, str]] = {}
    for package in PACKAGES:
        for text in _or_nothing(requires, package) or ():
            if match := _REQUIREMENT.match(text):
                name, floor = match.groups()
                floors.setdefault(name, (floor, package))
    return [
        f"{name} {installed} is installed, but {package} needs {floor} or later: {pip_install(f'{name}>={floor}')}"
        for name, (floor, package) in sorted(floors.items())
        if (installed := _or_nothing(version, name)) is not None and _numbers(installed) < _numbers(floor)
    ]


def _or_nothing(read: Callable[[str], T], name: str) -> T | None:
    try:
        return read(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cu130 -> (2, 13, 0); parts that are not numbers end it."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()

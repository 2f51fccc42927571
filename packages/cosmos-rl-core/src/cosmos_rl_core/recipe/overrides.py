"""Dotted overrides from the command line: rollout.group_size=4."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from cosmos_rl_core.settings.base import Problem
from cosmos_rl_core.settings.problems import as_toml


def apply_overrides(
    raw: Mapping[str, Any], overrides: Sequence[str], values: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[Problem]]:
    """Return a copy of a config with each "section.key=value" applied, and the problems found.

    A value is parsed as TOML; if that fails it is a plain string. A number in the key indexes an array:
    reward.functions.0.weight=2. `values`, by dotted key, are applied last and unparsed.
    """
    changed = copy.deepcopy(dict(raw))
    found: list[Problem] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or not all(parts):
            found.append(Problem(key=override, wrong="is not an override", suggestion="write section.key=value"))
        elif problem := _put(changed, parts, _value(text.strip())):
            found.append(problem)
    for key, value in (values or {}).items():
        if problem := _put(changed, key.split("."), value):
            found.append(problem)
    return changed, found


def _value(text: str) -> Any:
    """Parse a TOML value; anything that is not TOML, such as a bare word, is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # not TOML, or an integer or nesting beyond Python's limits
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _put(root: dict[str, Any], parts: Sequence[str], value: Any) -> Problem | None:
    """Set root[a][b][c] = value, creating missing tables."""
    here: Any = root
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(here, dict):
            if last:
                here[part] = value
            else:
                here = here.setdefault(part, {})
        elif isinstance(here, list) and part.isdigit() and int(part) < len(here):
            if last:
                here[int(part)] = value
            else:
                here = here[int(part)]
        else:
            return Problem(key=".".join(parts), given=as_toml(value), wrong=_no_place(here, parts[:depth]))
    return None


def _no_place(here: Any, above: Sequence[str]) -> str:
    key = ".".join(above)
    if isinstance(here, list):
        return f"{key} has {len(here)} entries, counted from 0"
    return f"{key} is {as_toml(here)}, not a table"

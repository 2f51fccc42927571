"""`cosmos-rl migrate OLD.toml`: the new recipe with comments, and lists of what was ignored and refused.

old keys -> the domain, from the old recipe's sections -> common keys, then those of the domain's entry point in the
group `cosmos_rl.migrations`
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.ops.migrate.common import DEFAULTS, migrate_common, migrate_rest
from cosmos_rl_core.ops.migrate.migration import FILL_IN, Migration

SHOWN = 3
SIMULATED = ("pi_", "grpo_pi", "grpo_vla", "gym")
"""Beginnings of train_policy.trainer_type of robot policies."""


@dataclass(frozen=True, slots=True)
class Migrated:
    """A new recipe and the old keys that are not in it."""

    text: str
    """The recipe, TOML with comments."""
    recipe: Mapping[str, Any]
    ignored: Mapping[str, str]
    refused: Mapping[str, str]

    def write(self, path: Path) -> None:
        """Write the recipe to a new file. Raises UserError if there is one."""
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(self.text)
        except FileExistsError as error:
            raise UserError(f"{path} exists already; choose another file") from error
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from error

    @property
    def open_keys(self) -> int:
        """Number of values that the user must fill in."""
        return self.text.count(FILL_IN)

    def __str__(self) -> str:
        lines = [f"left out: {keys} ({because})" for because, keys in _by_reason(self.ignored)]
        lines += [f"not available: {keys}: {because}" for because, keys in _by_reason(self.refused)]
        if self.open_keys:
            lines.append(f"fill in: {self.open_keys} values are marked {FILL_IN}")
        return "\n".join(lines)


def migrate(text: str) -> Migrated:
    """Return the new recipe of an old one. Raises UserError if it is no such recipe, or its domain is not installed."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"not valid TOML: {error}") from error
    domain, is_predict = _domain(tables)
    migrate_domain = plugins.load("cosmos_rl.migrations", "predict" if is_predict else domain)
    old = Migration(tables, defaults={} if is_predict else DEFAULTS)
    old.put("run.domain", domain)
    if is_predict:
        migrate_domain(old)
    else:
        migrate_common(old)
        migrate_domain(old)
        migrate_rest(old)
    return Migrated("".join(_render(old.recipe, old.notes)).lstrip(), old.recipe, old.ignored, old.refused)


def migrate_file(path: Path) -> Migrated:
    """Like `migrate`, for a file. Errors name it."""
    try:
        return migrate(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from error


def _domain(tables: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the domain, and whether it is the older layout of Cosmos-Predict2.5."""
    if "trainer" in tables and "job" in tables:
        return "wfm", True
    if "train" not in tables or "policy" not in tables:
        raise UserError("no recipe of NVIDIA's Cosmos-RL: it has no [train] and no [policy]")
    trainer = str(tables["train"].get("train_policy", {}).get("trainer_type", ""))
    if "vla" in tables or trainer.startswith(SIMULATED):
        return "vla", False
    return ("wfm" if tables["policy"].get("is_diffusers") else "llm"), False


def _render(recipe: Mapping[str, Any], notes: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    """Yield the lines of a recipe: first the values of a section, then its sections."""
    tables = {key: value for key, value in recipe.items() if isinstance(value, Mapping)}
    values = {key: value for key, value in recipe.items() if key not in tables}
    if values and prefix:
        yield f"\n[{prefix.removesuffix('.')}]\n"
    arrays = {key: value for key, value in values.items() if _is_array_of_tables(value)}
    for key, value in values.items():
        if key not in arrays:
            note = notes.get(prefix + key)
            yield tomli_w.dumps({key: value}).rstrip("\n") + (f"  # {note}\n" if note else "\n")
    for key, value in tables.items():
        yield from _render(value, notes, f"{prefix}{key}.")
    for key, rows in arrays.items():
        if note := notes.get(prefix + key):
            yield f"\n# {note}"
        for row in rows:
            yield f"\n[[{prefix}{key}]]\n" + "".join(f"{name} = {_inline(entry)}\n" for name, entry in row.items())


def _by_reason(keys: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each reason with its keys, of which at most SHOWN are named."""
    for because in dict.fromkeys(keys.values()):
        named = [key for key, reason in keys.items() if reason == because]
        more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
        yield because, ", ".join(named[:SHOWN]) + more


def _is_array_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _inline(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_inline(entry)}" for key, entry in value.items()) + " }"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")

"""`cosmos-rl init`: writes a commented starter recipe, the domain package's `recipe.toml`, and its JSON Schema."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.recipe.load import load_domain
from cosmos_rl_core.recipe.schema import recipe_schema

SCHEMA = "recipe.schema.json"
"""The schema beside a recipe, with which editors complete and check its keys."""


def init(domain: str, directory: Path) -> Path:
    """Write the domain's recipe to `<directory>/run.toml`, its schema beside it, and return the recipe's path.

    An existing recipe is never overwritten. Raises UserError.
    """
    recipe = f"#:schema ./{SCHEMA}\n{recipe_of(domain)}"
    schema = json.dumps(recipe_schema(load_domain(domain)), indent=1, ensure_ascii=False)
    path = directory / "run.toml"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(recipe)
        (directory / SCHEMA).write_text(schema + "\n", encoding="utf-8")
    except FileExistsError as error:
        raise UserError(f"{path if path.exists() else directory} exists already; choose another directory") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    return path


def recipe_of(domain: str) -> str:
    """Return the starter recipe in a domain's package. Imports the package, not the domain."""
    where = plugins.locate("cosmos_rl.domains", domain)
    package = where.partition(":")[0].rpartition(".")[0]
    try:
        recipe = resources.files(package) / "recipe.toml" if package else None
    except ModuleNotFoundError as error:
        raise UserError(f"domain {domain!r} ({where}) cannot be imported: {error}") from error
    if recipe is None or not recipe.is_file():
        raise UserError(f"domain {domain!r} ships no recipe.toml")
    return recipe.read_text(encoding="utf-8")

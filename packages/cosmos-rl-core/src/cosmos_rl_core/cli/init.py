"""`cosmos-rl init`: writes a commented starter recipe, the domain package's `recipe.toml`."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError


def init(domain: str, directory: Path) -> Path:
    """Write the domain's recipe to `<directory>/run.toml` and return its path. Never overwrites one."""
    recipe = recipe_of(domain)
    path = directory / "run.toml"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(recipe)
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

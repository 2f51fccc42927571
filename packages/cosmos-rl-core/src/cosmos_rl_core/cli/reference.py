"""The commands `keys` and `schema`, and the option --version. Imports typer, and of this package `imports`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmos_rl_core.imports import PACKAGES, add_folders, installed_versions, pip_install

Domain = Annotated[
    str, typer.Option("--domain", metavar="DOMAIN", help="Domain whose keys of [model], [data], ... are shown.")
]


def version(show: bool) -> None:
    """Print the versions of the installed packages, and exit."""
    if not show:
        return
    for name, number in installed_versions(PACKAGES).items():
        typer.echo(f"{name} {number}")
    raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=version, is_eager=True, help="Show the versions and exit.")
]


def keys(
    section: Annotated[str, typer.Argument(metavar="[SECTION]", help="Such as rollout or rollout.sampling.")] = "",
    *,
    domain: Domain = "",
) -> None:
    """Show the keys of a section of a recipe: type, default and meaning; without SECTION the sections."""
    from cosmos_rl_core.recipe.schema import keys_of

    for key, kind, default, meaning in keys_of(_schema(domain), section.strip("[]")):
        head = f"{key}  {kind}" + (f"  (default {default})" if default else "")
        typer.echo(f"{head}\n    {meaning}" if meaning else head)


def schema(
    domain: Annotated[str, typer.Argument(metavar="DOMAIN", help="An installed domain, or module:attribute.")],
) -> None:
    """Print the JSON Schema of a domain's recipes, with which editors complete and check keys."""
    import json

    typer.echo(json.dumps(_schema(domain), indent=1, ensure_ascii=False))


def _schema(domain: str) -> dict[str, object]:
    from cosmos_rl_core.errors import UserError
    from cosmos_rl_core.plugins import names
    from cosmos_rl_core.recipe.load import load_domain
    from cosmos_rl_core.recipe.schema import recipe_schema

    add_folders([str(Path.cwd())])
    installed = names("cosmos_rl.domains")
    if not domain and not installed:
        raise UserError(f"no domain is installed: {pip_install('cosmos-rl-llm')}, or name one of your own by --domain")
    return recipe_schema(load_domain(domain or installed[0]))

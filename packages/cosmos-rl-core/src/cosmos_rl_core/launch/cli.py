"""The command `cosmos-rl`. A command imports what it needs when it runs, so that --help answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="cosmos-rl",
    help="Asynchronous reinforcement learning for Physical AI, from TOML recipes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Recipe = Annotated[Path, typer.Argument(metavar="FILE", help="A TOML recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value ...]", help="Values that replace the recipe's."),
]


@app.command()
def run(
    file: Recipe,
    overrides: Overrides = None,
    *,
    resume: Annotated[
        str | None,
        typer.Option(metavar="auto|PATH", help="Go on from the newest checkpoint, or from this one."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run in the same output directory.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, show the plan, and stop there.")] = False,
) -> None:
    """Train, by reinforcement learning or supervised, from a TOML recipe."""
    if dry_run:
        check(file, overrides)
        plan(file, overrides)
        return
    folders = _import_from(file)
    from cosmos_rl_core.config.load import load_config
    from cosmos_rl_core.interfaces import WorkerFailed
    from cosmos_rl_core.launch.run import run as run_config

    config = load_config(file, overrides or ())
    try:
        result = run_config(config, resume=resume, overwrite=overwrite, python_path=folders)
    except WorkerFailed as error:  # it carries the worker's last words; where the controller stood adds nothing
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if result.interrupted:
        raise typer.Exit(130)


@app.command()
def check(file: Recipe, overrides: Overrides = None) -> None:
    """Tell every error of a recipe at once, or what the run will do."""
    _import_from(file)
    from cosmos_rl_core.config.load import load_config
    from cosmos_rl_core.launch.check import check as check_config

    checked = check_config(load_config(file, overrides or ()), file=str(file))
    typer.echo(f"{file}: ok\n{checked}")


@app.command()
def plan(
    file: Recipe,
    overrides: Overrides = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON instead of tables.")] = False,
) -> None:
    """Show the processes a recipe will start and how much they hold, without starting anything."""
    _import_from(file)
    import json

    from cosmos_rl_core.config.load import load_config
    from cosmos_rl_core.launch.plan import plan as plan_config

    planned = plan_config(load_config(file, overrides or ()))
    typer.echo(json.dumps(planned.as_json(), indent=2) if as_json else planned)


@app.command()
def init(
    domain: Annotated[str, typer.Argument(metavar="DOMAIN", help="What to train, such as llm.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write run.toml.")],
) -> None:
    """Write a commented recipe to start from."""
    from cosmos_rl_core.launch.init import init as write_recipe

    path = write_recipe(domain, directory)
    typer.echo(f"wrote {path}; next: cosmos-rl check {path}")


@app.command()
def plugins() -> None:
    """List what is installed: domains, transports, rewards and so on."""
    from cosmos_rl_core.launch.terminal import table
    from cosmos_rl_core.plugins import GROUPS, locate, names

    rows = [(group, name, locate(group, name)) for group in GROUPS for name in names(group)]
    typer.echo(table(rows, header=("group", "name", "from")))


@app.command()
def status(run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")]) -> None:
    """Show the members, samples and waits of a run."""
    import time

    from cosmos_rl_core.launch.status import live_pid, read_status, render

    typer.echo(render(run_dir, read_status(run_dir), pid=live_pid(run_dir), now=time.time()))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: exit code 2 with one message for a user's error, 130 after Ctrl-C."""
    try:
        app(arguments)
    except ValueError as error:
        from cosmos_rl_core.interfaces import UserError  # already loaded by whatever raised it

        if not isinstance(error, UserError):
            raise
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


def _import_from(recipe: Path) -> tuple[str, str]:
    """Let "module:attribute" name a file beside the recipe or in the current directory; return the two."""
    beside, here = str(recipe.resolve().parent), str(Path.cwd())
    sys.path.insert(0, beside)
    sys.path.append(here)
    return beside, here

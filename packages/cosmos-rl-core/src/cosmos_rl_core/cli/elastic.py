"""The commands `controller`, `worker`, `node` and `launch`: a run whose workers others start. Imports only typer."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from cosmos_rl_core.cli.inference import Overrides, Recipe
from cosmos_rl_core.imports import import_from

Resume = Annotated[
    str | None,
    typer.Option(metavar="auto|PATH", help="Continue from the newest checkpoint, or from this one."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in the same output directory.")]


def controller(
    file: Recipe,
    overrides: Overrides = None,
    *,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; default: [run] port, or a free one.")
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="Address at which workers reach this machine; default: [run] bind."),
    ] = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
) -> None:
    """Control a run whose workers join by `cosmos-rl worker`, from this and other machines."""
    settings = {"placement": "external", "port": port, "advertise": advertise}
    flags = [f"run.{key}={value}" for key, value in settings.items() if value is not None]
    train(file, [*(overrides or ()), *flags], import_from(file), resume=resume, overwrite=overwrite)


def train(
    file: Recipe,
    overrides: list[str],
    folders: Sequence[str],
    *,
    resume: str | None,
    overwrite: bool,
    deep: bool = False,
) -> None:
    """Run a recipe to its end. Exit code: 1 if a worker was lost, 3 if the monitor has ended it, 130 if interrupted.

    deep: check what a run needs on this machine before anything is started.
    """
    from cosmos_rl_core.errors import WorkerFailed
    from cosmos_rl_core.launch.check import check_in_child
    from cosmos_rl_core.launch.open_recipe import open_recipe
    from cosmos_rl_core.launch.supervised.command import run_supervised
    from cosmos_rl_core.observe.record import STOPPED
    from cosmos_rl_core.recipe.load import load

    loaded = load(file, overrides)
    notes = check_in_child(loaded, resume=resume, overwrite=overwrite) if deep else ()
    given = replace(open_recipe(loaded.whole(), python_path=folders), notes=notes)
    try:
        result = run_supervised(given, resume=resume, overwrite=overwrite)
    except WorkerFailed as error:  # it contains the worker's log; the controller's traceback adds nothing
        typer.echo(error_text(error), err=True)
        raise typer.Exit(1) from error
    if result.interrupted or result.stopped:
        raise typer.Exit(130 if result.interrupted else STOPPED)


def error_text(error: Exception) -> str:
    """Return "error: ...", in colours on a terminal unless NO_COLOR is set."""
    head, text = "error:", str(error)
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        head = typer.style(head, fg=typer.colors.RED, bold=True)
        text = re.sub(r"(?m)\^+$", lambda match: typer.style(match[0], fg=typer.colors.RED), text)
        text = re.sub(r"(?m)^( += )(help:)", lambda match: match[1] + typer.style(match[2], bold=True), text)
    return f"{head} {text}"


def worker(context: typer.Context) -> None:
    """Run a worker of `cosmos-rl controller`, or of another machine; both print the complete command."""
    from cosmos_rl_core.workers.main import run_worker
    from cosmos_rl_core.workers.node import from_arguments

    raise typer.Exit(run_worker(*from_arguments(context.args, program="cosmos-rl worker")))


def node(
    file: Recipe,
    overrides: Overrides = None,
    *,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Number of machines.")],
    node: Annotated[int, typer.Option("--node", min=0, help="Index of this machine; 0 runs the controller.")],
    head: Annotated[str, typer.Option("--head", metavar="HOST", help="Host name or address of machine 0.")],
    port: Annotated[
        int, typer.Option("--port", min=1, max=65533, help="Port on machine 0; the two after it are used too.")
    ] = 29600,
) -> None:
    """Run one of several equal machines of a run, which take their roles from the recipe."""
    import asyncio

    from cosmos_rl_core.ops.clusters.launcher import ClusterRun
    from cosmos_rl_core.ops.clusters.node import ClusterNode

    _check(file, overrides, external=True)
    run = ClusterRun.of(file, overrides or [])
    code = asyncio.run(ClusterNode(recipe=run, nodes=nodes, node=node, head=head, port=port).run())
    if code and node:
        typer.echo(f"the run has ended with exit code {code}; node 0 has the reason", err=True)
    raise typer.Exit(code)


def launch(
    file: Recipe,
    overrides: Overrides = None,
    *,
    on: Annotated[str, typer.Option("--on", metavar="local|slurm|ray|kubernetes", help="The platform.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the scripts that would be submitted.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in this output directory.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="On Ray, return when all processes have started.")] = False,
) -> None:
    """Start the controller and the workers of a run on a platform, with the settings of [cluster]."""
    from cosmos_rl_core.ops.clusters.follow import Follows
    from cosmos_rl_core.ops.clusters.launcher import ClusterRun, find_launcher, shares_files
    from cosmos_rl_core.ops.clusters.launcher import launch as launch_on
    from cosmos_rl_core.settings.base import ConfigError

    deep = shares_files(on) and not dry_run
    if not dry_run:
        with suppress(ConfigError):  # reported with the other problems below
            ClusterRun.of(file, overrides or [], external=on != "local").must_be_new(resume=resume)
    _check(file, overrides, external=on != "local", resume="auto" if resume and deep else None, deep=deep)
    run = replace(ClusterRun.of(file, overrides or [], external=on != "local"), checked=deep)
    if dry_run:
        typer.echo(find_launcher(on).plan(replace(run, resume=resume, platform=on)))
        return
    before = signal.signal(signal.SIGTERM, _ended)
    try:
        lines = launch_on(on, run, resume=resume)
    finally:
        signal.signal(signal.SIGTERM, before)
    for line in lines:
        typer.echo(line)
    directory = run.config.run.directory
    typer.echo(f"{run.label} is submitted" + (f"; its output is in {directory}/launch" if shares_files(on) else ""))
    typer.echo(f"cosmos-rl status {directory} shows it, cosmos-rl stop {directory} saves and ends it")
    launcher = find_launcher(on)
    if isinstance(launcher, Follows) and not detach:
        raise typer.Exit(launcher.follow(run))


def _ended(number: int, frame: FrameType | None) -> NoReturn:
    """End this process by an exception, after which `launch` cancels what it has submitted."""
    raise SystemExit(128 + number)


def _check(
    file: Path, overrides: list[str] | None, *, external: bool, resume: str | None = None, deep: bool = True
) -> None:
    """Raise ConfigError with every problem of a recipe, as `cosmos-rl check --deep`; print its notes.

    Without `deep` data, model and machine are not looked at; names that this machine does not know are notes then.
    """
    from cosmos_rl_core.launch.check import check_in_child, check_names
    from cosmos_rl_core.recipe.load import load

    import_from(file)
    loaded = load(file, [*(overrides or ()), *(["run.placement=external"] if external else [])])
    for note in check_in_child(loaded, resume=resume) if deep else check_names(loaded):
        typer.echo(f"note: {note}", err=True)

"""The command `cosmos-rl`. Subcommands import their modules when they run, which keeps --help fast."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cosmos_rl_core.cli import inference, reference
from cosmos_rl_core.cli.group import CommandGroup
from cosmos_rl_core.cli.inference import Overrides, Recipe
from cosmos_rl_core.imports import add_folders, import_from

if TYPE_CHECKING:
    from cosmos_rl_core.launch.observer import RunResult

app = typer.Typer(
    name="cosmos-rl",
    cls=CommandGroup,
    help="Asynchronous reinforcement learning for Physical AI, from TOML recipes.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
Resume = Annotated[
    str | None,
    typer.Option(metavar="auto|PATH", help="Continue from the newest checkpoint, or from this one."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in the same output directory.")]


@app.callback()
def options(version: reference.Version = False) -> None:
    """Asynchronous reinforcement learning for Physical AI, from TOML recipes."""


@app.command()
def run(
    file: Recipe,
    overrides: Overrides = None,
    *,
    resume: Resume = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, show the plan and exit.")] = False,
    checked: Annotated[bool, typer.Option("--checked", hidden=True, help="`launch` has made the checks.")] = False,
) -> None:
    """Train, by reinforcement learning or supervised, from a TOML recipe."""
    if dry_run:
        check(file, overrides)
        plan(file, overrides)
        return
    _train(file, overrides or [], resume=resume, overwrite=overwrite, deep=not checked)


@app.command()
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
    _train(file, [*(overrides or ()), *flags], resume=resume, overwrite=overwrite, deep=False)


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def worker(context: typer.Context) -> None:
    """Run a worker of `cosmos-rl controller`, or of another machine; both print the complete command."""
    from cosmos_rl_core.workers.main import run_worker
    from cosmos_rl_core.workers.node import from_arguments

    raise typer.Exit(run_worker(*from_arguments(context.args, program="cosmos-rl worker")))


def _train(file: Path, overrides: list[str], *, resume: str | None, overwrite: bool, deep: bool) -> None:
    """Run a recipe to its end. Exit code: 1 if a worker was lost, 3 if the monitor has ended it, 130 if interrupted.

    deep: check what a run needs on this machine before anything is started.
    """
    folders = import_from(file)
    from cosmos_rl_core.launch.check import check_in_child
    from cosmos_rl_core.launch.open_recipe import open_recipe
    from cosmos_rl_core.launch.supervised.command import run_supervised
    from cosmos_rl_core.recipe.load import load

    loaded = load(file, overrides, continues=not overwrite)
    notes = check_in_child(loaded, resume=resume, overwrite=overwrite) if deep else ()
    opened = replace(open_recipe(loaded.valid(), python_path=folders), notes=(*filter(None, [loaded.engine]), *notes))
    _exit_with(partial(run_supervised, opened, resume=resume, overwrite=overwrite))


@app.command(hidden=True)
def control(link: int, task: int) -> None:
    """Control a run for `cosmos-rl run`, which has started this process; the arguments are inherited descriptors."""
    from cosmos_rl_core.launch.supervised.command import control_supervised

    _exit_with(partial(control_supervised, link, task))


def _exit_with(run: Callable[[], RunResult]) -> None:
    """Run, and exit with the code of the result."""
    from cosmos_rl_core.errors import WorkerFailed
    from cosmos_rl_core.observe.record import STOPPED

    try:
        result = run()
    except WorkerFailed as error:  # it contains the worker's log; the controller's traceback adds nothing
        typer.echo(error_text(error), err=True)
        raise typer.Exit(1) from error
    if result.interrupted or result.stopped:
        raise typer.Exit(130 if result.interrupted else STOPPED)


@app.command()
def check(
    file: Recipe,
    overrides: Overrides = None,
    *,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also check tokenizer, rows, rewards and this machine, as a run does first.")
    ] = False,
) -> None:
    """Validate a recipe: report every error, or show a summary of the run."""
    import_from(file)
    from cosmos_rl_core.launch.check import check as check_config
    from cosmos_rl_core.launch.check import check_in_child
    from cosmos_rl_core.recipe.load import load

    loaded = load(file, overrides or ())
    notes = check_in_child(loaded) if deep else ()
    typer.echo(f"{file}: ok\n{replace(check_config(loaded), notes=notes)}")


@app.command()
def plan(
    file: Recipe,
    overrides: Overrides = None,
    *,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a device, such as 80GiB: show whether the run fits.")
    ] = None,
    gpu: Annotated[
        bool | None,
        typer.Option("--gpu/--no-gpu", help="Count CUDA's own memory; by default if this machine has GPUs."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON instead of tables.")] = False,
) -> None:
    """Show the processes of a run and their memory, without starting anything; exit code 1 if it does not fit."""
    import_from(file)
    import json

    from cosmos_rl_core.plan.memory import parse_bytes
    from cosmos_rl_core.plan.run_plan import plan as plan_config
    from cosmos_rl_core.recipe.load import load

    size, loaded = None if memory is None else parse_bytes(memory), load(file, overrides or ())
    planned = plan_config(loaded.valid(), memory=size, gpu=gpu, engine=loaded.engine)
    typer.echo(json.dumps(planned.as_json(), indent=2) if as_json else planned)
    if planned.memory is not None and planned.memory.fits is False:
        raise typer.Exit(1)


@app.command()
def init(
    domain: Annotated[str, typer.Argument(metavar="DOMAIN", help="What to train, such as llm.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory for run.toml.")],
) -> None:
    """Write a commented starter recipe."""
    from cosmos_rl_core.cli.init import init as write_recipe

    path = write_recipe(domain, directory)
    typer.echo(f"wrote {path}; next: cosmos-rl check {path}")


@app.command()
def plugins() -> None:
    """List the installed plug-ins: domains, transports, rewards and so on."""
    from cosmos_rl_core.observe.console import table
    from cosmos_rl_core.plugins import GROUPS, locate, names

    rows = [(group, name, locate(group, name)) for group in GROUPS for name in names(group)]
    typer.echo(table(rows, header=("group", "name", "from")))


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT", help="A run's directory, or a checkpoint.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Output directory, new or empty.")],
    *,
    step: Annotated[int | None, typer.Option(help="Step of the run's checkpoint; default: the newest.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: unchanged.")] = None,
    max_shard_bytes: Annotated[int, typer.Option(min=1, help="Maximum size of a file.")] = 5_000_000_000,
    merge_adapters: Annotated[
        bool, typer.Option("--merge-adapters/--keep-adapters", help="Write full weights, or only the adapters.")
    ] = True,
    average: inference.Averaged = True,
    format: Annotated[
        str | None, typer.Option(metavar="NAME", help="Format of another program; for robot policies: lerobot, openpi.")
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face model, or in another program's format."""
    add_folders([str(Path.cwd())])
    from cosmos_rl_core.checkpoint.export import export as export_model

    written = export_model(
        source,
        directory,
        step=step,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        merge_adapters=merge_adapters,
        averaged=average,
        format=format,
    )
    typer.echo(f"{written.checkpoint} -> {directory}: {written.num_tensors} tensors, {written.num_bytes:,} bytes")


app.command()(reference.keys)
app.command()(reference.schema)
app.command()(inference.generate)
app.command()(inference.export_episodes)
app.command("eval")(inference.evaluate)
app.command()(inference.serve)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: exit code 2 with one message for a user's error, 130 after Ctrl-C."""
    if os.getpid() == 1:  # of a container: the kernel ignores signals without a handler
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    try:
        app(arguments)
    except ValueError as error:
        from cosmos_rl_core.errors import UserError  # already imported by the module that raised it

        if not isinstance(error, UserError):
            raise
        typer.echo(error_text(error), err=True)
        sys.exit(2)


def error_text(error: Exception) -> str:
    """Return "error: ...", in colours on a terminal unless NO_COLOR is set."""
    head, text = "error:", str(error)
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        head = typer.style(head, fg=typer.colors.RED, bold=True)
        text = re.sub(r"(?m)\^+$", lambda match: typer.style(match[0], fg=typer.colors.RED), text)
        text = re.sub(r"(?m)^( += )(help:)", lambda match: match[1] + typer.style(match[2], bold=True), text)
    return f"{head} {text}"

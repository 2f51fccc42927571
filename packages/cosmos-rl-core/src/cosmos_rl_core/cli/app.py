"""The command `cosmos-rl`. Subcommands import their modules when they run, which keeps --help fast."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cosmos_rl_core.cli import elastic, inference, reference, scale
from cosmos_rl_core.cli.group import CommandGroup
from cosmos_rl_core.cli.inference import Overrides, Recipe
from cosmos_rl_core.imports import add_folders, import_from, pip_install

app = typer.Typer(
    name="cosmos-rl",
    cls=CommandGroup,
    help="Asynchronous reinforcement learning for Physical AI, from TOML recipes.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(version: reference.Version = False) -> None:
    """Asynchronous reinforcement learning for Physical AI, from TOML recipes."""


@app.command()
def run(
    file: Recipe,
    overrides: Overrides = None,
    *,
    resume: elastic.Resume = None,
    overwrite: elastic.Overwrite = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, show the plan and exit.")] = False,
    checked: Annotated[bool, typer.Option("--checked", hidden=True, help="`launch` has made the checks.")] = False,
) -> None:
    """Train, by reinforcement learning or supervised, from a TOML recipe."""
    if dry_run:
        check(file, overrides)
        plan(file, overrides)
        return
    folders, arguments = import_from(file), overrides or []
    elastic.train(file, arguments, folders, resume=resume, overwrite=overwrite, deep=not checked)


app.command()(elastic.launch)
app.command()(elastic.controller)
app.command()(elastic.node)
AS_GIVEN = {"ignore_unknown_options": True, "allow_extra_args": True}
app.command(add_help_option=False, context_settings=AS_GIVEN)(elastic.worker)
app.command()(scale.scale)
app.command()(scale.stop)
app.command()(scale.status)


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
    from cosmos_rl_core.recipe.load import load_config

    size = None if memory is None else parse_bytes(memory)
    planned = plan_config(load_config(file, overrides or ()), memory=size, gpu=gpu)
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
def migrate(
    file: Annotated[Path, typer.Argument(metavar="OLD.toml", help="A recipe of NVIDIA's Cosmos-RL.")],
    *,
    out: Annotated[Path | None, typer.Option(metavar="NEW.toml", help="File to write; default: the terminal.")] = None,
) -> None:
    """Convert a recipe of NVIDIA's Cosmos-RL; exit code 3 if a key of it has no equivalent."""
    from cosmos_rl_core.ops.migrate.command import migrate_file

    migrated = migrate_file(file)
    if out is None:
        typer.echo(migrated.text, nl=False)
    else:
        migrated.write(out)
        typer.echo(f"wrote {out}; next: cosmos-rl check {out}", err=True)
    typer.echo(str(migrated), err=True)
    if migrated.refused:
        raise typer.Exit(3)


@app.command()
def plugins() -> None:
    """List the installed plug-ins: domains, transports, rewards and so on."""
    from cosmos_rl_core.observe.console import table
    from cosmos_rl_core.plugins import GROUPS, locate, names

    rows = [(group, name, locate(group, name)) for group in GROUPS for name in names(group)]
    typer.echo(table(rows, header=("group", "name", "from")))


@app.command()
def reward_server(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Settings in TOML.")] = None,
    *,
    reward: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A reward to serve; may be repeated.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="0 selects a free port and prints it; default: 8300.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="The token's file; created if it is missing.")] = None,
) -> None:
    """Serve rewards to runs on this and other machines; flags override FILE."""
    folders = import_from(file or Path("rewards.toml"))
    from cosmos_rl_core.ops.reward_service.start import run_server
    from cosmos_rl_core.recipe.load import read_toml

    raw = read_toml(file) if file else {}
    flags = {"host": host, "port": port, "token_file": str(token_file) if token_file else None}
    flags["rewards"] = [{"name": name} for name in reward] if reward else None
    raw.update({key: value for key, value in flags.items() if value is not None})
    raise typer.Exit(run_server(raw, file=str(file or ""), say=typer.echo, python_path=folders))


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


@app.command()
def dashboard(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN", help="Runs, or directories with runs; default: runs.")
    ] = None,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on; another one than loopback needs --token-file.")] = (
        "127.0.0.1"
    ),
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Default: 7861, or a free one if it is taken.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help="A secret; default: a new one.")] = None,
) -> None:
    """Show runs in the browser: curves, rollouts, timeline, members, weights, logs; live, or long after their end."""
    from cosmos_rl_core.errors import UserError

    try:
        from cosmos_rl_core.ops.dashboard.server import serve
    except ModuleNotFoundError as error:
        raise UserError(f"the dashboard needs {error.name}: {pip_install('cosmos-rl-core[dashboard]')}") from error
    serve(runs or [Path("runs")], host=host, port=port, token_file=token_file, say=typer.echo)


@app.command()
def doctor(
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN|RECIPE]", help="A run's directory; or a recipe, for its [run] bind, port and output_dir."
        ),
    ] = None,
    *,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Show the stacks of the process that the others of a run wait for.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON instead of text.")] = False,
) -> None:
    """Examine this machine, or find out why a run fails, hangs or does not learn; exit code 1 if something is bad."""
    import json

    from cosmos_rl_core.ops.doctor.machine import examine_machine_of
    from cosmos_rl_core.ops.doctor.report import as_rows, is_bad, render
    from cosmos_rl_core.ops.doctor.run import examine_run

    if target is not None and target.suffix != ".toml":
        diagnosis = examine_run(target, stacks=stacks)
        checks, shown, data = diagnosis.checks, str(diagnosis), diagnosis.as_json()
    else:
        checks = examine_machine_of(target)
        shown, data = render(checks), as_rows(checks)
    typer.echo(json.dumps(data, indent=2) if as_json else shown)
    if is_bad(checks):
        raise typer.Exit(1)


app.command()(reference.keys)
app.command()(reference.schema)
app.command()(inference.generate)
app.command()(inference.export_episodes)
app.command("eval")(inference.evaluate)


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
        typer.echo(elastic.error_text(error), err=True)
        sys.exit(2)

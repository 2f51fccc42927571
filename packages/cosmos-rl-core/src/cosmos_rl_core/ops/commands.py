"""The commands of `ops`, entry points of the group `cosmos_rl.commands`. Imports only typer; each imports its own part.

node, launch, scale, stop, status     runs on clusters, and live ones
dashboard, doctor                     a run as pages, and as a diagnosis
migrate, reward-server                recipes of NVIDIA's Cosmos-RL; rewards as a service
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from cosmos_rl_core.cli.inference import Overrides, Recipe
from cosmos_rl_core.imports import import_from, pip_install

if TYPE_CHECKING:
    from cosmos_rl_core.ops.clusters.launcher import Launched

CHECK_S = 0.5
Numbers = Annotated[
    list[str],
    typer.Argument(
        metavar="[RUN_DIR] ROLE=NUMBER...",
        help="The run's directory, and the number of workers of a role: rollout=4, policy=2.",
    ),
]
Run = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")]
Controller = Annotated[
    str,
    typer.Option(metavar="ADDRESS", help="Instead of RUN_DIR: address of the controller, such as tcp://10.0.0.1:4000."),
]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the run's token. Default: COSMOS_RL_TOKEN, or that of RUN_DIR.")
]
TlsFile = Annotated[Path | None, typer.Option(help="File tls.pem of a run with TLS. Default: COSMOS_RL_TLS, likewise.")]


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
    follow = getattr(find_launcher(on), "follow", None)
    if follow is not None and not detach:
        raise typer.Exit(follow(run))


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
    placed = [*(overrides or ()), *(["run.placement=external"] if external else [])]
    loaded = load(file, placed, continues=True, launched=external)
    if loaded.engine:
        typer.echo(loaded.engine, err=True)
    for note in check_in_child(loaded, resume=resume) if deep else check_names(loaded):
        typer.echo(f"note: {note}", err=True)


def scale(
    arguments: Numbers, *, controller: Controller = "", token_file: TokenFile = None, tls_file: TlsFile = None
) -> None:
    """Start or drain workers of a live run, and wait until they are ready or gone; on a cluster, submit their jobs."""
    import asyncio

    from cosmos_rl_core.ops.clusters.launcher import Launched
    from cosmos_rl_core.ops.clusters.operator import operator_of, request_workers

    run_dir = None if "=" in arguments[0] else Path(arguments[0])
    numbers = parse(arguments if run_dir is None else arguments[1:])
    if run_dir is not None and (launched := Launched.of(run_dir)) is not None and launched.alive():
        typer.echo("\n".join(launched.scale(numbers)) or "nothing to change")
        return
    operator = operator_of(run_dir, controller=controller, token_file=token_file, tls_file=tls_file)
    present = asyncio.run(request_workers(operator, numbers, report=typer.echo))
    typer.echo(f"ready: {', '.join(f'{number} {role}' for role, number in present.items() if number)}")


def stop(
    run_dir: Annotated[Path | None, typer.Argument(metavar="[RUN_DIR]", help="The run's directory.")] = None,
    *,
    now: Annotated[bool, typer.Option("--now", help="End the processes at once; nothing is saved.")] = False,
    controller: Controller = "",
    token_file: TokenFile = None,
    tls_file: TlsFile = None,
) -> None:
    """End a run after the step in work, which is saved; a second time, or with --now, at once."""
    import asyncio

    from cosmos_rl_core.control.address_file import NAME as CONTROLLER_FILE
    from cosmos_rl_core.errors import UserError
    from cosmos_rl_core.ops.clusters.launcher import Launched
    from cosmos_rl_core.ops.clusters.local import end_process
    from cosmos_rl_core.ops.clusters.operator import Unreachable, operator_of, request_end
    from cosmos_rl_core.workers.directory import lock_holder

    operator = partial(operator_of, run_dir, controller=controller, token_file=token_file, tls_file=tls_file)
    if run_dir is None:
        asyncio.run(request_end(operator(), now=now, report=typer.echo))
        typer.echo("the run has ended")
        return
    launched, refused = Launched.of(run_dir), None
    listens = (run_dir / CONTROLLER_FILE).exists()
    try:
        asyncio.run(request_end(operator(), now=now, report=typer.echo))
    except UserError as error:  # it does not listen, it hangs, or this machine does not reach it
        refused = error
    if launched is not None and launched.alive():
        lines = launched.stop(now=now)
    elif refused is None:
        lines = []
    elif isinstance(refused, Unreachable) or (not listens and lock_holder(run_dir) is not None):
        typer.echo(str(refused), err=True)
        lines = end_process(run_dir, now=now)
    elif listens or not is_run(run_dir):
        raise refused
    else:
        lines = []  # it has ended before
    for line in lines:
        typer.echo(line)
    while (launched is not None and launched.alive()) or (lines and lock_holder(run_dir) is not None):
        time.sleep(CHECK_S)
    typer.echo("the run has ended")


def status(run_dir: Run) -> None:
    """Show the jobs, members, samples and waits of a run."""
    from cosmos_rl_core.control.status import live_controller, read_status, render
    from cosmos_rl_core.errors import UserError
    from cosmos_rl_core.observe.record import read_outcome
    from cosmos_rl_core.ops.clusters.launcher import Launched

    launched, jobs = Launched.of(run_dir), {}
    try:
        jobs = launched.alive() if launched is not None else {}
    except UserError as error:  # the platform's commands are on other machines
        typer.echo(f"the states of the jobs are not known here: {error}", err=True)
    if jobs:
        typer.echo("\n".join(["jobs:", *(f"  {name}: {state}" for name, state in jobs.items()), ""]))
    if waits := without_controller(run_dir, launched, has_jobs=bool(jobs)):
        typer.echo(waits)
        return
    recorded, outcome = read_status(run_dir), read_outcome(run_dir)
    now = time.time()
    controller = live_controller(run_dir, seen_s=now - recorded.time)
    typer.echo(render(run_dir, recorded, controller=controller, now=now, outcome=outcome))


def without_controller(run_dir: Path, launched: Launched | None, *, has_jobs: bool) -> str:
    """Return a sentence about a run whose controller has not written a status; empty if it has one, or is no run."""
    from cosmos_rl_core.workers.directory import lock_holder

    written = run_dir / "status.json"
    if written.exists() and (launched is None or written.stat().st_mtime >= launched.at or not has_jobs):
        return ""
    if launched is None:
        holder = lock_holder(run_dir)
        return f"{run_dir}: no controller yet: {holder} starts it" if holder is not None else ""
    if not launched.shares_files:
        return f"{run_dir}: launched on {launched.platform}; its controller writes the status into the run's volume"
    if has_jobs:
        return f"{run_dir}: no controller yet: it starts with its job"
    return f"{run_dir}: launched on {launched.platform}, and ended without a controller: see its launch/*.log"


def is_run(run_dir: Path) -> bool:
    """Return whether a run was ever started in a directory, or launched from it."""
    return any((run_dir / name).exists() for name in ("status.json", "run.lock", "launch/cluster.json"))


def parse(texts: Sequence[str]) -> dict[str, int]:
    """Return the number of workers by role. Raises UserError."""
    from cosmos_rl_core.errors import UserError

    numbers: dict[str, int] = {}
    for text in texts:
        role, _, number = text.partition("=")
        if not number.isdecimal():
            raise UserError(f"{text}: give a role and its number of workers, such as rollout=4")
        if role in numbers:
            raise UserError(f"{text}: {role} is given twice")
        numbers[role] = int(number)
    if not numbers:
        raise UserError("give a role and its number of workers, such as rollout=4")
    return numbers


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
    import asyncio

    from cosmos_rl_core.errors import UserError
    from cosmos_rl_core.ops.reward_service.settings import load_settings
    from cosmos_rl_core.recipe.load import read_toml
    from cosmos_rl_core.reward.remote import server_token

    raw = read_toml(file) if file else {}
    flags = {"host": host, "port": port, "token_file": str(token_file) if token_file else None}
    flags["rewards"] = [{"name": name} for name in reward] if reward else None
    raw.update({key: value for key, value in flags.items() if value is not None})
    settings = load_settings(raw, file=str(file or ""))
    token = server_token(settings.token_file)
    try:
        from cosmos_rl_core.ops.reward_service.server import serve
    except ModuleNotFoundError as error:
        raise UserError(f"the reward server needs {error.name}: {pip_install('cosmos-rl-core[reward]')}") from error
    raise typer.Exit(asyncio.run(serve(settings, token=token, say=typer.echo, python_path=folders)))

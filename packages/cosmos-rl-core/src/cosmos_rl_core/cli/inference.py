"""The commands `generate`, `eval` and `serve`, which sample from a model without training. Imports only typer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from cosmos_rl_core.imports import add_folders, import_from

Recipe = Annotated[Path, typer.Argument(metavar="FILE", help="A TOML recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value ...]", help="Overrides of the recipe."),
]
Prompts = Annotated[
    str, typer.Option(metavar="FILE|TEXT", help="A .jsonl or .txt list, or one prompt; default: [eval.data].")
]
Images = Annotated[
    list[Path] | None, typer.Option("--image", metavar="FILE", help="A picture before the text of the prompt.")
]
Videos = Annotated[list[Path] | None, typer.Option("--video", metavar="FILE", help="A video, likewise.")]
Checkpoint = Annotated[
    str, typer.Option(metavar="RUN|CHECKPOINT", help="A run's directory, or a checkpoint; default: the recipe's model.")
]
Step = Annotated[int | None, typer.Option(help="Step of the run's checkpoint; default: the newest.")]
Averaged = Annotated[
    bool, typer.Option("--average/--trained", help="Use averaged weights, if there are any, or the trained ones.")
]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Output directory; default: in the run's directory.")]
NumSamples = Annotated[int, typer.Option(help="Rollouts per prompt.")]
NumGpus = Annotated[int, typer.Option(help="Total GPUs, or processes on a machine without GPUs.")]
TpSize = Annotated[int, typer.Option(help="GPUs of one engine instance; num_gpus / tp_size instances run.")]
AtOnce = Annotated[
    int | None, typer.Option(min=1, help="Prompts in work in an instance; default: 1 for media, 64 for text.")
]
Media = Annotated[bool, typer.Option("--media/--no-media", help="Whether to write images and videos.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the results of another request in DIR.")]


def export_episodes(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Output of cosmos-rl generate or eval.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory for one .rrd file per episode.")],
    *,
    rerun: Annotated[bool, typer.Option("--rerun", help="As Rerun recordings, the only format so far.")] = False,
) -> None:
    """Convert episodes of robot policies for a viewer: cameras, state, actions, rewards, success."""
    from cosmos_rl_core.errors import UserError
    from cosmos_rl_core.inference.episodes import export_episodes as export

    if not rerun:
        raise UserError("name the format: --rerun")
    typer.echo(f"{len(export(directory, out))} episodes -> {out}; open one with: rerun FILE.rrd")


def generate(
    file: Recipe,
    overrides: Overrides = None,
    *,
    prompts: Prompts = "",
    image: Images = None,
    video: Videos = None,
    checkpoint: Checkpoint = "",
    step: Step = None,
    average: Averaged = True,
    out: Out = None,
    num_samples: NumSamples = 1,
    num_gpus: NumGpus = 1,
    tp_size: TpSize = 1,
    prompts_at_once: AtOnce = None,
    media: Media = True,
    overwrite: Overwrite = False,
) -> None:
    """Sample rollouts of a model or checkpoint into rollouts.jsonl and media/; rows already there are kept."""
    folders = import_from(file)
    from cosmos_rl_core.inference.generate import generate as generate_rollouts
    from cosmos_rl_core.inference.request import Instances, Request

    request = Request(
        checkpoint=checkpoint,
        step=step,
        averaged=average,
        prompts=prompts,
        images=tuple(image or ()),
        videos=tuple(video or ()),
        out=out,
        num_samples=num_samples,
        instances=Instances(num_gpus=num_gpus, tp_size=tp_size),
        rows_at_once=prompts_at_once,
        media=media,
        overwrite=overwrite,
    )
    with _exit_on_failure():
        generated = generate_rollouts(file, overrides or (), request=request, python_path=folders, say=_say)
    for line in generated.lines if generated.num_rows == 1 else ():
        if line.get("response"):
            typer.echo(line["response"])
    typer.echo(f"{generated.num_done} of {generated.num_rows} prompts: {generated.directory / 'rollouts.jsonl'}")
    _end(generated.failed, none_left=not generated.num_done, interrupted=generated.interrupted)


def evaluate(
    file: Recipe,
    overrides: Overrides = None,
    *,
    checkpoint: Checkpoint = "",
    step: Step = None,
    average: Averaged = True,
    out: Out = None,
    num_samples: NumSamples = 1,
    num_gpus: NumGpus = 1,
    tp_size: TpSize = 1,
    prompts_at_once: AtOnce = None,
    media: Media = True,
    overwrite: Overwrite = False,
) -> None:
    """Evaluate a model or checkpoint on [eval.data] into eval.json: rewards, or the loss of a supervised recipe."""
    folders = import_from(file)
    from cosmos_rl_core.inference.evaluate import evaluate as measure
    from cosmos_rl_core.inference.request import Instances, Request

    request = Request(
        checkpoint=checkpoint,
        step=step,
        averaged=average,
        out=out,
        num_samples=num_samples,
        instances=Instances(num_gpus=num_gpus, tp_size=tp_size),
        rows_at_once=prompts_at_once,
        media=media,
        overwrite=overwrite,
    )
    with _exit_on_failure():
        measured = measure(file, overrides or (), request=request, python_path=folders, say=_say)
    if measured.metrics:
        typer.echo(f"{measured.weights.name} on {measured.rows} rows\n{measured}")
    if not measured.interrupted:
        typer.echo(f"{measured.directory / 'eval.json'}")
    _end(measured.failed, none_left=not measured.metrics, interrupted=measured.interrupted)


def serve(
    checkpoint: Annotated[
        str, typer.Argument(metavar="RUN|CHECKPOINT|MODEL", help="A run's directory, a checkpoint or a model's folder.")
    ],
    overrides: Overrides = None,
    *,
    step: Step = None,
    average: Averaged = True,
    engine: Annotated[str, typer.Option(help="torch or vllm; default: the recipe's.")] = "",
    num_gpus: Annotated[int, typer.Option(min=1, help="GPUs of the engine, which shards the model over them.")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 selects a free port and prints it.")] = 8000,
    name: Annotated[str, typer.Option(help="Name of the model for clients; default: the folder's.")] = "",
    token_file: Annotated[
        Path | None, typer.Option(help="Requests need its token; created if it is missing. Not needed on loopback.")
    ] = None,
) -> None:
    """Serve a checkpoint by OpenAI's interfaces, for evaluators and clients."""
    add_folders([str(Path.cwd())])
    from cosmos_rl_core.inference.serve import ServeRequest
    from cosmos_rl_core.inference.serve import serve as serve_model

    request = ServeRequest(
        checkpoint=checkpoint,
        step=step,
        averaged=average,
        engine=engine,
        num_gpus=num_gpus,
        host=host,
        port=port,
        name=name,
        token_file=token_file,
    )
    serve_model(request, overrides or (), say=_say)
    raise typer.Exit(130)


@contextmanager
def _exit_on_failure() -> Iterator[None]:
    """Exit with code 1 and the error of an instance that died."""
    from cosmos_rl_core.errors import WorkerFailed

    try:
        yield
    except WorkerFailed as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _end(failed: Mapping[int, str], *, none_left: bool, interrupted: bool) -> None:
    """Print the first failures; exit code 130 after Ctrl-C, 1 without any result."""
    for sample, reason in list(failed.items())[:3]:
        _say(f"row {sample}: {reason}")
    if len(failed) > 3:
        _say(f"and {len(failed) - 3} more rows without rollouts; rollouts.jsonl has the reasons")
    if interrupted:
        _say("stopped; finished rows are kept, and the same command continues from there")
        raise typer.Exit(130)
    if none_left:
        raise typer.Exit(1)


def _say(text: str) -> None:
    typer.echo(text, err=True)

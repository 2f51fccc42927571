"""The commands `generate` and `eval`, which draw rollouts of a model as it is. Typer alone is imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from cosmos_rl_core.python_path import import_from

Recipe = Annotated[Path, typer.Argument(metavar="FILE", help="A TOML recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value ...]", help="Values that replace the recipe's."),
]
Prompts = Annotated[
    str, typer.Option(metavar="FILE|TEXT", help="A .jsonl or .txt list, or one prompt; [eval.data] without it.")
]
Checkpoint = Annotated[
    str, typer.Option(metavar="RUN|CHECKPOINT", help="A run's directory, or a checkpoint; the recipe's model without.")
]
Step = Annotated[int | None, typer.Option(help="Which checkpoint of the run; the newest without it.")]
Averaged = Annotated[
    bool, typer.Option("--average/--trained", help="The average of the weights, where there is one, or the trained.")
]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Where the files go; in the run's directory without it.")]
NumSamples = Annotated[int, typer.Option(help="Rollouts of each prompt.")]
NumGpus = Annotated[int, typer.Option(help="GPUs in all, or processes on a machine without.")]
TpSize = Annotated[int, typer.Option(help="GPUs of one instance of the engine; num_gpus / tp_size of them run.")]
AtOnce = Annotated[
    int | None, typer.Option(min=1, help="Prompts in work in an instance; without it 1 for media and 64 for text.")
]
Media = Annotated[bool, typer.Option("--media/--no-media", help="Write images and videos, or leave them out.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what another request has left in DIR.")]


def generate(
    file: Recipe,
    overrides: Overrides = None,
    *,
    prompts: Prompts = "",
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
    """Draw rollouts of a model or checkpoint into rollouts.jsonl and media/; what is there already is kept."""
    folders = import_from(file)
    from cosmos_rl_core.inference.generate import generate as draw
    from cosmos_rl_core.inference.layout import Instances
    from cosmos_rl_core.inference.request import Request

    request = Request(
        checkpoint=checkpoint,
        step=step,
        averaged=average,
        prompts=prompts,
        out=out,
        num_samples=num_samples,
        instances=Instances(num_gpus=num_gpus, tp_size=tp_size),
        rows_at_once=prompts_at_once,
        media=media,
        overwrite=overwrite,
    )
    with _told():
        drawn = draw(file, overrides or (), request=request, python_path=folders, say=_say)
    typer.echo(f"{drawn.num_done} of {drawn.num_rows} prompts: {drawn.directory / 'rollouts.jsonl'}")
    _end(drawn.failed, none_left=not drawn.num_done, interrupted=drawn.interrupted)


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
    """Measure a model or checkpoint on [eval.data] into eval.json: rewards, or the loss of a supervised recipe."""
    folders = import_from(file)
    from cosmos_rl_core.inference.evaluate import evaluate as measure
    from cosmos_rl_core.inference.layout import Instances
    from cosmos_rl_core.inference.request import Request

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
    with _told():
        measured = measure(file, overrides or (), request=request, python_path=folders, say=_say)
    if measured.metrics:
        typer.echo(f"{measured.weights.name} on {measured.rows} rows\n{measured}")
    if not measured.interrupted:
        typer.echo(f"{measured.directory / 'eval.json'}")
    _end(measured.failed, none_left=not measured.metrics, interrupted=measured.interrupted)


@contextmanager
def _told() -> Iterator[None]:
    """Exit code 1 with the last words of an instance that died."""
    from cosmos_rl_core.errors import WorkerFailed

    try:
        yield
    except WorkerFailed as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _end(failed: Mapping[int, str], *, none_left: bool, interrupted: bool) -> None:
    """Say what went wrong; exit code 130 after Ctrl-C, 1 where nothing came of it."""
    for sample, reason in list(failed.items())[:3]:
        _say(f"row {sample}: {reason}")
    if len(failed) > 3:
        _say(f"and {len(failed) - 3} more rows without rollouts; rollouts.jsonl has the reasons")
    if interrupted:
        _say("stopped; what is done is kept, and the same command goes on from there")
        raise typer.Exit(130)
    if none_left:
        raise typer.Exit(1)


def _say(text: str) -> None:
    typer.echo(text, err=True)

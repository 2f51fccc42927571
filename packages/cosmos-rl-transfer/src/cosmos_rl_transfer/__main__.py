"""The command `python -m cosmos_rl_transfer`. A command imports its modules when it runs."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Literal

import typer

from cosmos_rl_core.weight_sync import BUCKET_BYTES

app = typer.Typer(
    name="python -m cosmos_rl_transfer",
    help="Weights from any trainer layout to any rollout layout.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

LAYOUT = "such as fsdp8, 'pp2 hsdp4x8 tp2 ep8' or 'tp4 x 2' (2 replicas)"
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON instead of a table.")]


@app.command()
def plan(
    *,
    source: Annotated[str, typer.Option("--from", metavar="LAYOUT", help=f"The trainers, {LAYOUT}.")],
    target: Annotated[str, typer.Option("--to", metavar="LAYOUT", help="The rollouts, likewise.")],
    shapes: Annotated[
        str,
        typer.Option(metavar="MODEL", help="A preset such as llama-8b, or a safetensors index, file or config.json."),
    ],
    wire: Annotated[str | None, typer.Option(metavar="DTYPE", help="Wire dtype of floats, such as bfloat16.")] = None,
    bucket_bytes: Annotated[int, typer.Option(help="Maximum bytes of a bucket.")] = BUCKET_BYTES,
    relay: Annotated[
        Literal["auto", "on", "off"], typer.Option(help="Whether rollout replicas relay buckets to one another.")
    ] = "auto",
    ranks_per_host: Annotated[
        int, typer.Option(min=1, help="Ranks per machine; trainers and rollouts are on different machines.")
    ] = 8,
    gbit: Annotated[float, typer.Option(min=0.001, help="Speed of a rank's network card, Gbit/s each way.")] = 400.0,
    as_json: AsJson = False,
) -> None:
    """Print the bytes of a sync between two layouts, and their ratio to the lower bound. Starts nothing."""
    from cosmos_rl_transfer.layout.shapes import read_shapes
    from cosmos_rl_transfer.layout.spread import parse_side
    from cosmos_rl_transfer.planning.forecast import forecast

    estimate = forecast(
        read_shapes(shapes),
        parse_side(source),
        parse_side(target),
        wire_dtype=wire,
        bucket_bytes=bucket_bytes,
        relay=relay,
        ranks_per_host=ranks_per_host,
        gbit=gbit,
    )
    typer.echo(json.dumps(estimate.as_json(), indent=2) if as_json else estimate)


@app.command()
def doctor() -> None:
    """Print the transports that work on this machine, and their speed between two processes."""
    from cosmos_rl_transfer.doctor import diagnose, render

    typer.echo(render(diagnose()))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: exit code 2 with one message for a user's error."""
    from cosmos_rl_core.errors import UserError
    from cosmos_rl_transfer.errors import LayoutError

    try:
        app(arguments)
    except (LayoutError, UserError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()

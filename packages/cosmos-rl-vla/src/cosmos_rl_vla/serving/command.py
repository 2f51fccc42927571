"""The command `serve-policy`, an entry point of the group `cosmos_rl.commands`. Imports only typer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cosmos_rl_core.cli.inference import Averaged, Overrides, Step
from cosmos_rl_core.imports import add_folders

Source = Annotated[
    str, typer.Argument(metavar="RUN|CHECKPOINT|MODEL", help="A run's directory, a checkpoint or a model's folder.")
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="Of openpi's protocol and the page; 0 selects a free one and prints it.")
]
LeRobotPort = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Serve lerobot's robot client too, on this port.")
]
Realtime = Annotated[
    bool, typer.Option("--rtc/--no-rtc", help="Let chunks for lerobot's client continue the last one.")
]
Cameras = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A camera, repeated in the order of training; default: the recipe's."),
]
StateKeys = Annotated[
    list[str] | None, typer.Option(metavar="KEY", help="A part of proprioception; may be repeated. Default: state.")
]
Prompt = Annotated[str, typer.Option(help="Instruction of observations without one.")]
StateLimit = Annotated[
    float, typer.Option(min=0, help="Refuse states beyond this after normalisation, where training has 1; 0: none.")
]
MaxBatch = Annotated[int, typer.Option(min=1, help="Robots in one pass of the policy, at most.")]
Threads = Annotated[int, typer.Option(min=0, help="Threads of the policy on a CPU; 0: all cores.")]
TokenFile = Annotated[
    Path | None, typer.Option(help="Clients need its token; created if it is missing. Not needed on loopback.")
]
WithoutToken = Annotated[
    bool, typer.Option("--without-token", help="Let other machines ask without a token, as lerobot's client does.")
]


def serve_policy(
    checkpoint: Source,
    overrides: Overrides = None,
    *,
    step: Step = None,
    average: Averaged = True,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    lerobot_port: LeRobotPort = None,
    rtc: Realtime = True,
    camera: Cameras = None,
    state: StateKeys = None,
    prompt: Prompt = "",
    state_limit: StateLimit = 10.0,
    max_batch: MaxBatch = 16,
    threads: Threads = 0,
    token_file: TokenFile = None,
    without_token: WithoutToken = False,
) -> None:
    """Serve a robot policy to openpi's and lerobot's clients."""
    add_folders([str(Path.cwd())])
    from cosmos_rl_vla.serving.serve import ServePolicyRequest
    from cosmos_rl_vla.serving.serve import serve_policy as serve

    request = ServePolicyRequest(
        checkpoint=checkpoint,
        step=step,
        averaged=average,
        host=host,
        port=port,
        lerobot_port=lerobot_port,
        realtime=rtc,
        cameras=tuple(camera or ()),
        state_keys=tuple(state or ("state",)),
        prompt=prompt,
        state_limit=state_limit,
        max_batch=max_batch,
        threads=threads,
        token_file=token_file,
        without_token=without_token,
    )
    serve(request, overrides or (), say=typer.echo)
    raise typer.Exit(130)

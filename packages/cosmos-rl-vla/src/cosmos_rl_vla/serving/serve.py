"""`cosmos-rl serve-policy`: loads a robot policy, and serves it until it is interrupted."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cosmos_rl_core.checkpoint.manifest import read_origin
from cosmos_rl_core.checkpoint.restore import load_weights
from cosmos_rl_core.errors import UserError, one_line_errors
from cosmos_rl_core.imports import pip_install, quiet_torchao
from cosmos_rl_core.inference.request import GenerationWeights, Request
from cosmos_rl_core.launch.interrupts import on_interrupt, run_to_end
from cosmos_rl_core.parallel.device import own_device, require_gpus, use_device
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.wire.handshake import read_secret, write_secret
from cosmos_rl_core.wire.listening import Address, bound_address, is_loopback, listen
from cosmos_rl_vla.config import VLAModelConfig
from cosmos_rl_vla.models.families import make
from cosmos_rl_vla.models.loaded import LoadedPolicy
from cosmos_rl_vla.models.pi.export import camera_names
from cosmos_rl_vla.serving.batching import RobotBatcher
from cosmos_rl_vla.serving.observations import ObservationLayout
from cosmos_rl_vla.serving.served import ServedPolicy
from cosmos_rl_vla.sims.base import SimSpec
from cosmos_rl_vla.sims.pool.pool import SimulatorPool

REPORT_S = 60.0
"""Seconds between two printed tables of latencies, if there were requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePolicyRequest:
    """The options of the command."""

    checkpoint: str
    """A run's directory, a checkpoint, or the folder of a model."""
    step: int | None = None
    averaged: bool = True
    host: str = "127.0.0.1"
    port: int = 8000
    lerobot_port: int | None = None
    """None: openpi's protocol alone."""
    realtime: bool = True
    """Chunks for lerobot's clients continue those before."""
    cameras: Sequence[str] = ()
    """In the model's order; empty for those of the recipe."""
    state_keys: Sequence[str] = ("state",)
    prompt: str = ""
    state_limit: float = 10.0
    max_batch: int = 16
    threads: int = 0
    """Of the policy on a CPU; 0 for all cores."""
    token_file: Path | None = None
    without_token: bool = False
    """Other machines need no token."""


@one_line_errors
def serve_policy(request: ServePolicyRequest, overrides: Sequence[str] = (), *, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises UserError for what cannot be served, and for an address in use."""
    _check_access(request)
    if request.token_file is not None and not request.token_file.exists():
        write_secret(request.token_file, secrets.token_hex(32))
    token = read_secret(request.token_file) if request.token_file else ""
    run_to_end(_serve(request, overrides, token=token, say=say))


def _check_access(request: ServePolicyRequest) -> None:
    """Raise UserError if other machines could ask the policy without a token, and nobody said that they may."""
    if request.token_file is not None and request.lerobot_port is not None:
        raise UserError("--token-file with --lerobot-port: lerobot's client has no token; leave one of them out")
    if is_loopback(request.host) or request.token_file is not None or request.without_token:
        return
    advice = "add --without-token" if request.lerobot_port is not None else "add --token-file FILE, or --without-token"
    raise UserError(f"--host {request.host} can be reached from other machines: {advice}")


async def _serve(
    request: ServePolicyRequest, overrides: Sequence[str], *, token: str, say: Callable[[str], None]
) -> None:
    try:
        from cosmos_rl_vla.serving.lerobot import lerobot_server
        from cosmos_rl_vla.serving.openpi import openpi_server
    except ModuleNotFoundError as error:
        raise UserError(f"serve-policy needs {error.name}: {pip_install('cosmos-rl-vla[serve]')}") from error
    stopped, remote = asyncio.Event(), not is_loopback(request.host)
    on_interrupt(stopped.set)
    async with AsyncExitStack() as parts:
        compute = parts.enter_context(ThreadPoolExecutor(1, thread_name_prefix="compute"))
        address = Address(host=request.host, port=request.port)
        # before the weights are read: a busy port is soon said
        listener = parts.enter_context(listen(address, allow_remote=remote))
        policy = await asyncio.get_running_loop().run_in_executor(compute, load_policy, request, overrides)
        batcher = RobotBatcher(policy, compute=compute, max_batch=request.max_batch, log=say)
        passes = asyncio.create_task(batcher.run(), name="passes")
        reports = asyncio.create_task(_report(batcher, say), name="reports")
        parts.callback(passes.cancel)
        parts.callback(reports.cancel)
        await parts.enter_async_context(openpi_server(batcher, listener, token=token, say=say))
        url = str(bound_address(listener, requested=address)).replace("tcp://", "ws://")
        if request.lerobot_port is not None:
            place = f"{request.host}:{request.lerobot_port}"
            taken = await parts.enter_async_context(lerobot_server(batcher, place, realtime=request.realtime, say=say))
            say(f"{policy.name}: {request.host}:{taken} (lerobot, --pretrained_name_or_path={policy.name})")
        say(f"{policy.name}: {url} (openpi), page {url.replace('ws://', 'http://')}/")
        await asyncio.wait([passes, asyncio.create_task(stopped.wait())], return_when=asyncio.FIRST_COMPLETED)
        if passes.done():
            passes.result()  # raises its error
        say(f"stopped\n{batcher.latencies.table()}")


async def _report(batcher: RobotBatcher, say: Callable[[str], None]) -> None:
    """Print the latencies once a minute, if there were requests."""
    reported = 0
    while True:
        await asyncio.sleep(REPORT_S)
        if batcher.latencies.requests > reported:
            reported = batcher.latencies.requests
            say(batcher.latencies.table())


def load_policy(request: ServePolicyRequest, overrides: Sequence[str] = ()) -> ServedPolicy:
    """Load and warm up what the request names; in the thread that will run it. Raises UserError."""
    quiet_torchao()  # transformers imports it
    require_gpus(os.environ)
    use_device()
    torch.set_num_threads(request.threads or len(os.sched_getaffinity(0)))
    folder = Path(request.checkpoint).expanduser()
    if (folder / "config.json").is_file():
        if request.step is not None:
            raise UserError(f"--step {request.step}: {folder} is a model, not the directory of a run")
        # a recipe needs rows and an end, which serving does not read
        recipe: dict[str, Any] = {"run": {"domain": "vla", "max_steps": 1}, "model": {"path": str(folder)}}
        recipe["data"] = {"simulator": "none", "tasks": ["none"]}
        config, is_run, name = load_config(recipe, overrides, generating=True), False, folder.resolve().name
        loaded = _of_folder(config.model)
    else:
        weights = GenerationWeights.find(Request(checkpoint=request.checkpoint, step=request.step))
        origin = read_origin(weights.folder)
        if origin.recipe.get("run", {}).get("domain") != "vla":
            raise UserError(f"{request.checkpoint} is no robot policy; serve language models with cosmos-rl serve")
        config, is_run = load_config(dict(origin.recipe), overrides, generating=True), True
        loaded = _of_checkpoint(config.model, weights, averaged=request.averaged)
        name = f"{config.run.name}_{weights.name}"
    policy = ServedPolicy(loaded, _layout(loaded, config, request, is_run=is_run), name=name)
    policy.warm_up(most=request.max_batch)
    return policy


def _of_folder(model: VLAModelConfig) -> LoadedPolicy:
    loaded = _placed(model)
    loaded.fill()
    return loaded


def _of_checkpoint(model: VLAModelConfig, weights: GenerationWeights, *, averaged: bool) -> LoadedPolicy:
    """Build the model by the checkpoint's own files, or with adapters by its base, and read its weights."""
    policy = Path(weights.folder) / "policy"
    if not policy.is_dir():
        raise UserError(
            f"{weights.folder} is not on this machine: copy it, or serve a folder that cosmos-rl export wrote"
        )
    if model.lora is not None:
        loaded = _of_folder(model)
    else:
        loaded = _placed(model.model_copy(update={"path": str(policy), "stats": ""}))
    load_weights(weights.folder, loaded.trained_weights() if model.lora else loaded.weights(), averaged=averaged)
    return loaded


def _placed(model: VLAModelConfig) -> LoadedPolicy:
    loaded = make(model)
    loaded.cast_parameters(getattr(torch, model.dtype))
    loaded.model.to(own_device())
    return loaded


def _layout(loaded: LoadedPolicy, config: RunConfig, request: ServePolicyRequest, *, is_run: bool) -> ObservationLayout:
    """Return what the policy takes, by the options, else the recipe or its simulator. Raises UserError."""
    spec, cameras = None, tuple(request.cameras) if loaded.model.sees else ()
    if is_run and config.data.simulator and not request.cameras:
        spec = _spec_of(config)
        cameras = tuple(spec.cameras)
    elif loaded.model.sees:
        cameras = cameras or tuple(camera_names(config.model, config.data))
        if not cameras:
            raise UserError(
                f"{request.checkpoint} does not say what its cameras are called: add --camera NAME for each, in the "
                "order of training; a robot sends it as NAME, observation/NAME or observation.images.NAME"
            )
    known = (spec and spec.state_dim, len(loaded.stats.state or ()), config.model.state_dim, loaded.model.state_dim)
    state_dim = next((dim for dim in known if dim), 0)
    return ObservationLayout(
        cameras=cameras,
        image_size=next(iter(spec.cameras.values()), None) if spec else None,
        state_keys=tuple(request.state_keys) if state_dim else (),
        state_dim=state_dim,
        action_dim=loaded.model.action_dim,
        horizon=loaded.model.horizon,
        stats=loaded.stats,
        prompt=request.prompt,
        state_limit=request.state_limit,
    )


def _spec_of(config: RunConfig) -> SimSpec:
    """Return the sizes of the recipe's simulator, from a process that is then ended."""
    python = config.rollout.options.get("python")
    try:
        pool = SimulatorPool(
            config.data.simulator, options=config.data.options, groups=1, slots_per_group=1, python=python
        )
    except UserError as error:
        raise UserError(f"{error}; or add --camera NAME for each camera, to serve without the simulator") from error
    try:
        return pool.spec
    finally:
        pool.close()

"""`cosmos-rl serve`: a checkpoint behind OpenAI's interfaces, without a run, until it is interrupted."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cosmos_rl_core import assemble
from cosmos_rl_core.algorithms.table import find_algorithm
from cosmos_rl_core.checkpoint.manifest import read_origin
from cosmos_rl_core.errors import UserError, one_line_errors
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.inference.request import GenerationWeights, Request
from cosmos_rl_core.inference.worker import load_engine, prepare_engine
from cosmos_rl_core.launch.interrupts import on_interrupt, run_to_end
from cosmos_rl_core.recipe.load import SFT_SAMPLED, load_config, load_domain
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.recipe.sections import RolloutParallelSection
from cosmos_rl_core.wire.handshake import read_secret, write_secret
from cosmos_rl_core.wire.listening import Address, is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """The options of the command."""

    checkpoint: str
    """A run's directory, a checkpoint, or the folder of a Hugging Face model."""
    step: int | None = None
    averaged: bool = True
    """As of `Request`."""
    engine: str = ""
    """Empty for the recipe's."""
    num_gpus: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    name: str = ""
    """Of the model, for clients; empty for the folder's."""
    token_file: Path | None = None
    """None: requests need no token."""


@one_line_errors
def serve(request: ServeRequest, overrides: Sequence[str] = (), *, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises UserError for what cannot be served, and for an address in use."""
    remote = not is_loopback(request.host)
    if remote and request.token_file is None:
        raise UserError(f"--host {request.host} can be reached from other machines: add --token-file FILE")
    config, weights = _served(request, overrides)
    if request.token_file is not None and not request.token_file.exists():
        write_secret(request.token_file, secrets.token_hex(32))
    token = read_secret(request.token_file) if request.token_file else ""
    run_to_end(_serve(config, weights, request, token=token, say=say))


def _served(request: ServeRequest, overrides: Sequence[str]) -> tuple[RunConfig, GenerationWeights]:
    """Return the recipe of what is served, and its weights. Raises UserError."""
    folder = Path(request.checkpoint)
    if (folder / "config.json").is_file():
        if request.step is not None:
            raise UserError(f"--step {request.step}: {request.checkpoint} is a model, not the directory of a run")
        weights, model = GenerationWeights(), str(folder.resolve())
        # a recipe needs rows and an end, which serving does not read
        recipe: dict[str, Any] = {"run": {"domain": "llm", "max_steps": 1}, "model": {"path": model}}
        recipe["data"] = {"path": model}
    else:
        weights = GenerationWeights.find(Request(checkpoint=request.checkpoint, step=request.step))
        recipe = dict(read_origin(weights.folder).recipe)
        if find_algorithm(recipe["algorithm"]["name"]).rows:  # a checkpoint has all sections, a recipe may not
            recipe = {name: table for name, table in recipe.items() if name not in SFT_SAMPLED}
    if request.engine and request.engine != recipe.get("rollout", {}).get("engine"):
        recipe["rollout"] = {**recipe.get("rollout", {}), "engine": request.engine, "options": {}}
    config = load_config(recipe, overrides, generating=True)
    domain = load_domain(config.run.domain)
    assemble.look_up_engine(config.rollout.engine, domain)
    try:
        options = assemble.engine_options(config, domain)
        options = assemble.spread_engine(config, domain, options, tp=request.num_gpus, pp=None)
    except UserError as error:
        raise UserError(f"--num-gpus {request.num_gpus}: {error}") from error
    rollout = config.rollout.model_copy(update={"options": dict(options), "parallel": RolloutParallelSection()})
    return config.model_copy(update={"rollout": rollout}), weights


async def _serve(
    config: RunConfig, weights: GenerationWeights, request: ServeRequest, *, token: str, say: Callable[[str], None]
) -> None:
    stopped = asyncio.Event()
    on_interrupt(stopped.set)
    loop, threads = asyncio.get_running_loop(), config.rollout.threads or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(1, thread_name_prefix="compute") as compute:
        engine = await loop.run_in_executor(compute, partial(prepare_engine, config, threads=threads))
        async with AsyncExitStack() as parts:
            parts.push_async_callback(engine.close)
            await load_engine(config, engine, weights.folder, version=weights.version, averaged=request.averaged)
            name = request.name or Path(config.model.path).name
            try:
                from cosmos_rl_core.wire.http_server import serving

                app = load_domain(config.run.domain).build_server(config, engine, name=name, token=token)
            except ImportError as error:
                raise UserError(f"serve needs {error.name}: {pip_install('cosmos-rl-llm[agents]')}") from error
            address, remote = Address(host=request.host, port=request.port), not is_loopback(request.host)
            url = await parts.enter_async_context(serving(app, address, allow_remote=remote, log=say))
            say(f"{name} ({weights.name}, {config.rollout.engine}): {url}/v1")
            await stopped.wait()
            say("stopped")
